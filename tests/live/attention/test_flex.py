"""Flex attention, called as its users call it, against the same heads through torch's other function."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import rankscope
from rankscope.errors import WatchError
from tests.live.families import seen, tiny
from tests.live.gpt import HEADS, LAYERS, METRICS, WIDTH, Heads, gpt, same, words
from tests.raising import raises

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
TOKENS = 6
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")
HIDING = create_block_mask(lambda b, h, i, j: (j < 4) | (b == 0), 2, None, TOKENS, TOKENS, device="cpu")
plain_flex = flex_attention  # watched names come back


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - SLOPES[h] * (i - j).abs()


def by_bias(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    at = torch.arange(TOKENS)
    bias = -SLOPES[:, None, None] * (at[:, None] - at).abs()
    return F.scaled_dot_product_attention(
        q, k, v, bias.masked_fill(~(at[:, None] >= at), -torch.inf) if causal else bias, scale=scale
    )


def first(found: Any) -> Tensor:
    return found[0]


WAYS: dict[str, tuple[Heads, Heads]] = {
    "plain": (
        lambda _, q, k, v: flex_attention(q, k, v),
        lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v),
    ),
    "a bias and a mask": (
        lambda _, q, k, v: flex_attention(q, k, v, alibi, CAUSAL),
        lambda _, q, k, v: by_bias(q, k, v, causal=True),
    ),
    "a bias, by the module's name, with more to return": (
        lambda _, q, k, v: first(
            flex.flex_attention(q, k, v, alibi, scale=0.3, return_aux=flex.AuxRequest(lse=True))
        ),
        lambda _, q, k, v: by_bias(q, k, v, causal=False, scale=0.3),
    ),
    "grouped heads": (
        lambda _, q, k, v: flex_attention(q, k[:, ::2], v[:, ::2], block_mask=CAUSAL, enable_gqa=True),
        lambda _, q, k, v: F.scaled_dot_product_attention(
            q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_it_is_what_torchs_other_function_shows(way: str) -> None:
    by_flex, by_torch = map(gpt, WAYS[way])
    plain = by_flex(words())
    with rankscope.watch(by_flex, METRICS) as w:
        assert torch.equal(by_flex(words()), plain)
    assert flex.flex_attention is flex_attention is plain_flex
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)
    same(w, seen(by_torch, METRICS, words()), within=1e-9)


@torch.no_grad()
def test_two_watches_that_end_in_another_order() -> None:
    one, other = gpt(WAYS["plain"][0]), gpt(WAYS["plain"][0])
    first_one, second = rankscope.watch(one, "entropy"), rankscope.watch(other, "entropy")
    first_one.__enter__()
    second.__enter__()
    one(words())
    first_one.__exit__(None, None, None)
    other(words())
    assert flex_attention is not plain_flex
    second.__exit__(None, None, None)
    assert flex.flex_attention is flex_attention is plain_flex
    for each in (first_one, second):
        assert each.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)


def test_a_mask_that_hides_tokens_asks_for_padding() -> None:
    model = gpt(lambda _, q, k, v: flex_attention(q, k, v, block_mask=HIDING))
    with raises(WatchError, subject="padding"):
        seen(model, "entropy", words())


def test_cross_attention_of_as_many_tokens_is_told_apart() -> None:
    other = torch.randn(2, HEADS, TOKENS, WIDTH // HEADS, dtype=torch.float64)
    with raises(WatchError, subject="attention"):
        seen(gpt(lambda _, q, k, v: flex_attention(q, other, v)), "entropy", words())


class Holding(nn.Module):
    """A block that has the function for a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), flex_attention

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return x + self.attend(y, y, y).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_a_module_that_holds_the_function() -> None:
    model = nn.Sequential(Holding(), Holding()).double()
    X = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    w = seen(model, "entropy", X)
    y = F.layer_norm(X, (WIDTH,)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    expected = torch.special.entr((y @ y.mT / 2).softmax(-1)).sum(-1).mean(-1)
    torch.testing.assert_close(w.profile().curve("entropy")[:, 1], expected)
    assert model[0].attend is plain_flex


compiled: Any = None


@torch.no_grad()
def test_compiled_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    function = torch.compile(flex_attention, backend="eager")
    monkeypatch.setitem(globals(), "compiled", function)
    w = seen(gpt(lambda _, q, k, v: compiled(q, k, v, alibi)), METRICS, words())
    assert compiled is function
    plain = gpt(lambda _, q, k, v: by_bias(q, k, v, causal=False))
    same(w, seen(plain, METRICS, words()), within=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_transformers_with_flex_attention(padded: bool) -> None:
    """Its weights are computed beside, by the modeling file's own eager attention with the same mask."""
    model: Any = tiny(hf.LlamaModel, num_key_value_heads=2)().eval()
    ids = words(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 1 - int(padded)
    expected = seen(model, METRICS, input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("flex_attention")
    w = seen(model, METRICS, input_ids=ids, attention_mask=mask)
    assert any("Attention ran with flex_attention" in note for note in w.notes)
    same(w, expected, within=1e-4)
