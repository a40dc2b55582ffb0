"""Skips under a norm, by their formula; norms are neutral to affine rank, but for one or two."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.nets import NormWeights, normalise
from rankscope.theory import certify
from tests.builders import normal
from tests.theory.attack.climb import under_a_norm
from tests.theory.families import net_of, orthogonal
from tests.theory.plain import lambda_skip


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skip_under_a_norm_is_bounded_as_its_formula_has_it(seed: int) -> None:
    plain = under_a_norm(seed)  # a skip of 2: w^2, 1 / w and w are told apart
    row = certify(plain.net, plain.X[None], theorems="lambda-skip").table.row(-1, named=True)
    bound, measured = (float(log) / math.log(10) for log in lambda_skip(plain))
    assert row["met"] and row["log10_measured"] == pytest.approx(measured, abs=1e-9)
    assert math.isfinite(bound) and row["log10_bound"] == pytest.approx(bound, abs=1e-9)


@settings(max_examples=60)
@given(
    st.integers(2, 6), st.integers(2, 6), st.integers(0, 6), st.integers(0, 2**31),
    st.sampled_from(["scale", "rms", "layer"]), st.integers(0, 2), st.sampled_from([0.0, 1e-5]),
)  # fmt: skip
def test_norms_are_neutral_to_affine_rank(
    n: int, d: int, rank: int, seed: int, kind: str, zeros: int, eps: float
) -> None:
    """Exact low-rank integer matrices: rank before by exact elimination, after by singular values far from
    rounding. Down by at most one (LayerNorm two) and one per zero gain; up by at most one."""
    rank = min(rank, n, d)
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-2, 3, shape, generator=g) for shape in ((n, rank), (rank, d)))
    X = left @ right
    gain = torch.ones(d, dtype=torch.float64)
    gain[: min(zeros, d)] = 0.0
    Y = normalise(X.double(), kind, NormWeights(gain), eps)
    before = int(torch.linalg.matrix_rank((n * X - X.sum(0)).double(), rtol=1e-9))
    after = int(torch.linalg.matrix_rank(Y - Y.mean(0), atol=1e-9, rtol=1e-9))
    exact = mpmath_rank(n * X - X.sum(0))
    assert before == exact
    assert after >= before - (2 if kind == "layer" else 1) - min(zeros, d)
    assert after <= before + 1


def mpmath_rank(A: Tensor) -> int:
    """By elimination in whole numbers."""
    rows, rank = [list(map(int, row)) for row in A], 0
    for column in range(A.shape[1]):
        pivot = next((row for row in range(rank, len(rows)) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for row in range(rank + 1, len(rows)):
            by = rows[row][column]
            rows[row] = [a * rows[rank][column] - b * by for a, b in zip(rows[row], rows[rank], strict=True)]
        rank += 1
    return rank


@pytest.mark.parametrize(("kind", "lost"), [("scale", 1), ("rms", 1), ("layer", 2)])
def test_what_a_norm_may_take_is_sometimes_taken(kind: str, lost: int) -> None:
    """The constants cannot be smaller: points on a line through 0 become one point, and so do tokens that
    differ in a constant as well."""
    line = torch.tensor([[1.0, -1.0, 0.0], [2.0, -2.0, 0.0], [3.0, -3.0, 0.0], [5.0, -5.0, 0.0]]).double()
    X = line + torch.tensor([0.0, 1.0, -2.0, 0.0]).double()[:, None] * (kind == "layer")
    Y = normalise(X, kind, NormWeights(), 0.0)
    before, after = (int(torch.linalg.matrix_rank(A - A.mean(0), atol=1e-9)) for A in (X, Y))
    assert before - after == lost


def test_a_norm_on_a_turned_frame_keeps_many_directions() -> None:
    X = normal(1, 12, 8) @ orthogonal(8, 1)
    found = certify(net_of(layers=2, width=8, norm_place="pre"), X, theorems="norm-rank")
    assert found.guarantees().height == 2 and found.broken().is_empty()
    assert 10 ** found.table["log10_bound"][0] == pytest.approx(6.0)
