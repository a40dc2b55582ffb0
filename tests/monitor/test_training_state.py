"""A training continues as if nothing had been measured."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankscope import Monitor
from rankscope.errors import MonitorError
from rankscope.monitor.training_state import preserved_training_state
from tests.live.families import FAMILIES, tiny
from tests.raising import raises


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


class Memory:
    """State in an object that is no module."""

    def __init__(self) -> None:
        self.past: list[Tensor] = []
        self.calls = 0

    def changed(self) -> float:
        self.calls += 1
        self.past.append(torch.ones(1))
        return float(self.calls + len(self.past))


Memory.__module__ = "elsewhere.memory"  # of another package


class Keeping(nn.Module):
    """A model that keeps something of every call in a plain attribute, and computes with it."""

    def __init__(self, attribute: Any, use: Callable[["Keeping"], Tensor | float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.attribute, self.use = attribute, use

    def forward(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = layer(X)
        return X + self.use(self)


def recurred(model: Keeping) -> Tensor:
    """As Transformer-XL: what the last call left, written over in place."""
    past = model.attribute.clone()
    model.attribute.mul_(0.5).add_(1)
    return past


def rebound(model: Keeping) -> Tensor:
    model.attribute = [0.5 * model.attribute[0] + 1]
    return model.attribute[0]


def counted(model: Keeping) -> float:
    model.attribute += 1
    return float(model.attribute)


def cached(model: Keeping) -> float:
    model.attribute[len(model.attribute)] = torch.ones(1)
    return len(model.attribute)


def grown(model: Keeping) -> float:
    model.attribute.append(1.0)
    return sum(model.attribute)


def made(model: Keeping) -> float:
    later = float(getattr(model, "later", 0.0)) + 1.0
    vars(model)["later"] = later
    return later


def written(model: Keeping) -> float:
    model.attribute += 1
    return float(model.attribute.sum())


def resized(model: Keeping) -> float:
    model.attribute.data = torch.ones(len(model.attribute) + 1)
    return float(model.attribute.sum())


STATES: dict[str, Callable[[], tuple[Any, Callable[[Keeping], Tensor | float]]]] = {
    "a tensor": lambda: (torch.zeros(1), recurred),
    "a list of tensors": lambda: ([torch.zeros(1)], rebound),
    "a number": lambda: (0, counted),
    "a dictionary": lambda: ({}, cached),
    "a deque": lambda: (deque([0.0], maxlen=3), grown),
    "an attribute that was not there": lambda: (None, made),
    "an array": lambda: (np.zeros(2), written),
    "a tensor of another size": lambda: (torch.ones(1), resized),
    "a generator of torch": lambda: (
        torch.Generator().manual_seed(1), lambda model: torch.rand(1, generator=model.attribute)
    ),
    "a generator of Python": lambda: (random.Random(1), lambda model: model.attribute.random()),
    "a generator of numpy": lambda: (np.random.default_rng(1), lambda model: float(model.attribute.random())),
    "an object": lambda: (Memory(), lambda model: model.attribute.changed()),
    "a namespace in a list": lambda: ([SimpleNamespace(calls=0)], lambda model: counted_in_list(model)),
}  # fmt: skip


def counted_in_list(model: Keeping) -> float:
    model.attribute[0].calls += 1
    return float(model.attribute[0].calls)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("state", STATES)
def test_state_in_plain_attributes_is_put_back_and_training_is_the_same(state: str, tmp_path: Path) -> None:
    def trained(watched: bool) -> list[Tensor]:
        model = Keeping(*STATES[state]()).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, "mu", every=1, probe=torch.ones(1, 4, 8), run=tmp_path) if watched else None
        for step in range(4):
            X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(X) - X).square().mean().backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()
        if monitor is not None:
            monitor.close()
        return list(model.parameters())

    assert all(map(torch.equal, trained(False), trained(True)))


def weighed(model: Keeping) -> float:
    with torch.no_grad():
        model.layers[0].linear1.weight.mul_(1.01)  # type: ignore[union-attr,operator]
    return 0.0


@pytest.mark.parametrize(
    ("attribute", "use"),
    [
        (None, weighed),
        (itertools.count(), lambda model: float(next(model.attribute))),
        (torch.eye(2).to_sparse(), lambda model: float(model.attribute.mul_(2).sum())),
    ],
    ids=["a weight", "a counter", "a sparse tensor"],
)
def test_what_cannot_be_put_back_is_refused_at_the_start(attribute: Any, use: Any, tmp_path: Path) -> None:
    model = Keeping(attribute, use)
    with raises(MonitorError, subject="model"):
        Monitor(model, "mu", every=1, probe=torch.ones(1, 4, 8), run=tmp_path)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_refused(family: str) -> None:
    model, batch = FAMILIES[family].model(), FAMILIES[family].batch()
    with preserved_training_state(model):
        model(**batch)


def test_tables_that_grow_with_the_longest_sample_are_as_they_were() -> None:
    """Rotary embeddings that are scaled by the length of a sample keep the longest one in a plain attribute, beside the
    frequencies in a buffer: a probe that is longer than training samples must leave neither."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    fields: dict[str, Any] = {"num_key_value_heads": 2, "max_position_embeddings": 8, "rope_parameters": scaling}
    import transformers

    torch.manual_seed(0)
    model = tiny(transformers.LlamaModel, **fields)().eval()
    short, long = torch.arange(6)[None] + 3, torch.arange(30)[None] + 3
    before = model(short).last_hidden_state
    length, frequencies = model.rotary_emb.max_seq_len_cached, model.rotary_emb.inv_freq.clone()
    with preserved_training_state(model):
        model(long)
        assert model.rotary_emb.max_seq_len_cached > length
    assert model.rotary_emb.max_seq_len_cached == length and torch.equal(model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(model(short).last_hidden_state, before)
