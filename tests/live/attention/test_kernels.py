"""Kernels of torch: their pattern, computed a second time, and flex attention as its users call it."""

import platform
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import rankscope
from rankscope.errors import WatchError
from rankscope.live.attention.kernels import FlexAttention, ScaledDotProduct, over_scores
from tests.live.families import seen, tiny
from tests.live.gpt import HEADS, LAYERS, METRICS, WIDTH, Heads, gpt, same, words
from tests.raising import raises


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


SEES = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 4, 8), (2, 3, 5, 8), {}),
    "causal": ((2, 3, 4, 8), (2, 3, 4, 8), {"is_causal": True}),
    "causal, more keys": ((2, 3, 4, 8), (2, 3, 5, 8), {"is_causal": True}),
    "a boolean mask": ((2, 3, 4, 8), (2, 3, 5, 8), {"attn_mask": SEES}),
    "an added mask": ((2, 3, 4, 8), (2, 3, 5, 8), {"attn_mask": rand(2, 1, 4, 5)}),
    "a scale": ((2, 3, 4, 8), (2, 3, 5, 8), {"scale": 0.9}),
    "grouped heads": ((2, 6, 4, 8), (2, 3, 5, 8), {"enable_gqa": True}),
    "no heads": ((2, 4, 8), (2, 5, 8), {}),
    "one sequence": ((4, 8), (5, 8), {}),
    "heads in groups": ((2, 3, 2, 4, 8), (2, 3, 2, 5, 8), {"attn_mask": SEES}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pattern_is_as_torch_documents_it(name: str) -> None:
    """Row by row: exp of what is seen over its sum, and that pattern gives what the call gave."""
    shape, of_keys, given = CALLS[name]
    q, k, v = rand(*shape), rand(*of_keys), rand(*of_keys[:-1], 6)
    output = F.scaled_dot_product_attention(q, k, v, **given)
    call = ScaledDotProduct(output, q, k, v, **given)
    P, head_outputs = call.pattern(), call.head_outputs()
    groups = shape[-3] // of_keys[-3] if given.get("enable_gqa") else 1
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    L, S = shape[-2], of_keys[-2]
    mask = given.get("attn_mask", torch.ones(L, S).bool())
    mask = mask.expand(*shape[:-2], L, S).reshape(-1, L, S)
    flat = P.reshape(-1, L, S)
    for one in range(len(q)):
        for i in range(L):
            score = (k[one // groups] @ q[one, i]).numpy() * given.get("scale", 8**-0.5)
            if mask.dtype == torch.bool:
                here = mask[one, i].numpy() & ((np.arange(S) <= i) | ("is_causal" not in given))
            else:
                here, score = np.ones(S, bool), score + mask[one, i].numpy()
            expected = np.where(here, np.exp(score), 0.0)
            np.testing.assert_allclose(flat[one, i], expected / expected.sum(), rtol=1e-12, atol=1e-15)
    v = v.repeat_interleave(groups, 0).reshape(*P.shape[:2], S, 6)
    torch.testing.assert_close(P @ v, head_outputs.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_no_key_has_zeros() -> None:
    q, sees = rand(1, 2, 3, 4), torch.ones(3, 3).bool()
    sees[1] = False
    P = ScaledDotProduct(F.scaled_dot_product_attention(q, q, q, sees), q, q, q, sees).pattern()
    assert torch.equal(P[:, :, 1], torch.zeros(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(P[:, :, [0, 2]].sum(-1), torch.ones(1, 2, 2, dtype=torch.float64))


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_a_causal_bias_is_about_the_corner_that_it_names(bias: Any) -> None:
    q, k = rand(2, 3, 4, 8), rand(2, 3, 6, 8)
    call = ScaledDotProduct(F.scaled_dot_product_attention(q, k, k, bias(4, 6)), q, k, k, bias(4, 6))
    ahead = 3 if bias is causal_lower_right else 1
    assert torch.equal(call.pattern() == 0, torch.ones(4, 6).triu(ahead).bool().expand(2, 3, 4, 6))


def test_a_pattern_that_does_not_give_the_output_is_refused() -> None:
    q = rand(1, 2, 3, 4)
    with raises(WatchError, subject="pattern"):
        ScaledDotProduct(F.scaled_dot_product_attention(q, q, q), q, q, q, is_causal=True).pattern()


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
    "plain": (lambda _, q, k, v: flex_attention(q, k, v), lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "a bias and a mask": (
        lambda _, q, k, v: flex_attention(q, k, v, alibi, CAUSAL),
        lambda _, q, k, v: by_bias(q, k, v, causal=True),
    ),
    "a bias, by the module's name, with more to return": (
        lambda _, q, k, v: first(flex.flex_attention(q, k, v, alibi, scale=0.3, return_aux=flex.AuxRequest(lse=True))),
        lambda _, q, k, v: by_bias(q, k, v, causal=False, scale=0.3),
    ),
    "grouped heads": (
        lambda _, q, k, v: flex_attention(q, k[:, ::2], v[:, ::2], block_mask=CAUSAL, enable_gqa=True),
        lambda _, q, k, v: F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True),
    ),
}


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("plain", "a bias and a mask")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*SLOW, "a bias, by the module's name, with more to return", "grouped heads"])
@torch.no_grad()
def test_it_is_what_torchs_other_function_shows(way: str) -> None:
    by_flex, by_torch = map(gpt, WAYS[way])
    plain = by_flex(words())
    with rankscope.watch(by_flex, METRICS) as w:
        assert torch.equal(by_flex(words()), plain)
    assert flex.flex_attention is flex_attention is plain_flex
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)
    same(w, seen(by_torch, METRICS, words()), within=1e-9)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@torch.no_grad()
def test_compiled_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    function = torch.compile(flex_attention, backend="eager")
    monkeypatch.setitem(globals(), "compiled", function)
    w = seen(gpt(lambda _, q, k, v: compiled(q, k, v, alibi)), METRICS, words())
    assert compiled is function
    plain = gpt(lambda _, q, k, v: by_bias(q, k, v, causal=False))
    same(w, seen(plain, METRICS, words()), within=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch compiles flex attention on CPUs of x86_64 alone")
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


MASKS: dict[str, tuple[tuple[int, ...], Tensor]] = {
    "of each sample": ((2, 3, 4, 8), torch.rand(2, 1, 4, 4) > 0.4),
    "one row for all": ((2, 3, 4, 8), torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool()[:, None, None]),
    "of heads": ((2, 3, 4, 8), torch.rand(3, 4, 4) > 0.6),
    "no heads": ((2, 4, 8), torch.rand(2, 4, 4) > 0.6),
    "five axes": ((2, 3, 2, 4, 8), torch.rand(2, 1, 2, 4, 4) > 0.6),
    "added": ((2, 3, 4, 8), torch.zeros(2, 1, 1, 4).masked_fill(torch.tensor([[[[0, 0, 1, 1]]]]).bool(), -1e9)),
}


@pytest.mark.parametrize("name", MASKS)
def test_tokens_are_hidden_that_no_query_of_any_head_sees(name: str) -> None:
    shape, mask = MASKS[name]
    x = rand(*shape)
    found = ScaledDotProduct(x, x, x, x, attn_mask=mask).hidden_tokens()
    seen = (mask > -1e3 if mask.is_floating_point() else mask).expand(*shape[:-1], 4).reshape(2, -1, 4, 4)
    assert found is not None and found.shape == (2, 4)
    for sample in range(2):
        for key in range(4):
            somebody = any(bool(seen[sample, head, i, key]) for head in range(seen.shape[1]) for i in range(4))
            assert bool(found[sample, key]) != somebody


def test_flex_attention_hides_tokens_by_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.live.attention.kernels.HELD", 20)  # a row at a time
    x, last = rand(2, 3, 6, 8), torch.tensor([3, 5])
    mask = create_block_mask(lambda b, h, i, j: (j <= last[b]) & (j >= i - 4), 2, None, 6, 6, device="cpu")
    hidden = FlexAttention(x, x, x, x, block_mask=mask).hidden_tokens()
    assert hidden is not None and hidden.tolist() == [[False] * 4 + [True] * 2, [False] * 6]
    assert FlexAttention(x, x, x, x).hidden_tokens() is None


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("at", [torch.arange(4), torch.tensor([3, 1])])
def test_functions_of_indices_are_mapped_over_the_queries_asked_for(at: Tensor, given: bool) -> None:
    rows = at.tolist()
    scores = rand(2, 3, len(rows), 5)

    def of_indices(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return 1000 * batch + 100 * head + 10 * query + key

    def with_score(score: Tensor, *indices: Tensor) -> Tensor:
        return score + of_indices(*indices)

    found = over_scores(with_score if given else of_indices, scores, at, given)
    for b, h, row, key in np.ndindex(2, 3, len(rows), 5):
        expected = 1000 * b + 100 * h + 10 * rows[row] + key + (float(scores[b, h, row, key]) if given else 0.0)
        assert float(found[b, h, row, key]) == pytest.approx(expected, rel=1e-12)
