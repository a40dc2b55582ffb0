"""A small network and tokens for it, which several tests of networks share."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}


@pytest.fixture
def net() -> Transformer:
    return Transformer.random(Architecture(**BASE), seed=1, init="xavier")


@pytest.fixture
def X() -> Tensor:
    return torch.randn(2, 5, 8, dtype=torch.float64)
