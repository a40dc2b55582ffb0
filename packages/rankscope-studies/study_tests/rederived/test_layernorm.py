"""LayerNorm without skips: what it does not change, where it holds tokens apart, and what training makes of it."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from study_tests.rederived.blocks import Block
from study_tests.rederived.clusters import APART, apart, ends, opposite, rank, relative
from study_tests.rederived.digits import by_digits
from study_tests.rederived.masked import averaging, fall
from study_tests.rederived.plain import Heads, Mask, drawn, left, normed, words, xavier


def mask(name: str, n: int) -> Mask:
    i, j = np.indices((n, n))
    return {"causal": j <= i, "window": abs(i - j) <= 1}[name]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_small_differences_fall_by_the_masks_second_eigenvalue(name: str, norm: bool) -> None:
    """With a norm and without, the mean over ten draws of 60 layers each."""
    seen = mask(name, 8)
    eigenvalue = np.sort(np.abs(np.linalg.eigvals(averaging(seen.astype(float)))))[-2]
    rates = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        close = normed(1e-6 * rng.normal(size=(8, 32)) + rng.normal(size=32))
        logs = fall([drawn(xavier, 32, 4, rng) for _ in range(60)], close, seen, norm)
        rates.append((logs[-1] - logs[30]) / 30)
    # Other growths of 32 entries are near that of the token itself: the rate comes to the eigenvalue slowly.
    assert np.mean(rates) == pytest.approx(math.log10(eigenvalue), abs=0.03)


def test_under_a_complete_mask_the_fall_is_cubic_with_a_norm_too() -> None:
    rng = np.random.default_rng(0)
    layers, X = [drawn(xavier, 8, 2, rng) for _ in range(5)], words(4, 8, rng)
    logs = by_digits(layers, X, 1500, norm=True)
    assert logs[-1] < -10 and logs[-1] / logs[-2] == pytest.approx(3, abs=0.5)


def test_sharp_random_attention_collapses_in_spite_of_the_norm() -> None:
    """Queries and keys drawn apart, one head of 32: none of 40 networks of 96 layers."""
    for gain in (4.0, 16.0):
        assert apart(ends(alike=0.0, gain=gain, norm="layer", width=32, heads=1, layers=96)) == 0


def test_but_not_where_tokens_are_as_narrow_as_four() -> None:
    """With four entries tokens are soon x and -x; sharp attention then leaves both, or swaps them."""
    X = ends(alike=0.0, gain=64.0, norm="layer", width=4, heads=1, layers=96, draws=50)
    held = relative(X) > APART
    assert 10 <= held.sum() <= 35 and (opposite(X)[held] < -0.999).all()


@pytest.mark.slow
def test_sharp_random_attention_of_many_shapes() -> None:
    """Ten networks of each: tokens, width, heads, gain; 160 in all. One of them may be slow."""
    shapes = [(n, d, heads) for n, d, heads in ((4, 32, 1), (16, 64, 1), (64, 64, 4), (16, 128, 4))]
    still = sum(
        apart(ends(alike=0.0, gain=gain, norm="layer", width=d, heads=heads, tokens=n, layers=96, draws=10))
        for n, d, heads in shapes for gain in (1.0, 4.0, 16.0, 64.0)
    )  # fmt: skip
    assert still <= 1


def test_queries_like_keys_and_a_norm_hold_tokens_apart() -> None:
    """One head, `W_Q = W_K`: a token scores itself highest, and the norm keeps it long enough to go on doing so."""
    for alike in (1.0, 0.9):
        assert apart(ends(alike=alike, gain=16.0, norm="layer", width=32, heads=1, layers=96)) >= 17
    assert apart(ends(alike=1.0, gain=16.0, norm="none", width=32, heads=1, layers=300, draws=10)) <= 3


def test_with_many_narrow_heads_a_norm_holds_fewer() -> None:
    """Four heads of 8 mix what each keeps apart: about half of the networks are apart, not all."""
    held = apart(ends(alike=1.0, gain=16.0, norm="layer", width=32, heads=4, layers=96))
    assert 4 <= held <= 14


@pytest.mark.slow
def test_what_is_held_apart_in_the_end_is_two_opposite_tokens() -> None:
    """1,000 layers: 18 of 20 are apart, and all of these are x and -x; products of random matrices turn all tokens to
    one line. A common factor in place of a norm holds 14, none holds at most 2."""
    with_shape = partial(ends, alike=1.0, gain=16.0, width=64, heads=1)
    X = with_shape(norm="layer", layers=1000)
    held = relative(X) > APART
    assert 16 <= held.sum() <= 20 and (opposite(X)[held] < -0.999).all() and (rank(X)[held] <= 2).all()
    assert (rank(X)[held] == 1).mean() > 0.8
    assert 11 <= apart(with_shape(norm="common", layers=1000)) <= 16
    assert apart(with_shape(norm="none", layers=400)) <= 2


@pytest.mark.slow
def test_a_bias_takes_it_away() -> None:
    """x and -x are the same line, not the same token: what is added to both brings them together."""
    with_shape = partial(ends, alike=1.0, gain=16.0, width=64, heads=1, norm="layer")
    assert apart(with_shape(layers=96, bias=0.5)) == 0
    assert apart(with_shape(layers=400, bias=0.1)) == 0
    assert apart(with_shape(layers=400)) >= 16
    assert apart(with_shape(layers=400, causal=True)) >= 16


def valued(a: float, width: int, rng: np.random.Generator, place: str) -> Block:
    """Attention whose values are `a 1 + noise`, a skip of weight one and no MLP."""
    values = a * np.eye(width) + 0.5 / math.sqrt(width) * rng.normal(size=(width, width))
    W_Q, W_K = xavier(width, rng), xavier(width, rng)
    return Block(Heads(W_Q, W_K, np.eye(width), values, 2), None, None, 1.0, place)


@pytest.mark.parametrize(("a", "held"), [(-3.0, False), (-1.0, True), (1.5, False)])
def test_the_sign_of_one_exponent_tells_who_stays_apart(a: float, held: bool) -> None:
    """Post-norm with skips, complete mask: the growth of small differences about one token, by derivatives, against
    what becomes of 16 tokens that begin far apart, 64 layers later."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        blocks = [valued(a, 32, rng, "post") for _ in range(64)]
        X = rng.normal(size=(16, 32))
        x, R, log = X.mean(0), X - X.mean(0), 0.0
        for block in blocks:
            x, R = block(x[None])[0], block.pushed(x, R)
            size = float(np.linalg.norm(R))
            R, log = R / size, log + math.log(size)
        for block in blocks:
            X = block(X)
        assert (log / 64 > 0.1) is held and (log / 64 < -0.1) is not held
        assert (left(X) > 0.01) is held


class Sorter(nn.Module):
    """Eight symbols in, the sorted ones out: attention and a LayerNorm after it, no skips, no MLP."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(10, width), nn.Parameter(torch.randn(8, width))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, 4, batch_first=True, bias=False) for _ in range(layers)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def states(self, symbols: torch.Tensor) -> torch.Tensor:
        X = self.symbol(symbols) + self.place
        for attention, norm in zip(self.attention, self.norm, strict=True):
            X = norm(attention(X, X, X, need_weights=False)[0])
        return X


def residual(X: torch.Tensor) -> float:
    """The mean over samples of what is left of differences."""
    R = X - X.mean(1, keepdim=True)
    return float((R.flatten(1).norm(dim=1) / X.flatten(1).norm(dim=1)).mean())


def trained(layers: int, seed: int, steps: int = 800) -> tuple[float, float, float]:
    """(what is left before and after training, the held-out loss)."""
    torch.manual_seed(seed)
    net = Sorter(layers, 64)
    asked = torch.randint(10, (200, 8))
    with torch.no_grad():
        before = residual(net.states(asked))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        symbols = torch.randint(10, (32, 8))
        loss = nn.functional.cross_entropy(
            net.head(net.states(symbols)).flatten(0, 1), symbols.sort(1).values.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    with torch.no_grad():
        X = net.states(asked)
        final = nn.functional.cross_entropy(net.head(X).flatten(0, 1), asked.sort(1).values.flatten())
    return before, residual(X), float(final)


@pytest.mark.slow
def test_training_rescues_shallow_sorters_and_no_deep_ones() -> None:
    """By torch's own attention: three layers learn to sort, eight stay collapsed and guess (1.66 nats and more)."""
    before, after, loss = trained(3, 0)
    assert after > 0.5 and loss < 1.0
    before, after, loss = trained(8, 0)
    assert before < 0.01 and after < 0.05 and loss > 1.55
