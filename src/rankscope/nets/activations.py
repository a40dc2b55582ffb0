"""The nonlinearities of an MLP, by the name an architecture gives them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": _identity,
}
