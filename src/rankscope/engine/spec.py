"""The specification of a sweep: which cells, by which factors they differ, and what is measured of each.

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

    [sample]                                # or a number of random draws
    number = 200
    sample_seed = 0
    skip = {low = 0.0, high = 1.0}
    width = {low = 32, high = 512, log = true}
    mask = ["complete", "causal"]

Several of them together are one sweep, each cell once. What stands before the tables holds for all cells:
`[all] model = "bert-tiny"`. What is computed of each cell beside its readings are kinds of job (`CellJob`), each with a
table of its own; plugins add theirs (`docs/extending.md`). What can differ from cell to cell is a factor:

| factor                               | what it is                                                         |
|--------------------------------------|--------------------------------------------------------------------|
| `model`                              | a usual size, a JSON file of an architecture, or what `load` takes |
| any field of `Architecture`          | of a network with random weights: `width`, `heads`, `norm_place`   |
| `init`, `seed`                       | how random weights are drawn                                       |
| `variant`                            | parts taken out, by name: `san`, `transformer-attention_skip`      |
| `depth`                              | number of layers; the existing ones are repeated or cut            |
| `skip`, `attention_skip`, `mlp_skip` | the weight of the skips                                            |
| `mask`, `kernel`, `activation`       | as in `Architecture`                                               |
| `remedy`                             | against collapse, as `attnscale:w=0.5`; `none`                     |
| `temperature`                        | divides the scores, in addition to their usual divisor             |
| `text`                               | a file or folder; left out, the bundled prose                      |
| `samples`, `tokens`                  | how many excerpts, and how long                                    |

Factors of the weights (`model`, fields, `init`, `seed`) say which network is built (`base_network`); the
others change it afterwards and share its weights (`cell_network`).
"""

import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
from torch import Tensor

from rankscope.errors import FileError, SweepError, require, require_one_of
from rankscope.metrics import metric
from rankscope.nets import Architecture, Transformer
from rankscope.plugins import Group
from rankscope.profiles import ARITHMETICS, DEFAULT_METRICS
from rankscope.trainings import CERTIFICATES

Value = str | int | float | bool
Cell = dict[str, Value]  # The factors of one cell by name

SKIPS = ("skip", "attention_skip", "mlp_skip")
CHANGES = ("variant", "depth", *SKIPS, "mask", "kernel", "activation", "temperature", "remedy")
"""Factors that change a network after its weights are there."""
INPUTS = ("text", "samples", "tokens")  # Factors that say what the network reads
FIELDS = tuple(field.name for field in fields(Architecture) if field.name not in (*CHANGES, "parts"))
"""Fields of an architecture that need new random weights when they differ."""
WEIGHTS = ("model", "init", "seed", *FIELDS)  # Factors that decide the weights
FACTORS = (*WEIGHTS, *CHANGES, *INPUTS)
DEFAULTS: Cell = {"model": "bert-base", "samples": 4, "tokens": 32}  # Factors of a cell that does not name them


def checked(cell: Mapping[str, Any]) -> Cell:
    """A cell with its defaults filled in; unknown factors, and values that are no number, word or truth value, are
    refused (whether a factor takes its value shows when the cell is measured). Whole numbers of skips and of the
    temperature become floats: 1 and 1.0 are one cell."""
    for name, value in cell.items():
        require_one_of("a factor", name, FACTORS, SweepError, name)
        sentence = f"{name} must be a number, a word or true/false; got a {type(value).__name__}"
        require(isinstance(value, str | int | float | bool), sentence, SweepError, name)
    reals = {name: float(cell[name]) for name in (*SKIPS, "temperature") if type(cell.get(name)) is int}
    return {**DEFAULTS, **cell, **reals}


def input_factors(cell: Cell) -> Cell:
    """The factors that decide weights and tokens: cells that agree on them share both."""
    return {name: cell[name] for name in (*WEIGHTS, *INPUTS) if name in cell}


def architecture_of(cell: Cell) -> Architecture | None:
    """The architecture of a cell's network with random weights; None where its weights are loaded."""
    from rankscope.sources import PRESETS, is_drawn, preset

    model = str(cell["model"])
    if not is_drawn(model):
        return None
    return preset(model) if model in PRESETS else Architecture.read(model)


def base_network(cell: Cell, arch: Architecture | None) -> Transformer:
    """The network before the cell changes it: with random weights on `arch`, or loaded if that is None."""
    from rankscope.sources import fresh, load

    model, arch_fields = str(cell["model"]), {name: cell[name] for name in FIELDS if name in cell}
    seed, init = cell.get("seed", 0), cell.get("init", "bert")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise SweepError(f"seed must be a whole number in 0..{2**31 - 1}; got {seed!r}", subject="seed")
    if arch is not None:
        return fresh(arch.replace(**arch_fields), seed, str(init), name=model)
    misplaced = [name for name in ("init", "seed", *arch_fields) if name in cell]
    if misplaced:
        sentence = f"{misplaced[0]} must go with random weights; {model} has none: leave it out, or name a size"
        raise SweepError(sentence, subject=misplaced[0])
    return load(model)


def cell_network(net: Transformer, cell: Cell) -> Transformer:
    """The network of a cell: `net` with the cell's changes, on the same weights."""
    if "variant" in cell:
        net = net.variant(str(cell["variant"]))
    changes: dict[str, Any] = {name: cell[name] for name in CHANGES if name in cell}
    remedy, _ = changes.pop("remedy", "none"), changes.pop("variant", None)
    if "depth" in changes:
        changes["layers"] = changes.pop("depth")
    if "temperature" in changes:
        temperature = changes.pop("temperature")
        if isinstance(temperature, str | bool) or not temperature > 0:
            raise SweepError(f"temperature must be a number above 0; got {temperature!r}", subject="temperature")
        changes["divisor"] = net.arch.divisor * temperature
    net = net.variant(**changes) if changes else net
    return net if remedy == "none" else net.with_remedy(str(remedy))


def described(cell: Mapping[str, Any], defaults: Mapping[str, Any] = DEFAULTS) -> str:
    """The factors of a cell that differ from the defaults, on a line.

    >>> described({"model": "bert-tiny", "skip": 0.5, "samples": 4})
    'model bert-tiny, skip 0.5'
    """
    unusual = {name: value for name, value in cell.items() if value is not None and defaults.get(name) != value}
    return ", ".join(f"{name} {level_name(value)}" for name, value in unusual.items()) or "the usual"


def level_name(value: Value) -> str:
    """A value of a factor as text: 0.5, causal."""
    return f"{value:g}" if isinstance(value, float) else str(value)


MOST_CELLS = 1_000_000  # that a sweep may have
PARTS = ("all", "grid", "list", "sample")
READ = ("metrics", "arithmetic", "check")


@dataclass(frozen=True)
class CellJob:
    """A kind of job: a table that is computed of every cell.

    Args:
        name: What a specification calls it.
        columns: The columns of the table, with their types in polars.
        compute: Called with a cell's network, its tokens `[sample, token, width]` and its padding; returns the table.
            Columns that it lacks are null.
        table: What the table is called in the run folder; `sweep_` and the name if left out.
        on_cpu: True if it is computed on the CPU wherever cells are measured.
    """

    name: str
    columns: Mapping[str, Any]
    compute: Callable[[Transformer, Tensor, Tensor], pl.DataFrame]
    table: str = ""
    on_cpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or f"sweep_{self.name}")


def _path_shares(net: Transformer, X: Tensor, padding: Tensor) -> pl.DataFrame:
    from rankscope.paths import decompose

    return decompose(net, X, padding).by_length().table.filter(start="all").sort("sample", "length")


def _proved(net: Transformer, X: Tensor, padding: Tensor) -> pl.DataFrame:
    from rankscope.theory import certify

    return certify(net, X, padding).summary()


_PROVED = ("theorem", "met_to", "says_at", "log10_bound", "log10_measured", "slack", "why")
SHIPPED = (
    CellJob("paths", {"sample": pl.Int64, "length": pl.Int64, "share": pl.Float64}, _path_shares),
    CellJob("certify", {name: CERTIFICATES[name] for name in _PROVED}, _proved, "sweep_certificates", on_cpu=True),
)
JOBS: Group[CellJob] = Group("jobs", "a CellJob", lambda each: isinstance(each, CellJob))
"""Every kind of job by name."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What is measured of every cell."""

    metrics: tuple[str, ...] = tuple(DEFAULT_METRICS)
    arithmetic: str = "deviation"
    check: bool = True
    jobs: tuple[str, ...] = ()
    """The names of what is computed beside readings."""

    def __post_init__(self) -> None:
        for name in self.metrics:
            metric(name)
        require(self.metrics, "metrics must name at least one; got none", SweepError, "metrics")
        require_one_of("arithmetic", self.arithmetic, ARITHMETICS, SweepError)

    @property
    def asked(self) -> dict[str, Any]:
        """The options as a specification has them: each built-in job, asked for or not, and others that are."""
        given = {name: getattr(self, name) for name in READ}
        return {**given, **{name: name in self.jobs for name in (*JOBS.shipped, *self.jobs)}}


@dataclass(frozen=True)
class Spec:
    """A sweep's cells, each once and in the order of the file, and what is measured of them."""

    cells: tuple[Cell, ...]
    options: SweepOptions

    @property
    def factors(self) -> list[str]:
        """Factors that at least one cell has."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell))

    @property
    def varied(self) -> list[str]:
        """Factors that differ between cells."""
        return [name for name in self.factors if len({cell.get(name) for cell in self.cells}) > 1]


def read_spec(path: str | Path) -> Spec:
    """Read the specification of a sweep from a TOML file."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"a specification must be a TOML file; {path}: {error.strerror}", subject=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} must be TOML; {error}", subject=str(path)) from error
    return spec_of(tables)


def spec_of(tables: Mapping[str, Any]) -> Spec:
    """Make the specification of a sweep from a dictionary that has what the TOML file would have.

    >>> spec_of({"all": {"model": "bert-tiny"}, "grid": {"depth": [2, 4], "skip": [0.0, 1.0]}}).varied
    ['depth', 'skip']
    """
    for name in tables:
        if name not in (*PARTS, *READ) and name not in JOBS:  # plugins are looked at for other names alone
            require_one_of("a part of a sweep", name, [*PARTS, *READ, *JOBS], SweepError, name)
    jobs = [name for name in tables if name not in (*PARTS, *READ)]
    for name in {*jobs, "check"} & tables.keys():
        is_bool = type(tables[name]) is bool
        require(is_bool, f"{name} must be true or false; got {tables[name]!r}", SweepError, name)
    options: dict[str, Any] = {name: tables[name] for name in READ if name in tables}
    options["jobs"] = tuple(sorted(name for name in jobs if tables[name]))
    if "metrics" in options:
        metrics = options["metrics"]
        names = isinstance(metrics, str | list | tuple) and all(isinstance(name, str) for name in metrics)
        require(names, f'metrics must be names, as ["relative_mu"]; got {metrics!r}', SweepError, "metrics")
        options["metrics"] = tuple([metrics] if isinstance(metrics, str) else metrics)
    for name in ("all", "grid", "sample"):
        table = tables.get(name, {})
        message = f"{name} must be a table of factors; got a {type(table).__name__}"
        require(isinstance(table, Mapping), message, SweepError, name)
    chosen = SweepOptions(**options)
    cells, named = dict[str, Cell](), False
    for factors in _cells(tables):
        named = named or bool(factors or tables.get("all"))
        cell = checked({**tables.get("all", {}), **factors})
        cells.setdefault(repr(sorted(cell.items())), cell)
        few = len(cells) <= MOST_CELLS
        require(few, f"a sweep must have at most {MOST_CELLS:,} cells; its parts have more", SweepError, "cells")
    sentence = "a sweep must have at least one cell; it has none: fill [grid], [[list]] or [sample]"
    require(cells and named, sentence, SweepError, "cells")
    return Spec(tuple(cells.values()), chosen)


def _cells(tables: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The factors of each cell of a specification; where it has `[all]` alone, one cell without more."""
    if "grid" in tables:
        yield from _grid(tables["grid"])
    listed = tables.get("list", [])
    are_tables = isinstance(listed, list) and all(isinstance(factors, Mapping) for factors in listed)
    require(are_tables, "list must be tables of factors, [[list]]; got something else", SweepError, "list")
    yield from listed
    if "sample" in tables:
        yield from _sample(tables["sample"])
    if not {"grid", "list", "sample"} & tables.keys():
        yield {}


def _grid(grid: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every combination of the levels of a grid's factors, the last factor varying fastest."""
    levels = {factor: _levels(factor, entry) for factor, entry in grid.items()}
    count = math.prod(len(values) for values in levels.values())
    if count == 0:
        empty = next(factor for factor, values in levels.items() if not values)
        raise SweepError(f"every factor of a grid must have a value; {empty} has none", subject=empty)
    if count > MOST_CELLS:
        sizes = " x ".join(f"{len(values)} {factor}" for factor, values in levels.items())
        sentence = f"a sweep must have at most {MOST_CELLS:,} cells; this grid has {count:,} ({sizes}): take [sample]"
        raise SweepError(sentence, subject="grid")
    for values in product(*levels.values()):
        yield dict(zip(levels, values, strict=True))


def _levels(factor: str, entry: Any) -> list[Any]:
    """The values that a factor of a grid takes: of a list its entries, of `{range = 5}` 0 to 4."""
    if isinstance(entry, list):
        return entry
    if not isinstance(entry, Mapping):
        return [entry]
    bounds: Any = entry.get("range") if isinstance(entry.get("range"), list) else [entry.get("range")]
    are_bounds = all(type(bound) is int for bound in bounds) and 1 <= len(bounds) <= 3 and bounds[2:] != [0]
    if set(entry) == {"range"} and are_bounds:
        count = len(range(*bounds))
        sentence = f"{factor} must have at most {MOST_CELLS:,} levels; its range has {count:,}"
        require(count <= MOST_CELLS, sentence, SweepError, factor)
        return list(range(*bounds))
    raise SweepError(f"{factor} of a grid must be a value, a list, or {{range = 5}}; got {dict(entry)}", subject=factor)


def _sample(sample: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Cells whose factors are drawn independently, `number` of them; the same seed draws the same cells."""
    count, seed = sample.get("number"), sample.get("sample_seed", 0)
    sentence = f"number of a sample must be a whole number in 1..{MOST_CELLS:,}; got {count!r}"
    if type(count) is not int or not 1 <= count <= MOST_CELLS:
        raise SweepError(sentence, subject="number")
    require(type(seed) is int, f"sample_seed must be a whole number; got {seed!r}", SweepError, "sample_seed")
    generator = random.Random(seed)
    factors = {name: entry for name, entry in sample.items() if name not in ("number", "sample_seed")}
    for _ in range(count):
        yield {name: _draw(name, entry, generator) for name, entry in factors.items()}


def _draw(factor: str, entry: Any, generator: random.Random) -> Any:
    """One value of a sampled factor: from a list, or between `low` and `high`."""
    if isinstance(entry, list) and entry:
        return generator.choice(entry)
    if not isinstance(entry, Mapping):
        return entry
    if not {"low", "high"} <= entry.keys() <= {"low", "high", "log"}:
        sentence = f"{factor} of a sample must be a value, a list, or {{low = 0, high = 1}}; got {dict(entry)}"
        raise SweepError(sentence, subject=factor)
    low, high = entry["low"], entry["high"]
    are_numbers = all(type(bound) in (int, float) and math.isfinite(bound) for bound in (low, high)) and low <= high
    require(are_numbers, f"{factor} must have numbers low <= high; got {low!r} and {high!r}", SweepError, factor)
    integers = type(low) is type(high) is int
    if not entry.get("log"):
        return generator.randint(low, high) if integers else generator.uniform(low, high)
    require(low > 0, f"{factor} is drawn by its logarithm: low must be above 0; got {low!r}", SweepError, factor)
    value = math.exp(generator.uniform(math.log(low), math.log(high)))
    return round(value) if integers else value
