"""Networks in another dtype or on another device: which there are, and how a tensor gets there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError


@dataclass(frozen=True)
class Move:
    """Of a tensor, to another dtype or device. Two that are equal make one source of layers that are read."""

    dtype: torch.dtype | None
    device: torch.device | str | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor there."""
        return tensor.to(device=self.device, dtype=self.dtype)


def refuse_dtype(dtype: object) -> None:
    """Say so where a network cannot have it."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArchitectureError(f"a network's dtype must be a floating torch.dtype; got {dtype!r}")


def refuse_absent(device: torch.device | str) -> None:
    """Say so where this machine has no such device."""
    try:
        torch.zeros(1, device=device).item()  # meta has places for numbers, and none in them
    except (AssertionError, RuntimeError, TypeError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise ArchitectureError(
            f"device must be one that torch has on this machine; got {str(device)!r} ({said}): 'cpu' is "
            "always there"
        ) from error
