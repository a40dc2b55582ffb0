"""The folder that a command writes to: its own from the first until the command ends."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.runs import Store

ending = ExitStack()
"""What is closed when the command ends, however it ends."""


def opened(folder: Path | None) -> "Store | None":
    """The run folder, or None where nothing is to be written; refused before hours go into what it is to hold
    if it cannot be written, or another is writing there."""
    from rankscope.runs import Store

    return None if folder is None else ending.enter_context(Store(folder))
