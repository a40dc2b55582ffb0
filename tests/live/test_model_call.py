"""Which axis counts tokens, and which way round a mask is meant: shown by attention in the first block, or said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankscope
from rankscope.errors import WatchError
from tests.live import reference
from tests.live.families import checks, seen
from tests.raising import raises

WIDTH, HEADS, TOKENS, SAMPLES = 16, 4, 7, 3
ALL = torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def kernel(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def written(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if visible is None else scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """A hand-written block whose hidden states have their axes in this order."""

    def __init__(self, axes: str, attend: Attend) -> None:
        super().__init__()
        self.axes, self.attend = axes, attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        exchange = {"batch first": (0, 0), "token first": (0, 1), "width second": (1, 2)}[self.axes]
        y = x.transpose(*exchange)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        y = y + self.out(self.attend(q, k, v, visible).transpose(1, 2).flatten(2))
        return y.transpose(*exchange).contiguous()


class Multihead(nn.Module):
    """A hand-written block around torch's attention, which may exchange axes before it."""

    def __init__(self, axes: str, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.exchange = (0, 1) if batch_first == (axes == "token first") else (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(*self.exchange)
        added: Tensor = self.inner(y, y, y)[0]
        return x + added.transpose(*self.exchange)


class Dense(nn.Module):
    """A block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Model(nn.Module):
    """Blocks one after the other, which keeps its hidden states."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        self.states = [x]
        for block in self.blocks:
            self.states.append(block(self.states[-1], *masks))
        return self.states[-1]


def hidden(axes: str, samples: int = SAMPLES, tokens: int = TOKENS) -> Tensor:
    x = torch.randn(samples, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.transpose(*{"batch first": (0, 0), "token first": (0, 1), "width second": (1, 2)}[axes]).contiguous()


def expected(model: Any, axes: str, valid: Tensor = ALL) -> Tensor:
    exchange = {"batch first": (0, 0), "token first": (0, 1), "width second": (1, 2)}[axes]
    return torch.stack([reference.mu(x.transpose(*exchange), valid) for x in model.states], 1)


def made(*blocks: nn.Module) -> Any:
    torch.manual_seed(0)
    return Model(*blocks).double().eval()


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
@pytest.mark.parametrize("attend", [kernel, written])
@pytest.mark.parametrize("axes", ["batch first", "token first", "width second"])
def test_attention_shows_the_layout_of_hand_written_blocks(axes: str, attend: Attend, metrics: list[str]) -> None:
    model = made(Block(axes, attend), Block(axes, attend))
    x = hidden(axes)
    plain = model(x)
    w = seen(model, metrics, x)
    assert torch.equal(model.states[-1], plain)
    torch.testing.assert_close(w.profile().curve("mu"), expected(model, axes), rtol=1e-12, atol=0)
    assert checks(w)["layout"] == axes
    if "entropy" in metrics:
        assert w.profile().curve("entropy").shape == (SAMPLES, 3, HEADS)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("axes", ["batch first", "token first"])
def test_torchs_attention_shows_it_also_where_axes_are_exchanged_before(axes: str, batch_first: bool) -> None:
    model = made(*[Multihead(axes, batch_first) for _ in range(2)])
    w = seen(model, ["mu", "entropy"], hidden(axes))
    torch.testing.assert_close(w.profile().curve("mu"), expected(model, axes), rtol=1e-12, atol=0)
    assert checks(w)["layout"] == axes


def test_one_sequence_with_its_tokens_first_is_no_batch_of_single_tokens() -> None:
    model = made(Block("token first", kernel), Block("token first", kernel))
    w = seen(model, "mu", hidden("token first", samples=1))
    valid = torch.ones(1, TOKENS, dtype=torch.bool)
    torch.testing.assert_close(w.profile().curve("mu"), expected(model, "token first", valid), rtol=1e-12, atol=0)
    w = seen(made(Block("batch first", kernel)), "mu", hidden("batch first", tokens=1))
    with raises(WatchError, subject="model"):
        w.profile()


@pytest.mark.parametrize("blocks", [[Dense(), Dense()], [Block("batch first", kernel), Block("batch first", kernel)]])
def test_what_was_assumed_is_said(blocks: list[nn.Module]) -> None:
    """Without attention, or where there are as many samples as tokens, nothing shows it; given, nothing is said."""
    model, x = made(*blocks), hidden("batch first", samples=TOKENS)
    w = seen(model, "mu", x)
    assert checks(w)["layout"] is None
    assert any("[batch, token, width] was assumed" in note for note in w.notes)
    with torch.no_grad(), rankscope.watch(model, "mu", layout="batch first") as w:
        model(x)
    assert checks(w)["layout"] == "batch first" and not any("was assumed" in note for note in w.notes)


def test_attention_in_a_later_block_confirms_or_contradicts() -> None:
    confirming, contradicting = ([Block(axes, kernel) for _ in range(2)] for axes in ("batch first", "token first"))
    w = seen(made(Dense(), *confirming), "mu", hidden("batch first"))
    assert checks(w)["layout"] == "batch first"
    with raises(WatchError, subject="layout"):
        seen(made(Dense(), *contradicting), "mu", hidden("token first"))


def test_a_later_call_contradicts_what_earlier_ones_were_read_as() -> None:
    model = made(Block("token first", kernel), Block("token first", kernel))
    with raises(WatchError, subject="layout"), torch.no_grad(), rankscope.watch(model, "mu"):
        model(hidden("token first", samples=TOKENS))
        model(hidden("token first"))


class Masked(nn.Module):
    """A model with a mask of its own convention, under a name that others use otherwise."""

    def __init__(self, attend: Attend, at_tokens: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("batch first", attend) for _ in range(2))
        self.at_tokens = at_tokens

    def forward(self, x: Tensor, attention_mask: Tensor, deaf: bool = False) -> Tensor:
        valid = attention_mask.bool() if self.at_tokens else ~attention_mask.bool()
        self.states = [x]
        for block in self.blocks:
            self.states.append(block(self.states[-1], None if deaf else valid[:, None, None]))
        return self.states[-1]


def padded_to(length: int) -> Tensor:
    """Which tokens are valid, in a batch whose longest sample has this length."""
    valid = ALL.clone()
    valid[:, length:] = False
    valid[1, 2:] = False
    return valid


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
@pytest.mark.parametrize("length", [TOKENS, TOKENS - 2])
@pytest.mark.parametrize("at_tokens", [True, False])
@pytest.mark.parametrize("attend", [kernel, written])
def test_a_mask_means_what_attention_does(attend: Attend, at_tokens: bool, length: int, metrics: list[str]) -> None:
    torch.manual_seed(0)
    model, valid = Masked(attend, at_tokens).double(), padded_to(length)
    mask = valid if at_tokens else ~valid
    w = seen(model, metrics, hidden("batch first"), mask.long())
    torch.testing.assert_close(
        w.profile().curve("mu"), expected(model, "batch first", valid), rtol=1e-12, atol=0
    )  # fmt: skip
    assert checks(w)["padded_tokens"] == int((~valid).sum()) and checks(w)["masks_in_doubt"] == []


def test_a_mask_that_nothing_settles_counts_for_nothing_and_is_said() -> None:
    torch.manual_seed(0)
    model, valid = Masked(kernel, True).double(), padded_to(TOKENS - 2)
    w = seen(model, "mu", hidden("batch first"), valid.long(), deaf=True)
    assert checks(w)["masks_in_doubt"] == ["attention_mask"] and checks(w)["padded_tokens"] == 0
    torch.testing.assert_close(w.profile().curve("mu"), expected(model, "batch first"), rtol=1e-12, atol=0)
    with torch.no_grad(), rankscope.watch(model, "mu", attention_mask=valid) as w:
        model(hidden("batch first"), valid.long(), deaf=True)
    assert checks(w)["padded_tokens"] == int((~valid).sum()) and checks(w)["masks_in_doubt"] == []


def test_the_input_is_read_as_it_was_also_if_the_block_changes_it_in_place() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
            before = x.clone()
            x *= 2.0
            return super().forward(before, visible)

    model = made(InPlace("token first", kernel))
    x = hidden("token first")
    w = seen(model, "mu", x.clone())
    torch.testing.assert_close(w.profile().curve("mu")[:, 0], reference.mu(x.transpose(0, 1), ALL), rtol=1e-12, atol=0)
