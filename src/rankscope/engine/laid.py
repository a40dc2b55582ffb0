"""Anything with tensors in it, laid out so that Ray keeps the tensors in memory that all workers of a node
read, without a copy: a small pickle, and the numbers beside it."""

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Laid:
    """What `laid` gives: goes through any pickle whole."""

    data: bytes
    numbers: list[np.ndarray]

    def taken(self) -> Any:
        """The same thing again. Its tensors lie where `numbers` do: nothing may write to them."""
        return pickle.loads(self.data, buffers=self.numbers)


def laid(thing: Any) -> Laid:
    """The pickle of a thing, with the numbers of its tensors apart; what is there twice is laid out once."""
    from ray import cloudpickle

    usual: Any = cloudpickle.Pickler

    class Pickler(usual):
        def reducer_override(self, given: Any) -> Any:
            if type(given) is torch.Tensor and given.device.type == "cpu" and _known(given.dtype):
                return _tensor, (given.detach().contiguous().numpy(),)
            return super().reducer_override(given)

    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    return Laid(file.getvalue(), [np.frombuffer(each.raw(), dtype=np.uint8) for each in buffers])


def _known(dtype: torch.dtype) -> bool:
    """Whether numpy has it."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bool, torch.int64, torch.int32)


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(numbers)
