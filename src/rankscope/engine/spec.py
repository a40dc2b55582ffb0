"""The specification of a sweep: which cells, and what is measured of each.

    metrics = ["relative_mu", "entropy"]    # as in `measure`; also: arithmetic, check
    certify = true                          # and `certify`'s summary of each cell
    paths = true                            # and path shares by length

    [grid]                                  # every combination
    model = "bert-base"
    depth = [6, 12, 24]
    skip = [0.0, 0.5, 1.0]
    seed = {range = 5}

    [[list]]                                # or cells one by one
    model = "minilm"

    [sample]                                # or so many draws
    number = 200
    sample_seed = 0
    skip = {low = 0.0, high = 1.0}
    width = {low = 32, high = 512, log = true}
    mask = ["complete", "causal"]

Several of them together are one sweep, each cell once. What stands before the tables holds for all cells:
`[all] model = "bert-tiny"`.
"""

import math
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rankscope.engine.factors import Cell, checked
from rankscope.errors import FileError, SweepError, one_of
from rankscope.metrics import metric
from rankscope.profiles import ARITHMETICS, DEFAULT_METRICS

MOST = 1_000_000
"""Cells of a sweep."""
PARTS = ("all", "grid", "list", "sample")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured of every cell."""

    metrics: tuple[str, ...] = tuple(DEFAULT_METRICS)
    arithmetic: str = "deviation"
    check: bool = True
    certify: bool = False
    paths: bool = False

    def __post_init__(self) -> None:
        for name in self.metrics:
            metric(name)
        if not self.metrics:
            raise SweepError("metrics must name at least one; got none")
        if self.arithmetic not in ARITHMETICS:
            raise SweepError(one_of("arithmetic", self.arithmetic, ARITHMETICS))
        for name in ("check", "certify", "paths"):
            if type(getattr(self, name)) is not bool:
                raise SweepError(f"{name} must be true or false; got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Spec:
    """The cells, each once, in the order that was asked for."""

    cells: tuple[Cell, ...]
    asked: Asked

    @property
    def factors(self) -> list[str]:
        """Those that some cell has."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell))

    @property
    def varied(self) -> list[str]:
        """Those that differ from cell to cell."""
        return [name for name in self.factors if len({cell.get(name) for cell in self.cells}) > 1]


def read_spec(path: str | Path) -> Spec:
    """The specification in a TOML file."""
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"a specification must be a TOML file; {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} must be TOML; {error}") from error
    return spec_of(given)


def spec_of(given: Mapping[str, Any]) -> Spec:
    """The same from a dictionary."""
    names = [*PARTS, *Asked.__dataclass_fields__]
    for name in given:
        if name not in names:
            raise SweepError(one_of("a part of a sweep", name, names))
    asked = {name: given[name] for name in Asked.__dataclass_fields__ if name in given}
    if "metrics" in asked:
        named = asked["metrics"]
        if not isinstance(named, str | list | tuple) or not all(isinstance(each, str) for each in named):
            raise SweepError(f'metrics must be names, as ["relative_mu"]; got {named!r}')
        asked["metrics"] = tuple([named] if isinstance(named, str) else named)
    common = given.get("all", {})
    for name in ("all", "grid", "sample"):
        if not isinstance(given.get(name, {}), Mapping):
            raise SweepError(f"{name} must be a table of factors; got a {type(given[name]).__name__}")
    found: dict[str, Cell] = {}
    for cell in _cells(given):
        whole = checked({**common, **cell})
        found.setdefault(repr(sorted(whole.items())), whole)
        if len(found) > MOST:
            raise SweepError(
                f"a sweep must have at most {MOST:,} cells; the parts of this one have more together"
            )
    if not found:
        raise SweepError(
            "a sweep must have at least one cell; it has none: fill [grid], [[list]] or [sample]"
        )
    return Spec(tuple(found.values()), Asked(**asked))


def _cells(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "grid" in given:
        yield from _grid(given["grid"])
    listed = given.get("list", [])
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise SweepError("list must be tables of factors, [[list]]; got something else")
    yield from listed
    if "sample" in given:
        yield from _sample(given["sample"])
    if not {"grid", "list", "sample"} & given.keys():
        yield {}


def _grid(grid: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    levels = {name: _levels(name, each) for name, each in grid.items()}
    number = math.prod(len(each) for each in levels.values())
    if number == 0:
        empty = next(name for name, each in levels.items() if not each)
        raise SweepError(f"every factor of a grid must have a value; {empty} has none")
    if number > MOST:
        sizes = " x ".join(f"{len(each)} {name}" for name, each in levels.items())
        raise SweepError(
            f"a sweep must have at most {MOST:,} cells; this grid has {number:,} ({sizes}): fewer levels, or "
            "[sample]"
        )
    for values in product(*levels.values()):
        yield dict(zip(levels, values, strict=True))


def _levels(name: str, given: Any) -> list[Any]:
    if isinstance(given, list):
        return given
    if isinstance(given, Mapping):
        if set(given) <= {"range"} and isinstance(given.get("range"), int | list):
            bounds = given["range"] if isinstance(given["range"], list) else [given["range"]]
            whole = all(type(each) is int for each in bounds) and 1 <= len(bounds) <= 3
            if whole and bounds[2:] != [0]:
                if len(found := range(*bounds)) > MOST:
                    raise SweepError(
                        f"{name} must have at most {MOST:,} levels; its range has {len(found):,}"
                    )
                return list(found)
        raise SweepError(f"{name} of a grid must be a value, a list, or {{range = 5}}; got {dict(given)}")
    return [given]


def _sample(sample: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    number, seed = sample.get("number"), sample.get("sample_seed", 0)
    if type(number) is not int or not 1 <= number <= MOST:
        raise SweepError(f"number of a sample must be a whole number in 1..{MOST:,}; got {number!r}")
    if type(seed) is not int:
        raise SweepError(f"sample_seed must be a whole number; got {seed!r}")
    draw = random.Random(seed)
    ways = {name: each for name, each in sample.items() if name not in ("number", "sample_seed")}
    for _ in range(number):
        yield {name: _drawn(name, each, draw) for name, each in ways.items()}


def _drawn(name: str, way: Any, draw: random.Random) -> Any:
    if isinstance(way, list) and way:
        return draw.choice(way)
    if not isinstance(way, Mapping):
        return way
    if not {"low", "high"} <= way.keys() <= {"low", "high", "log"}:
        raise SweepError(
            f"{name} of a sample must be a value, a list, or {{low = 0, high = 1}}; got {dict(way)}"
        )
    low, high = way["low"], way["high"]
    numbers = all(type(each) in (int, float) and math.isfinite(each) for each in (low, high))
    if not numbers or not low <= high:
        raise SweepError(f"{name} must have numbers low <= high; got {low!r} and {high!r}")
    if not way.get("log"):
        return draw.randint(low, high) if type(low) is type(high) is int else draw.uniform(low, high)
    if not low > 0:
        raise SweepError(f"{name} is drawn by its logarithm: low must be above 0; got {low!r}")
    found = math.exp(draw.uniform(math.log(low), math.log(high)))
    return round(found) if type(low) is type(high) is int else found
