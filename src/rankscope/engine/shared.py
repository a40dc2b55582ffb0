"""What several cells need and no cell should make again: the weights of a trained model, and its tokens.

Loaded once, by the driver. On one machine they lie in a file that workers map into memory, so that all of
them read the same pages; in a cluster in Ray's object store, which brings them to each node once
(`cluster.py`). Random weights are drawn where they are needed: that is quicker.
"""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope.engine.factors import Cell, tokens_of
from rankscope.engine.work import Ready, prepared
from rankscope.errors import RankscopeError
from rankscope.files import atomic
from rankscope.nets import Transformer
from rankscope.runs.key import digest
from rankscope.sources.named import is_drawn

Opener = Callable[[], Ready]


class Shared:
    """What was prepared, by the cells that need it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rankscope-")
        self._openers: dict[str, Opener] = {}

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def prepare(self, cells: Iterable[Cell]) -> None:
        """Load what these cells load, each once. What cannot be loaded fails where its cells are done."""
        for cell in cells:
            if not is_drawn(str(cell["model"])) and (name := digest(tokens_of(cell))) not in self._openers:
                with suppress(RankscopeError):
                    self._openers[name] = self.put(name, prepared(cell))

    def put(self, name: str, ready: Ready) -> Opener:
        """Lay it down; what is given back finds it again, in another process too."""
        path = Path(self._folder.name) / f"{name}.pt"
        with atomic(path) as temporary:
            torch.save(packed(ready), temporary)
        return _Mapped(path)

    def opener(self, cell: Cell) -> Opener | None:
        """How a worker finds what the cell needs; None where it makes it itself."""
        return self._openers.get(digest(tokens_of(cell)))


@dataclass(frozen=True)
class _Mapped:
    """A file that is mapped into memory."""

    path: Path

    def __call__(self) -> Ready:
        return unpacked(torch.load(self.path, mmap=True, weights_only=False))


def packed(ready: Ready) -> dict[str, Any]:
    """As plain tensors."""
    given = {"X": ready.X, "padding": ready.padding}
    return {"arch": ready.net.arch, "weights": ready.net.state(), **given}


def unpacked(given: dict[str, Any]) -> Ready:
    """The network and its tokens again; where it came from is not needed any more."""
    return Ready(Transformer.from_weights(given["arch"], given["weights"]), given["X"], given["padding"])
