"""The inputs of cells, made once where several cells share them: texts, trained weights, tokens.

Files are read by the driver alone, so that every worker has the same, wherever it runs. Trained weights are
loaded once. On one machine they are in a file that workers map into memory; on a cluster in Ray's object
store, which brings them to each node once and whose memory all workers of a node share: `dump` pickles an object
with the bytes of its tensors apart (pickle protocol 5, out-of-band buffers), and `ZeroCopyPickle.load` builds
tensors over them. Random weights are drawn in the worker: that is quicker than sending them.

`measure --text --on ray` shares a corpus' networks in the same way: it passes `measure_on_cluster` to
`profiles.corpus.corpus_steps`, and the numbers are those of one process, exactly.
"""

import io
import itertools
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from rankscope.engine.cluster import Cluster
from rankscope.engine.spec import INPUTS, Cell, architecture_of, base_network, input_factors
from rankscope.engine.work import CellInputs, InputsLoader
from rankscope.errors import RankscopeError, SourceError, SweepError, TokensError, require
from rankscope.metrics import METRICS, chosen_metrics
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import BatchMeasurement, Profile
from rankscope.runs import checksum, digest, files_of
from rankscope.sources import is_drawn
from rankscope.workers import threads_set

PREFIX = ".shared-"  # of the folder of weights within the run folder
NUMPY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bool, torch.int64, torch.int32)
"""dtypes that numpy has too; tensors of others are pickled as usual."""


class FileChecksums:
    """Checksums of the models and texts that cells name: other content gives other numbers."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._models = {name: _model_checksums(name) for name in {str(cell["model"]) for cell in cells}}
        self._texts = {name: _text_checksums(name) for name in {str(cell["text"]) for cell in cells if "text" in cell}}

    def of(self, cell: Cell) -> dict[str, list[str]]:
        """Checksums of a cell's text, and what identifies its model's files without reading all of them."""
        text = self._texts[str(cell["text"])] if "text" in cell else []
        return {"model": self._models[str(cell["model"])], "text": text}


class SharedInputs(ExitStack):
    """Gives each cell a loader for its inputs, and prepares what several cells share when the first asks."""

    def __init__(self, folder: Path, checksums: FileChecksums, threads: int = 1) -> None:
        super().__init__()
        for leftover in folder.glob(f"{PREFIX}*"):  # of a driver that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        shared = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True)
        self._folder = Path(self.enter_context(shared))
        self.checksums, self.threads = checksums, threads
        self._loaders: dict[str, InputsLoader] = {}
        self._excerpts: dict[str, list[str]] = {}

    def loader(self, cell: Cell) -> InputsLoader:
        """The loader of a cell's inputs. Random weights are drawn by the loader, in the worker; trained ones are loaded
        here, once for all cells with the same inputs, and stored. The loader raises whatever error was met on the way:
        inputs that cannot be read fail their cells alone."""
        name = digest({**input_factors(cell), "content": self.checksums.of(cell)})
        if name in self._loaders:
            return self._loaders[name]
        try:
            arch, excerpts = architecture_of(cell), self._read(cell)
            if arch is not None:  # small, and often needed by one cell alone: not remembered
                return InputsLoader(name, partial(encoded_inputs, input_factors(cell), arch, excerpts))
            with threads_set(self.threads):  # an embedding may multiply: its last digit depends on threads
                inputs = encoded_inputs(cell, None, excerpts)
            net = Transformer.from_weights(inputs.net.arch, inputs.net.state_dict())  # without its origin
            self._loaders[name] = self.put(name, replace(inputs, net=net))
        except Exception as error:
            known = isinstance(error, RankscopeError)  # others may not be picklable
            shown = error if known else SourceError(f"{type(error).__name__}: {error}", subject=str(cell["model"]))
            self._loaders[name] = InputsLoader(name, partial(_fail, shown))
        return self._loaders[name]

    def put(self, name: str, inputs: CellInputs) -> InputsLoader:
        """Store inputs in a file, which workers map into memory; the loader that is returned works in any process."""
        path = self._folder / f"{name}.pt"
        torch.save(inputs, path)
        return InputsLoader(name, partial(torch.load, path, mmap=True, weights_only=False))

    def _read(self, cell: Cell) -> list[str]:
        """The excerpts of a cell, read from their file once."""
        name = repr([cell.get(factor) for factor in INPUTS])
        if name not in self._excerpts:
            self._excerpts[name] = excerpts_for(cell)
        return self._excerpts[name]


class RaySharedInputs(SharedInputs):
    """Shares the inputs of cells through Ray's object store instead of a file."""

    def put(self, name: str, inputs: CellInputs) -> InputsLoader:
        """Pickle inputs for the object store, whose memory all workers of a node share."""
        return InputsLoader(name, dump(inputs).load, large=True)


@dataclass(frozen=True)
class ZeroCopyPickle:
    """A pickle and, beside it, the bytes of the tensors that were in the object."""

    data: bytes
    buffers: list[np.ndarray]

    def load(self) -> Any:
        """Build the object again; its tensors share memory with `buffers`, so nothing may write to them."""
        return pickle.loads(self.data, buffers=self.buffers)


def dump(thing: Any) -> ZeroCopyPickle:
    """Pickle an object with the bytes of its CPU tensors apart; a tensor that occurs twice is stored once."""
    from ray import cloudpickle

    base: Any = cloudpickle.Pickler

    class Pickler(base):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype in NUMPY_DTYPES:
                return _tensor, (value.detach().contiguous().numpy(),)
            return super().reducer_override(value)

    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    return ZeroCopyPickle(file.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers])


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The tensor over an array that may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def encoded_inputs(cell: Cell, arch: Architecture | None, excerpts: list[str]) -> CellInputs:
    """The network of a cell, not yet changed (drawn on `arch`, or loaded if that is None), and its excerpts encoded."""
    net = base_network(cell, arch)
    return CellInputs(net, *net.encode(excerpts, int(cell["tokens"])))


def _fail(error: Exception) -> NoReturn:
    """Raise, in the worker, the error that the driver met when it read the inputs of a cell."""
    raise error


def excerpts_for(cell: Cell) -> list[str]:
    """The first `samples` excerpts of a cell's text, or of the bundled prose where it names none."""
    from rankscope.sources import bundled_excerpts, excerpts

    samples, tokens = _count(cell, "samples"), _count(cell, "tokens")
    if "text" in cell:
        first = list(itertools.islice(excerpts(str(cell["text"]), "auto", "text"), samples))
    else:
        first = bundled_excerpts(tokens)[:samples]
    text = cell.get("text", "the bundled prose")
    sentence = f"the text must have {samples} excerpts; {text} has {len(first)}: ask for fewer samples"
    require(len(first) >= samples, sentence, TokensError, "samples")
    return first


def _model_checksums(name: str) -> list[str]:
    if Path(name).is_file():
        return [checksum(Path(name))]
    return [] if is_drawn(name) else files_of(name)


def _text_checksums(name: str) -> list[str]:
    path = Path(name)
    require(path.exists(), f"text must be a file or a folder; there is none at {path}", SweepError, "text")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [checksum(file) for file in files]


def _count(cell: Cell, factor: str) -> int:
    value = cell[factor]
    if type(value) is not int or value < 1:
        raise SweepError(f"{factor} must be a whole number, 1 or more; got {value!r}", subject=factor)
    return value


def measure_on_cluster(
    cluster: Cluster, batches: BatchMeasurement, chunks: Iterator[list[str]]
) -> Iterator[tuple[list[str], Profile | None]]:
    """Measure the batches of a corpus on a cluster; with a cluster, the `runner` of `profiles.corpus.corpus_steps`.

    Free workers take the next chunk of texts; each comes back with its profile, in the order of the chunks. Weights,
    embedding and tokenizer go to each node once.
    """
    for net in batches.nets.values():
        if net.device.type != "cpu":
            raise SweepError(f"a corpus on Ray must be measured on the CPU; got device {net.device}", subject="device")
        getattr(net.origin, "tokenizer", None)  # read here: a node may not have its files
    # A built-in metric goes by name, so that each worker takes its own; a user's goes as it is.
    metrics = [known.name if known.name in METRICS else known for known in chosen_metrics("work", batches.metrics)]
    common = os.urandom(8).hex(), cluster.ray.put(dump(replace(batches, metrics=metrics)))
    submitted, returned = itertools.tee(chunks)
    profiles = cluster.in_order(_measure_batch, ((*common, chunk) for chunk in submitted))
    for profile in profiles:
        yield next(returned), profile


_loaded_batches: tuple[str, BatchMeasurement] | None = None
"""The job that this process, one of Ray's workers, has loaded last, and its networks."""


def _measure_batch(job: str, stored: ZeroCopyPickle, texts: list[str]) -> Profile | None:
    """The task that Ray runs for one batch of a corpus."""
    global _loaded_batches
    if _loaded_batches is None or _loaded_batches[0] != job:
        _loaded_batches = job, stored.load()
    return _loaded_batches[1](texts)
