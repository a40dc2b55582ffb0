"""Factors: what can differ from cell to cell of a sweep, and how each is put into a network.

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

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rankscope.errors import SweepError, require, require_one_of
from rankscope.nets import Architecture, Transformer

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
