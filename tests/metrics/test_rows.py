"""What is read off blocks of rows of attention, made as they are asked for, is what the whole matrix says."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import PatternRows, cosine, dobrushin, rows

N = 550


@cache
def matrices() -> dict[str, Tensor]:
    """One head of each kind, `[1, 1, token, token]`."""
    torch.manual_seed(0)
    scores = torch.randn(N, N, dtype=torch.float64)
    low = torch.randn(N, 8, dtype=torch.float64) @ torch.randn(8, N, dtype=torch.float64)
    away = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    found = {
        "alike": scores.softmax(-1),
        "of low rank": low.softmax(-1),
        "causal": scores.masked_fill(away.triu(1) > 0, -torch.inf).softmax(-1),
        "local": (low - 0.02 * away).softmax(-1),
        "disjoint": scores.masked_fill(away > 5, -torch.inf).softmax(-1),
        "nearly collapsed": (scores[0] + 1e-9 * low).softmax(-1),
        "one row": scores[:1].softmax(-1).expand(N, N),
        "not averages": torch.sigmoid(scores - 6),
        "negative entries": scores / N,
    }
    return {name: P[None, None] for name, P in found.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at_once", [8 * N * 250, pytest.param(2**26, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", matrices())
def test_rows_say_what_the_matrix_says(kind: str, at_once: int) -> None:
    P = matrices()[kind]
    lazily = PatternRows.of(P, torch.ones(1, 1, N, dtype=torch.bool), at_once)
    farthest = max(float((P[0, 0] - row).abs().sum(-1).max() / 2) for row in P[0, 0])
    assert rows.dobrushin_by_head(lazily).item() == pytest.approx(farthest, rel=1e-12)
    first, second = torch.linalg.svdvals(P)[0, 0, :2].tolist()
    assert rows.second_by_head(lazily).item() == pytest.approx(second, rel=1e-11, abs=1e-14 * first)
    assert rows.gap_by_head(lazily).item() == pytest.approx(first - second, rel=1e-11)


@pytest.mark.parametrize("n", [24, 41])
def test_the_farthest_rows_are_found_wherever_they_lie_among_the_blocks(n: int) -> None:
    """Also in the later of two blocks above the row of the earlier one, of patterns where a walk does not meet them."""
    for seed in range(20):
        torch.manual_seed(seed)
        P = torch.randn(1, 1, n, n, dtype=torch.float64).softmax(-1)
        lazily = PatternRows.of(P, torch.ones(1, 1, n, dtype=torch.bool), 8 * n * 8)
        farthest = float(torch.cdist(P[0, 0], P[0, 0], p=1.0).max() / 2)
        assert rows.dobrushin_by_head(lazily).item() == pytest.approx(farthest, rel=1e-12)


def test_padded_rows_and_columns_do_not_count() -> None:
    torch.manual_seed(0)
    P = torch.randn(2, 3, 300, 300, dtype=torch.float64).softmax(-1)
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[0, :20] = padding[0, 200:230] = True
    padding[1] = True
    kept = P[0][:, ~padding[0]][:, :, ~padding[0]]
    expected = torch.cdist(kept, kept, p=1.0).amax((-2, -1)) / 2
    found = dobrushin(P, padding)
    assert found[0].tolist() == pytest.approx(expected.tolist(), rel=1e-13)
    assert found[1].isnan().all()


def test_what_is_not_finite_has_no_value() -> None:
    P = torch.full((1, 1, N, N), 1 / N, dtype=torch.float64)
    P[0, 0, 7, 3] = torch.nan
    lazily = PatternRows.of(P, torch.ones(1, 1, N, dtype=torch.bool))
    for found in (rows.dobrushin_by_head(lazily), rows.second_by_head(lazily), rows.gap_by_head(lazily)):
        assert found.isnan().all()


def test_what_does_not_converge_has_no_value() -> None:
    P = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64)).Q
    P = (P * torch.linspace(1, 1.01, N, dtype=torch.float64))[None, None]  # singular values side by side
    lazily = PatternRows.of(P, torch.ones(1, 1, N, dtype=torch.bool))
    assert lazily.map_heads(lambda head: rows.two_largest(head, at_most=2)[1]).isnan().all()


NAMES = ["mean_cosine", "mean_abs_cosine", "min_cosine", "mean_cosine_gap", "max_cosine_gap"]


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_cosines_by_blocks_are_those_of_pairs(n: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(2, n, width, generator=generator, dtype=torch.float64)
    X[torch.rand(2, n, generator=generator) < 0.2] = 0.0
    padding = torch.rand(2, n, generator=generator) < 0.3
    row_at_a_time = {name: {"at_once": 16 * n} for name in ("mean_abs_cosine", "min_cosine", "max_cosine_gap")}
    found = {name: getattr(cosine, name)(X, padding, **row_at_a_time.get(name, {})).tolist() for name in NAMES}
    for sample in range(2):
        real = X[sample][~padding[sample]]
        units = [x / x.norm() if x.norm() else x for x in real]
        pairs = [(units[i], units[j]) for i in range(len(units)) for j in range(i + 1, len(units))]
        cosines = [float(a @ b) for a, b in pairs]
        gaps = [float((a - b).square().sum() / 2) if a.any() and b.any() else 1.0 for a, b in pairs]
        alone = 1.0 if len(real) else torch.nan
        mean = sum(cosines) / len(cosines) if cosines else alone
        sizes = sum(map(abs, cosines)) / len(cosines) if cosines else alone
        expected = [mean, sizes, min([*cosines, alone]), sum(gaps) / max(1, len(gaps)), max([0.0, *gaps])]
        if not len(real):
            expected = [torch.nan] * 5
        for name, value in zip(NAMES, expected, strict=True):
            assert found[name][sample] == pytest.approx(value, rel=1e-12, abs=1e-13, nan_ok=True)
