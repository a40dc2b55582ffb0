"""What several cells need and no cell should make again: the weights of a trained model, and its tokens.

Files are read by the driver alone, so that every worker has the same, wherever it runs. Trained weights are
loaded once: on one machine they lie in a file that workers map into memory, so that all of them read the same
pages; in a cluster in Ray's object store, which brings them to each node once (`cluster.py`). Random weights
are drawn where they are needed: that is quicker.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope.engine.factors import Cell, architecture_of, base, tokens_of
from rankscope.engine.texts import Contents, excerpts_for
from rankscope.engine.work import Opener, Ready
from rankscope.errors import RankscopeError
from rankscope.nets import Architecture, Transformer
from rankscope.runs.key import digest

PREFIX = ".shared-"
"""Of the folder of weights, within the run's own."""


class Shared:
    """What is prepared for cells, when the first of them asks for it."""

    def __init__(self, folder: Path, contents: Contents, threads: int = 1) -> None:
        for left in folder.glob(f"{PREFIX}*"):  # by a driver that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True)
        self.contents, self.threads = contents, threads
        self._openers: dict[str, Opener] = {}
        self._excerpts: dict[str, list[str]] = {}

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def opener(self, cell: Cell) -> Opener:
        """How a worker comes by what the cell needs; what cannot be read fails there, as its cell."""
        name = digest({**tokens_of(cell), "content": self.contents.of(cell)})
        if name in self._openers:
            return self._openers[name]
        try:
            arch, excerpts = architecture_of(cell), self._read(cell)
            if arch is not None:  # light, and often needed by one cell alone: not kept
                return Drawn(name, tokens_of(cell), arch, excerpts)
            self._openers[name] = self.put(name, self._loaded(cell, excerpts))
        except RankscopeError as error:
            self._openers[name] = Refused(name, error)
        return self._openers[name]

    def put(self, name: str, ready: Ready) -> Opener:
        """Lay it down; what is given back finds it again, in another process too."""
        path = Path(self._folder.name) / f"{name}.pt"
        torch.save(packed(ready), path)
        return Mapped(name, path)

    def _read(self, cell: Cell) -> list[str]:
        """The same text is read once."""
        name = repr([cell.get(each) for each in ("text", "samples", "tokens")])
        if name not in self._excerpts:
            self._excerpts[name] = excerpts_for(cell)
        return self._excerpts[name]

    def _loaded(self, cell: Cell, excerpts: list[str]) -> Ready:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # as in workers: an embedding may multiply, too
        try:
            return prepared(cell, None, excerpts)
        finally:
            torch.set_num_threads(before)


def prepared(cell: Cell, arch: Architecture | None, excerpts: list[str]) -> Ready:
    """The weights and tokens of a cell, before it is changed."""
    net = base(cell, arch)
    return Ready(net, *net.encode(excerpts, int(cell["tokens"])))


@dataclass(frozen=True)
class Drawn:
    """Draws the weights."""

    name: str
    cell: Cell
    arch: Architecture
    excerpts: list[str]

    def __call__(self) -> Ready:
        """The network and its tokens."""
        return prepared(self.cell, self.arch, self.excerpts)


@dataclass(frozen=True)
class Mapped:
    """Maps a file into memory."""

    name: str
    path: Path

    def __call__(self) -> Ready:
        """The network and its tokens."""
        return unpacked(torch.load(self.path, mmap=True, weights_only=False))


@dataclass(frozen=True)
class Refused:
    """Has nothing to give, and says why."""

    name: str
    error: RankscopeError

    def __call__(self) -> Ready:
        """The network and its tokens."""
        raise self.error


def packed(ready: Ready) -> dict[str, Any]:
    """As plain tensors."""
    return {"arch": ready.net.arch, "weights": ready.net.state(), "X": ready.X, "padding": ready.padding}


def unpacked(given: dict[str, Any]) -> Ready:
    """The network and its tokens again; where it came from is not needed any more."""
    return Ready(Transformer.from_weights(given["arch"], given["weights"]), given["X"], given["padding"])
