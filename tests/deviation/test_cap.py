"""Capped scores in deviation arithmetic, against hundreds of digits."""

from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.deviation import Scaled
from rankscope.deviation.cap import CapReference, RowConstants, capped
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import SMALL, compare

MASKS = ("complete", "causal", "window:1")
POSITIONS = ("none", "absolute", "relative", "rotary", "bias", "alibi")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("positions", POSITIONS)
def test_capped_scores(positions: Any) -> None:
    """Below the scores' size and above it, with biases in queries and keys, skips and none."""
    for seed, (mask, cap) in enumerate(zip(MASKS, (0.1, 5.0, 0.1), strict=True)):
        skip = float((seed + POSITIONS.index(positions)) % 2)
        arch = Architecture(**SMALL, norm="rms", norm_place="pre", mask=mask, positions=positions,
                            attention_skip=skip, score_cap=cap, norm_eps=1e-6)  # fmt: skip
        compare(arch, seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_capped_pure_attention_far_below_floating_point(scale: float) -> None:
    """Six layers without skips, scores within the cap and far beyond it, where all of them are the cap's."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm="none", mlp="none", attention_skip=0.0, score_cap=0.5)
    assert min(compare(arch, seed, scale, sure=False) for seed in range(4)) < -100


def scores(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(c, r_i, h_j, D_ij) of scores in caps, whose sum has the signs and sizes that the kind says."""
    draw = torch.Generator().manual_seed(0)
    c, r, h, D = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((1,), (4,), (5,), (4, 5)))
    signs, more = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64), 400 + 30 * D.abs()
    return {
        "within the cap": (c, r, h, D),
        "all near one that is at the cap": (c + 500, 1e-30 * r, 1e-40 * h, 1e-60 * D),
        "signs of keys": (c * 0, r * 0, h * 0, signs * more),
        "signs of keys, none of a zero key": (c * 0, r * 500, h * 0, signs * more - r[:, None] * 500),
        "signs of queries": (c * 0, r * 0, h * 0, signs[:4, None] * more),
        "signs of queries, keys nearly equal": (c * 0, signs[:4] * 500, 1e-20 * h, 1e-20 * D),
        "signs of both": (c * 0, r * 0, h * 0, signs * signs[:4, None] * more),
    }[kind]


KINDS = ("within the cap", "all near one that is at the cap", "signs of keys", "signs of keys, none of a zero key",
         "signs of queries", "signs of queries, keys nearly equal", "signs of both")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_rows_differ_by_at_the_cap(kind: str) -> None:
    """`T(s_ij) - T(s_ib) - T(s_aj) + T(s_ab)` to nine digits of the largest, be it 1e-400."""
    parts = scores(kind)
    c, r, h, D = (Scaled.plain(part[None, None]).by_head() for part in parts)
    queries, keys = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)
    constant = RowConstants(c, r, queries, keys)
    ref, rest = capped(constant, h, D, 1.0, CapReference.of(constant, h, [(slice(None), D)]))
    with mp.workdps(1500):
        c0, rs, hs, Ds = ([mp.mpf(u) for u in part.flatten().tolist()] for part in parts)
        T = [[mp.tanh(c0[0] + rs[i] + hs[j] + Ds[5 * i + j]) for j in range(5)] for i in range(4)]
        rows = [[T[i][j] - T[i][0] - T[0][j] + T[0][0] for j in range(5)] for i in range(4)]
        size = max(abs(u) for row in rows for u in row)
        exact = torch.tensor([[float(u / size) for u in row] for row in rows], dtype=torch.float64)
        log = float(mp.log(size))
        shared = torch.tensor([float(u - T[0][0]) for u in T[0]], dtype=torch.float64)
    found = rest.at(torch.full_like(rest.log, log))[0, 0]
    assert (found - found[:, :1] - found[:1] + found[:1, :1] - exact).abs().max() < 1e-9
    first = (ref.mapped(lambda t: t[:, :, None]) + rest).explicit()[0, 0, 0]
    assert (first - first[0] - shared).abs().max() < 1e-12


def test_signs_at_the_cap_that_rounding_decides_are_marked() -> None:
    """A query that is zero but for rounding, divided by 1e-22: its scores are plus or minus the cap by chance."""
    arch = Architecture(layers=1, width=4, heads=2, norm="none", mlp="none", biases=False, divisor=1e-22, score_cap=5.0)
    for seed in range(6):
        tensors, X = awake(arch, seed).state_dict(), normal(1, 3, 4, seed=seed)
        W, token = tensors["layers.0.attention.query.weight"], X[0, 0]
        across = torch.outer(token, token @ W.flatten(1)) / (token @ token)
        tensors["layers.0.attention.query.weight"] = W - across.view_as(W)
        table = measure(Transformer.from_weights(arch, tensors), X, metrics=["mu", "entropy"]).table
        assert table.filter(table["layer"] == 1)["below_floor"].all()
