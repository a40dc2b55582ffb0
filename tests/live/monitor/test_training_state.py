"""A training continues as if nothing had been measured."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankscope import Monitor
from rankscope.live.monitor.training_state import preserved_training_state


class Restless(nn.Module):
    """A model that leaves traces of every call."""

    calls: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.layers[1].eval()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, X: Tensor) -> Tensor:
        self.calls += 1
        self.cache = torch.randn(3)
        random.random()
        np.random.rand()
        for layer in self.layers:
            X = layer(X)
        return X


def test_nothing_is_left_of_a_measurement(tmp_path: Path) -> None:
    model = Restless().train()
    model.layers[1].eval()
    cache, modes = model.cache, [part.training for part in model.modules()]
    np.random.seed(1)
    torch.manual_seed(1)
    numpys, torchs = np.random.get_state(legacy=False)["state"]["key"].copy(), torch.get_rng_state()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    Monitor(model, every=1, probe=torch.ones(1, 4, 8), run=tmp_path).close()
    assert (np.random.get_state(legacy=False)["state"]["key"] == numpys).all()
    assert torch.equal(torch.get_rng_state(), torchs)
    assert model.calls.item() == 0 and model.cache is cache and not cache.any()
    assert [part.training for part in model.modules()] == modes
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(grads) == 1 and bool((grads[0] == 1).all())


def test_nothing_is_left_of_a_measurement_that_fails() -> None:
    model = Restless().train()
    with pytest.raises(ZeroDivisionError), preserved_training_state(model):
        before = random.getstate()
        model(torch.ones(1, 4, 8))
        assert random.getstate() != before
        raise ZeroDivisionError
    assert random.getstate() == before
    assert model.training and model.calls.item() == 0 and torch.is_grad_enabled()
    assert torch.is_autocast_cache_enabled()
