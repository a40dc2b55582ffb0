"""Attention whose softmax a module writes out itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

import rankscope
from rankscope.errors import WatchError
from tests.live.families import checks, seen
from tests.live.gpt import (
    GPT,
    HEADS,
    LAYERS,
    METRICS,
    WIDTH,
    Block,
    Heads,
    asks_for_padding,
    gpt,
    same,
    trains_the_same,
    words,
)
from tests.raising import raises


def hidden(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5


def causal(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).masked_fill(hidden(q), float("-inf"))


def as_mingpt(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / q.size(-1) ** 0.5)
    att = att.masked_fill(hidden(q)[None, None], float("-inf"))
    att = F.softmax(att, dim=-1)
    att = F.dropout(att, module.dropout, module.training)
    return att @ v


def by_method(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.matmul(q, k.mT).div(q.shape[-1] ** 0.5)
    att = torch.where(hidden(q), torch.finfo(att.dtype).min, att)
    return torch.matmul(att.softmax(-1).to(v.dtype).contiguous(), v)


def by_einsum(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads after tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    att = torch.einsum("b i h d, b j h d -> b h i j", q, k) / q.shape[-1] ** 0.5
    att = att + torch.zeros_like(att[0, 0]).masked_fill(hidden(q.transpose(1, 2)), -1e9)
    return torch.einsum("bhij,bjhd->bihd", nn.Softmax(-1)(att), v).transpose(1, 2)


def by_bmm(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads counted as samples, but where they are masked; rows that see nothing get nothing."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    att = torch.bmm(q, k.transpose(1, 2)) * shape[-1] ** -0.5
    att = att.view(*shape[:3], -1)
    att[..., hidden(q)] = float("-inf")
    att = torch.softmax(att.view(-1, *att.shape[2:]), dim=-1)
    return att.masked_fill(hidden(q), 0.0).nan_to_num().bmm(v).view(shape)


def folded(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads counted as samples before the scores and until the end, as in fairseq and BART without a mask."""
    shape = q.shape
    q, k, v = (x.contiguous().view(-1, *shape[2:]) for x in (q, k, v))
    att = torch.bmm(q, k.transpose(1, 2)) * shape[-1] ** -0.5
    return torch.bmm(att.masked_fill(hidden(q), -torch.inf).softmax(-1), v).view(shape)


def as_fairseq(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tokens first, then heads counted as samples, each with its part of the width."""
    batch, heads, token, d = q.shape
    rows = (x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v))  # [token, batch, width]
    q, k, v = (x.contiguous().view(token, batch * heads, d).transpose(0, 1) for x in rows)
    att = torch.bmm(q, k.transpose(1, 2)) * d**-0.5
    return torch.bmm(att.masked_fill(hidden(q), -torch.inf).softmax(-1), v).view(batch, heads, token, d)


def flattened_after(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Bloom does."""
    att = torch.softmax(causal(q, k), dim=-1)
    return torch.bmm(att.view(-1, *att.shape[2:]), v.reshape(-1, *v.shape[2:])).view(q.shape)


WAYS: dict[str, Heads] = {
    each.__name__: each for each in (as_mingpt, by_method, by_einsum, by_bmm, folded, as_fairseq, flattened_after)
}


def alike(heads: Heads, block: type[Block] = Block) -> tuple[GPT, GPT]:
    """The same through torch's function."""
    plain, model = GPT(block=block).double().eval(), gpt(heads, block=block)
    model.load_state_dict(plain.state_dict())
    return model, plain


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_torchs_function_shows(way: str) -> None:
    model, plain = alike(WAYS[way])
    w = seen(model, METRICS, words())
    same(w, seen(plain, METRICS, words()))
    assert checks(w)["rows_sum_to_one"] is True
    assert not any("left out:" in note for note in w.notes)


def shared_by_torch(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads to each of keys and values."""
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)


def shared_in_groups(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.unflatten(1, (2, 2)), k[:, :2, None], v[:, :2, None]
    return (causal(q, k).softmax(-1) @ v).flatten(1, 2)


def one_by_torch(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)


def one_by_einsum(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * q.shape[-1] ** -0.5
    return torch.einsum("bjd,bhij->bhid", v[:, 0], att.masked_fill(hidden(q), -torch.inf).softmax(-1))


@pytest.mark.parametrize(("written", "by_torch"), [(shared_in_groups, shared_by_torch), (one_by_einsum, one_by_torch)])
def test_heads_that_share_keys_and_values(written: Heads, by_torch: Heads) -> None:
    same(seen(gpt(written), METRICS, words()), seen(gpt(by_torch), METRICS, words()))


@torch.inference_mode()
def test_in_inference_mode() -> None:
    model, plain = alike(as_mingpt)
    same(seen(model, METRICS, words()), seen(plain, METRICS, words()))


def test_training_is_the_same_to_the_last_bit() -> None:
    """Weights are those before dropout: in the first block, those of eval mode."""
    w = trains_the_same(lambda: gpt(as_mingpt, 0.3))
    undropped = seen(gpt(as_mingpt), "entropy", words()).profile().curve("entropy")
    torch.testing.assert_close(w.profile().curve("entropy")[:, 1], undropped[:, 1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(w.profile().curve("entropy")[:, 2], undropped[:, 2])


def test_under_autocast_and_with_a_softmax_in_float32() -> None:
    def narrow(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(causal(q, k), -1, dtype=torch.float32).type_as(v) @ v

    w = seen(gpt(narrow), METRICS, words())
    assert any("computes attention in float32 inside" in note for note in w.notes)
    model = gpt(as_mingpt).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(words())
        with rankscope.watch(model, ["entropy", "head_mu"]) as w:
            assert torch.equal(model(words()), plain)
    assert w.profile().curve("entropy")[:, 1:].isfinite().all()


class Routed(Block):
    """As many experts as tokens, chosen by a softmax, after attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        torch.manual_seed(5)
        self.router, self.experts = nn.Linear(WIDTH, 6), nn.Parameter(torch.randn(6, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.routed(self.ln_2(x))

    def routed(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.router(x), dim=-1)  # [batch, token, expert], of 6 tokens
        return torch.einsum("bne,bned->bnd", gates, torch.einsum("bnd,edf->bnef", x, self.experts))


class Lone(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(self.ln_1(x))


class Slotted(Routed):
    """Soft MoE: as many slots as tokens, weighted by a softmax, times what comes from the tokens."""

    def routed(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        slots = logits.softmax(1).mT @ x
        return logits.softmax(-1) @ torch.einsum("bsd,sdf->bsf", slots, self.experts)


@pytest.mark.parametrize("block", [Routed, Slotted])
def test_a_router_of_as_many_experts_as_tokens_is_no_attention(block: type[Block]) -> None:
    model, plain = alike(as_mingpt, block)
    w = seen(model, METRICS, words())
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)
    same(w, seen(plain, METRICS, words()))


def talking(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P = causal(q, k).softmax(-1)
    return F.conv2d(P, torch.eye(HEADS).double().roll(1, 0)[..., None, None]) @ v


def differential(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (causal(q, k).softmax(-1) - 0.5 * causal(k, q).softmax(-1)) @ v


def twice(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k).softmax(-1) @ v + causal(k, q).softmax(-1) @ v


def two_hops(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P = causal(q, k).softmax(-1)
    return P @ (P @ v)


def squared(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P = causal(q, k).softmax(-1)
    return (P @ P) @ v


def one_broadcast(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    other = (causal(k, q).softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)
    return causal(q, k).softmax(-1) @ v + other


def broadcast(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (causal(q, k).softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)


def another_axis(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-2) @ v


def renormalised(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P = scores(q, k).softmax(-1)
    P = P.masked_fill(hidden(q), 0.0)
    return P / P.sum(-1, keepdim=True) @ v


def in_place(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P = causal(q, k).softmax(-1)
    P[:, 0].mul_(0.5)
    return P @ v


def transposed(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ causal(q, k).softmax(-1).mT).mT


def sinks(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = torch.cat([causal(q, k), torch.zeros_like(q[..., :1])], -1)
    return wide.softmax(-1)[..., :-1] @ v


def windows(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    y = scores(q, k).softmax(-1) @ v
    return y.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)


def one_by_one(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([causal(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)], 1)


def of_a_parameter(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ torch.ones(HEADS, v.shape[-2], dtype=q.dtype)).softmax(-1) @ v


REFUSED: dict[Heads, tuple[str, str]] = {
    talking: ("pattern", "conv2d"),
    differential: ("pattern", "sub"),
    renormalised: ("pattern", "masked_fill"),
    in_place: ("pattern", "a change in place"),
    transposed: ("pattern", "in block 1"),
    another_axis: ("pattern", "another axis than the last"),
    twice: ("blocks", "second"),
    two_hops: ("blocks", "second"),
    squared: ("pattern", "matmul in another way"),
    one_broadcast: ("blocks", "second softmax"),
    one_by_one: ("blocks", "second"),
    broadcast: ("attention", "not seen to multiply values"),
    sinks: ("attention", "6 tokens to 7 in 2 samples"),
    windows: ("attention", "3 tokens to 3 in 4 samples"),
    of_a_parameter: ("attention", "queries and keys"),
}
"""Heads that are refused, with the error's subject and what its sentence must name."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("heads", REFUSED, ids=lambda each: each.__name__)
def test_what_is_not_certain_is_refused(heads: Heads) -> None:
    model = gpt(heads)
    subject, named = REFUSED[heads]
    with raises(WatchError, subject=subject) as caught:
        seen(model, "entropy", words())
    assert named in str(caught.value)
    assert not _get_current_function_mode_stack()
    assert seen(model, "mu", words()).profile().curve("mu").shape == (2, LAYERS + 1)


def test_a_router_alone_is_no_attention() -> None:
    with raises(WatchError, subject="attention"):
        seen(gpt(as_mingpt, block=Lone), "entropy", words())


def over_channels(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cross-covariance attention, of as many channels as tokens."""
    return (scores(q.mT, k.mT).softmax(-1) @ v.mT).mT


def heads_first(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of as many heads as samples."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (causal(q, k).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(("heads", "batch", "token"), [(over_channels, 2, WIDTH // HEADS), (heads_first, HEADS, 6)])
def test_other_axes_of_the_same_size_are_no_tokens(heads: Heads, batch: int, token: int) -> None:
    with raises(WatchError, subject="attention"):
        seen(gpt(heads), "entropy", words(batch, token))


@pytest.mark.slow
def test_as_many_channels_or_heads_as_tokens_or_samples() -> None:
    model, plain = alike(as_mingpt)
    for ids in (words(2, WIDTH // HEADS), words(HEADS, 6), words(1, 6)):
        same(seen(model, METRICS, ids), seen(plain, METRICS, ids))


def test_heads_need_their_projection() -> None:
    def gated(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return as_mingpt(module, q, k, v) * q.sigmoid()

    model = gpt(gated)
    assert seen(model, "entropy", words()).profile().curve("entropy")[:, 1:].isfinite().all()
    with raises(WatchError, subject="heads"):
        seen(model, "head_mu", words())


class Crossing(Block):
    """Looks at other tokens after its own, as many."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.register_buffer("memory", torch.randn(2, HEADS, 6, WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        q, memory = x.unflatten(-1, (HEADS, -1)).transpose(1, 2), self.memory
        assert isinstance(memory, Tensor)
        return x + (scores(q, memory).softmax(-1) @ memory).transpose(1, 2).flatten(2)


def test_cross_attention_of_as_many_tokens_is_told_apart() -> None:
    model, plain = alike(as_mingpt, Crossing)
    w = seen(model, METRICS, words())
    assert any("not of a block's tokens to themselves" in note and "3 calls" in note for note in w.notes)
    same(w, seen(plain, METRICS, words()))


def test_padding_that_attention_alone_knows_is_asked_for() -> None:
    def heads(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        att = scores(q, k).masked_fill(~valid[:, None, None], torch.finfo(q.dtype).min)
        return att.softmax(-1) @ v

    asks_for_padding(heads)
