"""Attention that a module computes itself, through `F.scaled_dot_product_attention`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.errors import WatchError
from rankscope.live.plan import make_plan
from rankscope.live.stack_watch import StackWatch
from rankscope.monitor import Monitor
from tests.live.families import checks, seen
from tests.live.gpt import (
    CONTEXT,
    GPT,
    HEADS,
    LAYERS,
    METRICS,
    WIDTH,
    WORDS,
    Block,
    asks_for_padding,
    by_head,
    gpt,
    same,
    trains_the_same,
    words,
)
from tests.raising import raises


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def canonical() -> tuple[GPT, Any]:
    """The hand-written GPT, and transformers' with its weights."""
    mine = GPT().double().eval()
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    theirs = hf.GPT2LMHeadModel(config).double().eval()
    weights = {name: x.T if name.endswith("weight") and ("c_" in name) else x for name, x in mine.state_dict().items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # the two are tied there
    theirs.load_state_dict(weights)
    return mine, theirs


@torch.no_grad()
def test_watch_equals_measure() -> None:
    """A hand-written GPT, and the canonical network of the same weights."""
    (mine, theirs), ids = canonical(), words()
    net = rankscope.load(theirs)
    X, padding = net.encode(ids)
    w = seen(mine, METRICS, ids)
    expected = rankscope.measure(net, X, padding, METRICS, "float64")
    for each in METRICS:
        torch.testing.assert_close(w.profile().curve(each), expected.curve(each), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert checks(w)["rows_sum_to_one"] is True
    assert "Attention was seen in torch's functions, as it is before dropout." in w.notes


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_is_the_same_to_the_last_bit(recomputed: bool) -> None:
    """Dropout, gradients, and activation checkpointing; weights are those before dropout."""

    class Again(Block):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    w = trains_the_same(lambda: GPT(0.3, Again if recomputed else Block))
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)


def test_under_autocast_queries_and_keys_are_those_that_the_kernel_took() -> None:
    model = GPT().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(words())
        with rankscope.watch(model, ["entropy", "head_mu"]) as w:
            assert torch.equal(model(words()), plain)
    assert w.profile().arithmetics == ["bfloat16"]


class Crossing(Block):
    """Looks at other tokens too, as many as its own: before itself, after, or in its stead."""

    order = "self, cross"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.memory = torch.randn(2, 6, WIDTH)

    def cross(self, x: Tensor) -> Tensor:
        k, v = self.kv(self.memory).chunk(2, -1)
        q, k, v = map(by_head, (self.q(x), k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order.split(", "):
            x = x + (self.attn(self.ln_1(x)) if part == "self" else self.cross(self.ln_2(x)))
        return x


def of_kind(order: str) -> Any:
    return type("Crossing", (Crossing,), {"order": order})


@pytest.mark.parametrize("order", ["self, cross", "cross, self"])
def test_cross_attention_of_as_many_tokens_is_told_apart(order: str) -> None:
    model, lone = GPT(block=of_kind(order)).eval(), GPT(block=of_kind("self")).eval()
    lone.load_state_dict(model.state_dict())
    states: list[Tensor] = []
    model.transformer["h"][0].ln_1.register_forward_pre_hook(lambda module, args: states.append(args[0]))  # type: ignore[index]
    w = seen(model, ["entropy"], words())
    assert any("not of a block's tokens to themselves" in note and "3 calls" in note for note in w.notes)
    block = lone.transformer["h"][0]  # type: ignore[index]
    with torch.no_grad(), rankscope.watch(block, ["entropy"], blocks=[block]) as alone:
        block(states[0])
    torch.testing.assert_close(w.profile().curve("entropy")[:, 1], alone.profile().curve("entropy")[:, 1])


REFUSED = {"cross": "attention", "self, self": "blocks"}


@pytest.mark.parametrize("order", REFUSED)
def test_attention_that_cannot_be_told(order: str) -> None:
    model = GPT(block=of_kind(order)).eval()
    with raises(WatchError, subject=REFUSED[order]):
        seen(model, "entropy", words())
    assert not _get_current_function_mode_stack()
    assert seen(model, "mu", words()).profile().curve("mu").shape == (2, LAYERS + 1)


class Gated(Block):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn.c_proj = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_heads_need_their_projection() -> None:
    model = GPT(block=Gated).eval()
    assert seen(model, "entropy", words()).profile().curve("entropy").isfinite()[:, 1:].all()
    with raises(WatchError, subject="heads"):
        seen(model, "head_mu", words())
    assert not _get_current_function_mode_stack()


def test_padding_that_attention_alone_knows_is_asked_for() -> None:
    asks_for_padding(
        lambda q, k, v, valid: F.scaled_dot_product_attention(
            q, k, v, valid[:, None, None].expand(-1, 1, q.shape[2], -1)
        )
    )


def over_channels(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cross-covariance attention, of as many channels as tokens."""
    return F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT


def heads_first(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of as many heads as samples."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def copied(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v.clone(), is_causal=True)


@pytest.mark.parametrize(
    ("heads", "batch", "token"),
    [(over_channels, 2, WIDTH // HEADS), (heads_first, HEADS, 6), (copied, 2, WIDTH // HEADS)],
)
def test_other_axes_of_the_same_size_are_no_tokens(heads: Any, batch: int, token: int) -> None:
    """Of values that are a copy, nothing tells; then another number of tokens does."""
    with raises(WatchError, subject="attention"):
        seen(gpt(heads), "entropy", words(batch, token))


def test_as_many_channels_or_heads_as_tokens_or_samples() -> None:
    plain, with_copies = GPT().double().eval(), gpt(copied)
    with_copies.load_state_dict(plain.state_dict())
    for ids in (words(2, WIDTH // HEADS), words(HEADS, 6), words(1, 6)):
        assert seen(plain, "entropy", ids).profile().curve("entropy").shape == (len(ids), LAYERS + 1, HEADS)
    same(seen(with_copies, METRICS, words()), seen(plain, METRICS, words()))


class OneHead(nn.Module):
    """Without an axis for heads; by tokens or by channels."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.qkv, self.turned = nn.Linear(WIDTH, 3 * WIDTH), turned

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.mT if self.turned else y for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + (y.mT if self.turned else y)


def test_as_many_tokens_as_the_width() -> None:
    for turned in (False, True):
        model = nn.Sequential(OneHead(turned), OneHead(turned)).double()
        if turned:
            with raises(WatchError, subject="attention"):
                seen(model, "entropy", rand(2, WIDTH, WIDTH))
        else:
            w = seen(model, "entropy", rand(2, WIDTH, WIDTH))
            assert w.profile().curve("entropy").shape == (2, 3, 1)


class Remembering(nn.Module):
    """A GPT with a cache of keys and values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Remembering() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.past = nn.Linear(WIDTH, 3 * WIDTH), torch.zeros(2, 2, HEADS, 0, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(by_head, self.qkv(x).chunk(3, -1))
        self.past = torch.cat([self.past, torch.stack([k, v])], -2)
        n, m = q.shape[2], self.past.shape[3]
        sees = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        y = F.scaled_dot_product_attention(q, *self.past, attn_mask=sees)
        return x + y.transpose(1, 2).flatten(2)


def test_chunks_that_go_on_from_a_cache_of_ones_own_are_left_out_and_said() -> None:
    model, X = Remembering(), torch.randn(2, 9, WIDTH)
    with torch.no_grad(), rankscope.watch(model, ["mu", "entropy"]) as w:
        model(X)
        model(X[:, :3])
        model(X[:, :1])
    said = "1 call was left out: its tokens looked at more than themselves, as a chunk that goes on from a cache"
    assert any(said in note for note in w.notes)
    assert sum(checks(w)["calls_left_out"].values()) == 2 and w.profile().curve("mu").shape == (2, 3)
    with raises(WatchError, subject="attention"):
        seen(model, "entropy", X[:, :3])


def test_a_model_that_fails_leaves_no_mode_behind() -> None:
    model = GPT().eval()
    failing = model.transformer["h"][1].mlp.c_fc.register_forward_hook(lambda *_: 1 / 0)  # type: ignore[index]
    with rankscope.watch(model, "entropy") as w:
        with pytest.raises(ZeroDivisionError):
            model(words())
        assert not _get_current_function_mode_stack()
        failing.remove()
        model(words())
    assert checks(w)["calls_left_out"] == {"it failed": 1}
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)


@pytest.mark.slow
def test_a_monitor_has_the_attention_of_a_hand_written_gpt(tmp_path: Path) -> None:
    model, ids = GPT().double(), words()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Monitor(model, ["mu", "entropy"], every=1, probe=ids, run=tmp_path / "run", alarms=()) as monitor:
        before = seen(model.eval(), "entropy", ids).profile().curve("entropy")
        model(ids).square().mean().backward()
        optimizer.step()
        monitor.step()
    rows = rankscope.read(monitor.run).tables["training"].filter(metric="entropy", step=0)
    assert sorted(rows["layer"].unique()) == [1, 2, 3]
    by_head = rows.sort("layer", "head")["value"].to_numpy().reshape(LAYERS, HEADS)
    np.testing.assert_allclose(by_head, before[:, 1:].mean(0), rtol=1e-12)


class Twice(Block):
    """Two attentions of its tokens to themselves, of which a watch can read one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attn(self.ln_1(x)))


def test_an_error_that_is_contained_leaves_no_mode_behind() -> None:
    """It is raised inside a function of torch, where the mode cannot be switched off."""
    model = GPT(block=Twice).eval()
    plain = model(words())
    with StackWatch(model, make_plan(model, "entropy"), contained=True) as w:
        assert torch.equal(model(words()), plain)
    assert isinstance(w._follower.failure, WatchError) and w._follower.failure.subject == "blocks"
    assert not _get_current_function_mode_stack()
