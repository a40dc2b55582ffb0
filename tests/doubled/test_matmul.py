"""Products of matrices against fractions."""

import math
from fractions import Fraction
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.doubled import Doubled
from tests.doubled.numbers import drawn, exactly


def worst(A: Tensor, B: Tensor) -> float:
    """The largest error of A B as a share of the largest entries of its row and column."""
    (n, k), m = A.shape, B.shape[1]
    product = A @ B
    assert isinstance(product, Doubled)
    found, a, b = (exactly(each) for each in (product, A, B))
    error = Fraction(0)
    for i in range(n):
        for j in range(m):
            row, column = a[i * k : (i + 1) * k], b[j::m]
            true = sum((u * v for u, v in zip(row, column, strict=True)), Fraction(0))
            size = max(map(abs, row)) * max(map(abs, column))
            error = max(error, abs(found[i * m + j] - true) / size if size else abs(found[i * m + j]))
    return float(error)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 4), (4, 64, 3), (3, 768, 2), (2, 1500, 2)])
def test_to_thirty_one_digits_of_the_largest(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    A, B = drawn(n, k, seed=1), drawn(k, m, seed=3)
    assert worst(A, B) < 1e-31
    assert worst(A, B.hi) < 1e-31 and worst(A.hi, B) < 1e-31
    assert worst(A, B.hi.float().double()) < 1e-31


def test_rows_and_columns_of_any_scale() -> None:
    scales = 10.0 ** torch.arange(-140, 141, 70, dtype=torch.float64)
    A = drawn(5, 9, seed=5) * scales[:, None]
    B = drawn(9, 5, seed=7) * scales.flip(0)
    assert worst(A, B) < 1e-31


def test_zeros_and_what_is_not_finite() -> None:
    A, B = drawn(4, 3, seed=1), drawn(3, 2, seed=2)
    A = A.masked_fill(torch.tensor([True, False, False, False])[:, None], 0.0)
    assert worst(A, B) < 1e-31 and not bool((A @ B)[0].hi.any())
    for bad in (math.nan, math.inf):
        hit = torch.zeros(4, 3, dtype=torch.bool)
        hit[2, 1] = True
        found = A.masked_fill(hit, bad) @ B
        assert not bool(found.hi[2].isfinite().any())
        assert torch.equal(found.hi[[0, 1, 3]], (A @ B).hi[[0, 1, 3]])


def test_batches_and_sums_over_letters() -> None:
    A, B = drawn(2, 3, 4, 5, seed=1), drawn(3, 5, 6, seed=2)
    whole = A @ B
    letters = torch.einsum("bhtc,hcd->bhtd", A, B)
    for b in range(2):
        for h in range(3):
            one = A[b, h] @ B[h]
            for found in (whole[b, h], letters[b, h]):
                assert float((found - one).abs().amax()) < 1e-30
    assert worst(A[0, 0], B[0]) < 1e-31
    assert float((A[0, 0] @ B[0, :, 0] - whole[0, 0, :, 0]).abs().amax()) < 1e-30


def test_large_products_go_by_parts() -> None:
    """More rows, inner entries, columns or batches than are taken at a time."""
    A, B = drawn(258, 1030, seed=1), drawn(1030, 3, seed=3)
    rows = torch.tensor([0, 255, 256, 257])
    assert float(((A @ B)[rows] - A[rows] @ B).abs().amax()) < 1e-29
    assert worst(A[rows], B[:, :1]) < 1e-31
    A, B = drawn(2, 5, seed=5), drawn(5, 4100, seed=7)
    columns = torch.tensor([0, 4095, 4096, 4099])
    assert float(((A @ B)[:, columns] - A @ B[:, columns]).abs().amax()) < 1e-30
    A, B = drawn(70, 64, 64, seed=9), drawn(70, 64, 2, seed=11)
    assert float(((A @ B)[[0, 63, 64, 69]] - A[[0, 63, 64, 69]] @ B[[0, 63, 64, 69]]).abs().amax()) < 1e-30


def test_an_entry_below_a_column_that_meets_zeros_keeps_its_digits() -> None:
    """1e-40 beside 1 in a row, where the one is multiplied with a row of zeros, or of 1e-80."""
    for other in (0.0, 1e-80):
        A = Doubled.of(torch.tensor([[1e-40, 1.0]], dtype=torch.float64)) / 3
        B = Doubled.of(torch.tensor([[1.0, 7.0], [other, other]], dtype=torch.float64)) / 11
        found: Any = A @ B
        with mp.workdps(80):
            for k, entry in enumerate((1, 7)):
                exact = mp.mpf(1e-40) / 3 * entry / 11 + mp.mpf(other) / 33
                ours = mp.mpf(found.hi[0, k].item()) + mp.mpf(found.lo[0, k].item())
                assert abs(ours / exact - 1) < 1e-30
