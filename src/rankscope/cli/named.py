"""Names of models and texts on the command line: understood, or answered before torch is imported."""

import sys
from pathlib import Path

from rankscope.cli import names
from rankscope.errors import SourceError
from rankscope.files import must_be_text
from rankscope.naming import forgiven, is_path, may_be_on_hub, nearest

LISTED = "rankscope models lists the names"


def model_named(name: str) -> str:
    """The name as it is known here, case and hyphens forgiven; a sentence where it can be no model.

    >>> model_named("MiniLM"), model_named("BERT_Tiny"), model_named("google/bert_uncased_L-2_H-128_A-2")
    ('minilm', 'bert-tiny', 'google/bert_uncased_L-2_H-128_A-2')
    """
    called = forgiven(name, names.MODELS)
    if called in names.MODELS or called.endswith(".json") or Path(called).exists() or may_be_on_hub(called):
        return called
    if is_path(called):
        raise SourceError(
            f"a model is a directory with config.json and its weights; there is none at {called} ({LISTED})"
        )
    near = nearest(called, names.MODELS)
    hint = f"did you mean {near}? " if near else ""
    raise SourceError(
        f"{called!r} is no model known here, no directory and no id on the hub, which is owner/name: "
        f"{hint}{LISTED}"
    )


def models_named(given: list[str] | None) -> list[str] | None:
    """Several of them."""
    return None if given is None else [model_named(name) for name in given]


def text_named(path: str | None) -> str | None:
    """The path of a text as it was given; a sentence where there is none."""
    if path is not None:
        must_be_text(path)
    return path


def tell_hub(model: str, quiet: bool) -> None:
    """On stderr, that the hub is asked for a model that is not here."""
    local = model in names.MODELS or model.endswith(".json") or Path(model).exists()
    if not (local or quiet):
        sys.stderr.write(f"looking for {model} on the hub ...\n")
        sys.stderr.flush()
