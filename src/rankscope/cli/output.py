"""The folder that a command writes to: its own from the first until the command ends."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rankscope.runs import Store

Told = TypeVar("Told")

ending = ExitStack()
"""What is closed when the command ends, however it ends."""


def opened(folder: Path | None) -> "Store | None":
    """The run folder, or None where nothing is to be written; refused before hours go into what it is to hold
    if it cannot be written, or another is writing there."""
    from rankscope.runs import Store

    return None if folder is None else ending.enter_context(Store(folder))


def with_manifest(found: Told, **fields: Any) -> Told:
    """The same profile, summary or certificates, with these fields in its manifest."""
    kept: Any = found
    return replace(kept, manifest=kept.manifest.adding(**fields))
