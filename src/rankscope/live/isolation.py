"""A place to compute in that the running model does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Outside the user's autograd and autocast."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """The module in eval mode: nothing is dropped, and no random number is drawn."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def float64_device(device: torch.device) -> torch.device:
    """Where float64 is: on the device itself, or on the CPU for those that have none."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64_device(x: Tensor) -> Tensor:
    """x where float64 is."""
    return x.to(float64_device(x.device))
