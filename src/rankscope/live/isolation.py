"""Contexts to compute in without the running model noticing; used by all that measures inside hooks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def usual_device() -> AbstractContextManager[object]:
    """A context in which tensors without a device are made on the CPU, whatever `torch.set_default_device` said."""
    return nullcontext() if torch.get_default_device() == CPU else CPU


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Inside, neither autograd nor the user's autocast or default device is active."""
    with torch.no_grad(), usual_device():
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
    return CPU if device.type == "mps" else device


def to_float64_device(x: Tensor) -> Tensor:
    """x on a device that has float64: where it is, or on the CPU."""
    return x.to(float64_device(x.device))
