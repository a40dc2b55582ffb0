"""Pickles whose tensors Ray keeps in shared memory, so that all workers of a node read them without a copy.

`dump` pickles an object with the bytes of its tensors apart (pickle protocol 5, out-of-band buffers); Ray's
object store holds those bytes once per node, and `ZeroCopyPickle.load` builds tensors over them. Used by
`cluster.py` for the inputs of cells and by `ray_jobs.py` for a corpus.
"""

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUMPY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bool, torch.int64, torch.int32)
"""dtypes that numpy has too; tensors of others are pickled as usual."""


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
