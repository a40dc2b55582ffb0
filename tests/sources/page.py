"""docs/families.md, written from the code: `python -m tests.sources.page`, or `make families`.

What a family maps and refuses is what the sweep over every field of its configs holds it to (`configs.py`,
`test_configs.py`); refusals are asked for and quoted. Parity is measured while the page is written.
"""

import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from rankscope.errors import SourceError
from rankscope.sources import FAMILIES, Family, load, survey
from rankscope.sources.checkpoint import quiet
from rankscope.sources.families import MODULES, family_of
from rankscope.sources.families.family import ACTIVATIONS
from rankscope.sources.families.rotary import SCHEMES
from rankscope.sources.loading import built
from rankscope.sources.parity import TOLERANCE, Parity
from tests.sources.configs import INERT, REFUSED, VALUES, altered, fields, runs

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
MEASURED = re.compile(r"(?<=\|) (?:10\^-\d+|none)? \||\d+\.\d+\.\d+\S*")
"""What may differ from machine to machine: parity in a table, and versions."""
Measured = Mapping[tuple[str, str], Parity]


def page(measured: Measured) -> str:
    """The whole page."""
    parts = [HEAD.format(
        number=len(FAMILIES), transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0], tolerance=TOLERANCE,
    )]  # fmt: skip
    parts += [_section(family, measured) for family in FAMILIES.values()]
    parts += [_modules(), _common(), _unknown()]
    return "\n".join(parts)


HEAD = """# Families

Written from the code by `make families`, with transformers {transformers} and torch {torch}: not by hand.

`load` maps {number} families of models onto the canonical network ([how to load](models.md)). Each load
compares the network with the model itself, in float64, and is refused above a difference of {tolerance:g}.
For each family the tables give the largest differences on small random models: of states relative to their
largest entry, and of attention weights, rounded up to a power of ten. Where a model computes parts in
float32 whatever its dtype, the last column says how much this changes its states.
"""


def _section(family: Family, measured: Measured) -> str:
    configs = family.tiny_configs()
    lines = [f"## {family.name}", "", first_sentence(family), ""]
    lines.append(f"Model types: {', '.join(f'`{each}`' for each in family.types)}.")
    lines += ["", "| config | states | attention | its float32 parts |", "|---|---|---|---|"]
    for label in configs:
        found = measured.get((family.name, label), Parity(0.0, 0.0, None))
        far = "" if found.float32_parts is None else power(found.float32_parts)
        lines.append(f"| {label} | {power(found.states)} | {power(found.attention or 0.0)} | {far} |")
    outcomes = tried(family)
    kept = {field for (field, _), why in outcomes.items() if not why}
    mapped = sorted(
        {name for config in configs.values() for name in fields(config) if name in VALUES} - (REFUSED.keys() - kept)
    )
    lines += ["", f"Mapped: {', '.join(f'`{name}`' for name in mapped)}."]
    refused = [f"- `{field}={value}`: {why}." for (field, value), why in outcomes.items() if why]
    lines += ["", "Refused:", "", *refused] if refused else []
    return "\n".join([*lines, ""])


def first_sentence(family: Family) -> str:
    """What a family's class says of it."""
    text = " ".join((inspect.getdoc(type(family)) or "").split())
    return text.split(". ")[0].rstrip(".") + "."


def power(found: float) -> str:
    """A number, rounded up to a power of ten."""
    return "none" if not found else f"10^{math.ceil(math.log10(found))}"


def tried(family: Family) -> dict[tuple[str, str], str]:
    """Of fields that may be refused, every value with which transformers runs: the sentence with which
    the family refuses it, empty where it maps it."""
    found: dict[tuple[str, str], str] = {}
    for config in family.tiny_configs().values():
        now = fields(config)
        for field in (name for name in (*REFUSED, "layer_types") if name in now):
            for value in (each for each in VALUES[field] if each != now[field]):
                with quiet():
                    try:
                        model = built(family, altered(config, field, value))
                    except Exception:  # transformers itself does not build it
                        continue
                    try:
                        load(model)
                    except SourceError as error:
                        if runs(family, model):
                            found[field, repr(value)] = str(error).split(": watch measures")[0]
                    else:
                        found.setdefault((field, repr(value)), "")
    return found


def _modules() -> str:
    lines = ["## Plain modules", "", "ViTs without a config, which `load(model)` knows by how they are laid out:", ""]
    return "\n".join([*lines, *(f"- `{family.name}`: {first_sentence(family)}" for family in MODULES.values()), ""])


def _common() -> str:
    lines = [
        "## What holds for all", "",
        f"- Activations: {', '.join(f'`{name}`' for name in ACTIVATIONS)}; others are refused.",
        f"- Rotary positions: {', '.join(f'`{name}`' for name in SCHEMES)}; others are refused.",
        "- Fields that change no state of the network, by where they matter:",
    ]  # fmt: skip
    lines += [f"  - {where}: {', '.join(f'`{name}`' for name in sorted(names))}." for where, names in INERT.items()]
    return "\n".join([*lines, ""])


def unmapped() -> dict[str, list[str]]:
    """Model types that transformers knows and no family maps, by the reason that is given for them."""
    found: dict[str, list[str]] = {}
    for kind in sorted(transformers.CONFIG_MAPPING):
        try:
            family_of(kind)
        except SourceError as error:
            said = re.split(": (?:watch measures|docs/models)", str(error))[0]
            _, unknown, why = said.partition(f"no family maps the model type {kind!r}")
            found.setdefault(why.lstrip(", ") if unknown else said.replace(kind, "..."), []).append(kind)
    return found


def _unknown() -> str:
    lines = ["## Model types of no family", ""]
    why = unmapped()
    lines += [f"- {', '.join(f'`{kind}`' for kind in kinds)}: {reason}." for reason, kinds in why.items() if reason]
    lines.append("- Every other that transformers has: nobody has written its family yet.")
    lines += ["", "`watch` measures all of them as they are ([how](watch.md)); a family of your own is"]
    return "\n".join([*lines, "[forty lines](extending.md).", ""])


def masked(text: str) -> str:
    """The page without what is measured."""
    return MEASURED.sub("...", text)


if __name__ == "__main__":
    with quiet():
        measured = list(survey())
    parity = {(each.family, each.config): each.parity for each in measured if each.parity is not None}
    assert len(parity) == len(measured), [each for each in measured if each.failure]
    PAGE.write_text(page(parity), encoding="utf-8")
