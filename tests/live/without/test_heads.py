"""Heads that are left out: what they give to the output projection is 0."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.errors import WatchError
from rankscope.live import watch
from tests.live.gpt import HEADS, METRICS, Block, SelfAttention, gpt, same, words
from tests.live.without.parts import edited, random_gpt, without
from tests.raising import raises

OUT = {1: [1], 3: [0, 2]}


def silenced(projection: nn.Linear, heads: list[int], count: int) -> None:
    """An output projection that does not take these heads."""
    with torch.no_grad():
        projection.weight.view(len(projection.weight), count, -1)[:, heads] = 0


def silence(copy: Any) -> None:
    for layer, heads in OUT.items():
        silenced(copy.transformer["h"][layer - 1].attn.c_proj, heads, HEADS)


@pytest.mark.parametrize("written", [False, True])
def test_heads_add_nothing(written: bool) -> None:
    """Seen in torch's attention function, and in a softmax that is written out."""
    model = gpt(lambda self, q, k, v: F.softmax(q @ k.mT / 2, -1) @ v) if written else random_gpt()
    output, w = without(model, METRICS, heads=OUT)
    expected, v = without(edited(model, silence), METRICS)
    assert torch.equal(output, expected)
    same(w, v)
    assert bool((w.profile().curve("head_mu")[:, 1, 1] == 0).all())


def test_heads_can_be_left_out_where_no_attention_is_measured() -> None:
    model = random_gpt()
    assert torch.equal(without(model, "mu", heads=OUT)[0], without(edited(model, silence))[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy", "largest_logit", "head_mu"]])
def test_heads_of_torch_attention(batch_first: bool, metrics: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    weight, x = model.layers[0].self_attn.out_proj.weight, torch.randn(2, 5, 8, dtype=torch.float64)
    output, w = without(model, metrics, x, heads={1: [0], 3: [1]})
    assert model.layers[0].self_attn.out_proj.weight is weight

    def edit(copy: Any) -> None:
        for layer, head in ((0, 0), (2, 1)):
            silenced(copy.layers[layer].self_attn.out_proj, [head], 2)

    expected, v = without(edited(model, edit), metrics, x)
    assert torch.equal(output, expected)
    same(w, v, metrics)


def test_gradients_are_those_of_a_model_without_the_heads() -> None:
    model = random_gpt().train()
    other = edited(model, silence)
    with watch(model, "mu").without(heads=OUT):
        model(words()).square().sum().backward()
    other(words()).square().sum().backward()
    mine, theirs = (each.transformer["h"][0].attn.c_attn.weight.grad for each in (model, other))  # type: ignore[index]
    assert torch.equal(mine, theirs)


class Gated(SelfAttention):
    """Multiplies what heads give before it projects them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.c_proj(y * x.sigmoid())


class GatedBlock(Block):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.attn = Gated(dropout)


def test_heads_that_reach_no_projection_are_refused() -> None:
    with raises(WatchError, "heads"):
        without(random_gpt(GatedBlock), heads=OUT)


def test_there_are_no_other_heads() -> None:
    with raises(WatchError, "heads"):
        without(random_gpt(), heads={1: [HEADS]})
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with raises(WatchError, "heads"):
        without(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x=torch.randn(1, 4, 8), heads={1: [2]})
