"""Factors: what can differ from cell to cell, and how each is put into a network.

| factor                               | what it is                                                         |
|--------------------------------------|--------------------------------------------------------------------|
| `model`                              | a usual size, a JSON file of an architecture, or what `load` takes |
| any field of `Architecture`          | of a network with random weights: `width`, `heads`, `norm_place`   |
| `init`, `seed`                       | how random weights are drawn                                       |
| `variant`                            | parts taken out, by name: `san`, `transformer-attention_skip`      |
| `depth`                              | layers; those there are, repeated                                  |
| `skip`, `attention_skip`, `mlp_skip` | the weight of the skips                                            |
| `mask`, `kernel`, `activation`       | as in `Architecture`                                               |
| `remedy`                             | against collapse, as `attnscale:w=0.5`; `none`                     |
| `temperature`                        | what scores are divided by, beside their own divisor               |
| `text`                               | a file or folder; left out, the bundled prose                      |
| `samples`, `tokens`                  | how many excerpts, and how long                                    |

Factors of the weights (`model`, fields, `init`, `seed`) say what network is built; the others change it
afterwards, and share its weights.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rankscope.errors import SweepError, one_of
from rankscope.nets import Architecture, Transformer

Value = str | int | float | bool
Cell = dict[str, Value]
"""The factors of one cell by name."""

CHANGES = (
    "variant",
    "depth",
    "skip",
    "attention_skip",
    "mlp_skip",
    "mask",
    "kernel",
    "activation",
    "temperature",
    "remedy",
)
READS = ("text", "samples", "tokens")
REALS = ("skip", "attention_skip", "mlp_skip", "temperature")
"""Of these 1 is 1.0."""
FIELDS = tuple(each.name for each in fields(Architecture) if each.name not in (*CHANGES, "parts"))
"""Of an architecture: what is drawn anew when it differs."""
DRAWN = ("model", "init", "seed", *FIELDS)
FACTORS = (*DRAWN, *CHANGES, *READS)
USUAL: Cell = {"model": "bert-base", "samples": 4, "tokens": 32}
"""What a cell has where nothing is said."""


def checked(cell: Mapping[str, Any]) -> Cell:
    """A cell whose factors are known and whose values a file can hold."""
    for name, value in cell.items():
        if name not in FACTORS:
            raise SweepError(one_of("a factor", name, FACTORS))
        if not isinstance(value, str | int | float | bool):
            raise SweepError(f"{name} must be a number, a word or true/false; got a {type(value).__name__}")
    given = {
        name: float(value) if name in REALS and type(value) is int else value for name, value in cell.items()
    }
    return {**USUAL, **given}


def tokens_of(cell: Cell) -> Cell:
    """The factors that decide the weights and what is read: cells that have these in common share both."""
    return {name: cell[name] for name in (*DRAWN, *READS) if name in cell}


def architecture_of(cell: Cell) -> Architecture | None:
    """Of a network that is drawn; None where its weights are loaded."""
    from rankscope.sources.network_names import is_drawn
    from rankscope.sources.presets import PRESETS, preset

    model = str(cell["model"])
    if not is_drawn(model):
        return None
    return preset(model) if model in PRESETS else Architecture.read(model)


def base(cell: Cell, arch: Architecture | None) -> Transformer:
    """The network before it is changed: drawn on this architecture, or loaded where there is none."""
    from rankscope.sources import load
    from rankscope.sources.fresh import untrained

    model, own = str(cell["model"]), {name: cell[name] for name in FIELDS if name in cell}
    seed, init = cell.get("seed", 0), cell.get("init", "bert")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise SweepError(f"seed must be a whole number in 0..{2**31 - 1}; got {seed!r}")
    if arch is not None:
        return untrained(arch.replace(**own), model, seed, str(init))
    given = [name for name in ("init", "seed", *own) if name in cell]
    if given:
        raise SweepError(
            f"{given[0]} must go with random weights, which {model} does not have: leave it out of these "
            "cells, or name a size as bert-base"
        )
    return load(model)


def changed(net: Transformer, cell: Cell) -> Transformer:
    """The network as the cell has it, on the same weights."""

    if "variant" in cell:
        net = net.variant(str(cell["variant"]))
    apart = ("variant", "remedy")
    given: dict[str, Any] = {name: cell[name] for name in CHANGES if name in cell and name not in apart}
    if "depth" in given:
        given["layers"] = given.pop("depth")
    if "temperature" in given:
        warmth = given.pop("temperature")
        if isinstance(warmth, str | bool) or not warmth > 0:
            raise SweepError(f"temperature must be a number above 0; got {warmth!r}")
        given["divisor"] = net.arch.divisor * warmth
    net = net.variant(**given) if given else net
    remedy = cell.get("remedy", "none")
    return net if remedy == "none" else net.with_remedy(str(remedy))


def described(cell: Cell) -> str:
    """On a line: what differs from the usual.

    >>> described({"model": "bert-tiny", "skip": 0.5, "samples": 4})
    'model bert-tiny, skip 0.5'
    """
    told = {name: value for name, value in cell.items() if USUAL.get(name) != value}
    said = [
        f"{name} {value:g}" if type(value) is float else f"{name} {value}" for name, value in told.items()
    ]
    return ", ".join(said) or "the usual"
