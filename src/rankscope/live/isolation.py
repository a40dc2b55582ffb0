"""Contexts to compute in without the running model noticing; used by all that measures inside hooks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Inside, neither autograd nor the user's autocast is active."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """The module and all its parts are in eval mode inside, and in the modes they had afterwards. Flags are set one by
    one, since a model's own `train` may do more."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def float64_device(device: torch.device) -> torch.device:
    """The device that computes in float64 for this one: itself, or the CPU for MPS, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64_device(x: Tensor) -> Tensor:
    """x on a device that has float64: where it is, or on the CPU."""
    return x.to(float64_device(x.device))
