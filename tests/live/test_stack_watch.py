"""Calls of the model and of its blocks are reported in order, also where a block is a list of parts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.live.call_follower import has_listed_parts, modules_around, parts_of
from tests.live import reference
from tests.live.encoders import encoder, padded
from tests.live.families import LAYERS, WIDTH, checks


class Inside(nn.Module):
    """An encoder in a model that makes its forward pass again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.encoder, x, use_reentrant=False)


def test_a_part_called_by_itself_is_a_call_and_one_made_again_is_not() -> None:
    model, (X, padding) = Inside().train(), padded()
    with rankscope.watch(model, "mu") as w:
        model(X).sum().backward()
        model.encoder(X, src_key_padding_mask=padding)
    assert checks(w)["calls"] == 2
    assert checks(w)["padded_tokens"] == 2
    assert w.profile().curve("mu").shape == (4, LAYERS + 1)


class Listed(nn.Module):
    """Layers that are lists of a norm, an optional part and a linear map, which are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3)]
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            x = layer[1](layer[0](x))
        return x


def test_a_list_of_parts_is_one_layer() -> None:
    model, X = Listed().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    states = [X]
    for layer in model.layers:
        assert isinstance(layer, nn.ModuleList)
        states.append(layer[1](layer[0](states[-1])).detach())
    with torch.no_grad(), rankscope.watch(model, "mu") as w:
        model(X)
    every = torch.ones(2, 6, dtype=torch.bool)
    expected = torch.stack([reference.mu(state, every) for state in states], 1)
    torch.testing.assert_close(w.profile().curve("mu"), expected)


def test_modules_around_a_block_and_parts_in_it() -> None:
    model = Inside()
    assert modules_around(model, model.encoder.layers[1]) == [model.encoder]
    nested = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.Tanh()]), nn.Linear(2, 2)])
    assert has_listed_parts([nested]) and not has_listed_parts([nested[1]])
    assert parts_of(nested) == [nested[0][0], nested[0][1], nested[1]]  # type: ignore[index]
