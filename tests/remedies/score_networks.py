"""Networks for remedies on attention, and their attention written out again from queries and keys."""

import math
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer, mask_matrix
from tests.builders import normal

MASKS = ["complete", "causal", "window:1"]
PADDING = torch.tensor([[False] * 6, [True, True] + [False] * 4])
X = normal(2, 6, 8, seed=3)


def network(mask: str = "complete", variant: str = "transformer", **fields: Any) -> Transformer:
    arch = Architecture(layers=3, width=8, heads=2, mask=mask, mlp_width=16, **fields)
    return Transformer.random(arch, seed=1, init="xavier").variant(variant)


def scores(net: Transformer, prefix: str = "layers.0.attention") -> Tensor:
    """q . k / sqrt(head_width) of the first layer, from its tensors."""
    state = net.state_dict()
    names = ("query", "key") if "parts" in prefix else ("query.weight", "key.weight")
    q, k = (torch.einsum("btd,dhc->bhtc", X, state[f"{prefix}.{name}"]) for name in names)
    return q @ k.mT / math.sqrt(net.arch.head_width)


def seen(mask: str) -> Tensor:
    """[sample, token, token]: whom valid tokens see."""
    return mask_matrix(mask, 6) & ~PADDING[:, None, :] & ~PADDING[:, :, None]


def softmax(scores: Tensor, mask: str) -> Tensor:
    """Over what each token sees; rows of padding zero."""
    weights = scores.exp() * seen(mask)[:, None]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def first(net: Transformer) -> Tensor:
    return net.run(X, PADDING, attention=True).attention[0]


def equal(net: Transformer) -> None:
    """States and attention in both arithmetics."""
    for plain, step in zip(net.steps(X, PADDING), propagate(net, X, PADDING), strict=True):
        size = float(plain.state.abs().max())
        assert torch.allclose(step.state.tokens(), plain.state, rtol=0, atol=1e-10 * size)
        if plain.attention is not None and step.attention is not None:
            rows = ~PADDING[:, None, :, None]
            assert torch.allclose(step.attention.matrix() * rows, plain.attention * rows, atol=1e-12)
