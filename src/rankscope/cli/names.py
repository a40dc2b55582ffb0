"""Names on the command line: which there are, what a shell completes on Tab, and what a misspelt one gets.

Nothing here imports torch: a name is completed, or refused, at once. The names, copies of those that live
where their things do, and the help of options are read from `data/command_line.toml`.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from rankscope.errors import SourceError
from rankscope.files import must_be_text
from rankscope.naming import forgiven, is_path, may_be_on_hub, nearest
from rankscope.remedies import REMEDY_FILES
from rankscope.shipped import shipped_folder, shipped_model, shipped_names

DATA: dict[str, Any] = tomllib.loads(
    files("rankscope").joinpath("data", "command_line.toml").read_text(encoding="utf-8")
)
_NAMES: dict[str, tuple[str, ...]] = {kind: tuple(names) for kind, names in DATA["names"].items()}
PRESETS, VARIANTS, MASKS, METRICS = (_NAMES[kind] for kind in ("presets", "variants", "masks", "metrics"))
MODELS = ("minilm", *shipped_names(), *PRESETS)
PARTS, ARITHMETICS, INITS = (_NAMES[kind] for kind in ("parts", "arithmetics", "inits"))
SPLITS, DEVICES, THEOREMS = (_NAMES[kind] for kind in ("splits", "devices", "theorems"))
REMEDIES = tuple(REMEDY_FILES)
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its colours or turn its text round; not tab and newline."""

Completer = Callable[[str], list[str]]  # Gives the names that complete the beginning of one


def complete_one(names: Sequence[str]) -> Completer:
    """A completer for an option that takes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_several(names: Sequence[str]) -> Completer:
    """A completer for an option that takes several of these names, joined by commas.

    >>> complete_several(("mu", "entropy"))("mu,e")
    ['mu,entropy']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in given]

    return complete


def complete_compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a model or, after its colon, a variant; bash takes the colon for a word of its own."""
    before = ctx.params.get("things") or ()
    if before and before[-1] == ":":
        return complete_one(VARIANTS)(incomplete)
    model, colon, variant = incomplete.partition(":")
    if colon:
        return [f"{model}:{name}" for name in complete_one(VARIANTS)(variant)]
    return complete_one(MODELS)(incomplete)


def model_named(name: str) -> str:
    """The known name of a model, whatever its case and hyphens; a name that can be no model is refused.

    >>> model_named("MiniLM"), model_named("BERT_Tiny"), model_named("google/bert_uncased_L-2_H-128_A-2")
    ('minilm', 'bert-tiny', 'google/bert_uncased_L-2_H-128_A-2')
    """
    called = forgiven(name, MODELS)
    if (
        called in MODELS
        or shipped_folder(called) is not None
        or called.endswith(".json")
        or Path(called).exists()
        or may_be_on_hub(called)
    ):
        return called
    listed = "rankscope models lists the names"
    if is_path(called):
        raise SourceError(f"a model must be a directory; there is none at {called} ({listed})", subject="model")
    near = nearest(called, MODELS)
    hint = f"did you mean {near}? {listed}" if near else listed
    raise SourceError(
        f"{called!r} is no model known here, no directory and no id on the hub (owner/name): {hint}", subject="model"
    )


def text_named(path: str | None) -> str | None:
    """The path of a text; refused where there is no text at that path."""
    if path is not None:
        must_be_text(path)
    return path


def say_hub(model: str, quiet: bool) -> None:
    """Say on stderr that the hub is asked for a model that is not on this machine."""
    local = model in MODELS or shipped_model(model) or model.endswith(".json") or Path(model).exists()
    if not (local or quiet):
        write_aside(f"looking for {model} on the hub ...")


def write_aside(line: str) -> None:
    """Write a line on stderr, without control characters, which could move a terminal's cursor."""
    sys.stderr.write(CONTROLS.sub("", line) + "\n")
    sys.stderr.flush()
