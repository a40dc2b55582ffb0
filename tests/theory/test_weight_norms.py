"""Norms and Lipschitz constants of weights, rounded up, against grids and singular values."""

import mpmath as mp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.nets import ACTIVATIONS, Architecture, Transformer
from rankscope.theory import MLPNorms
from rankscope.theory.weight_norms import (
    LIPSCHITZ,
    HeadNorms,
    checksums,
    product_norm,
    spectral_norm,
    squared_bound,
    sums_of_product,
)
from tests.builders import normal
from tests.theory.families import orthogonal


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lipschitz_constants_are_the_largest_slopes(name: str) -> None:
    """By automatic differentiation on a grid that is fine where slopes are largest."""
    z = torch.linspace(-12, 12, 2_400_001, dtype=torch.float64, requires_grad=True)
    ACTIVATIONS[name](z).sum().backward()
    assert z.grad is not None
    most = float(z.grad.abs().max())
    assert most <= LIPSCHITZ[name] <= most + 1e-4


def test_norms_of_products_that_cancel_are_not_below_the_truth() -> None:
    """A B = 0 but for rounding, which leaves 1e-16 or nothing: the norm is rounded up from either."""
    A, turn = normal(6, 3), orthogonal(3, 1)
    A, B = A @ turn[:1].mT @ turn[:1], turn[1:].mT @ normal(2, 6)
    for size in (1.0, 1e-170, 1e150):
        a, b = A * size, B / size
        with_more = torch.linalg.matrix_norm(a, 2) * torch.linalg.matrix_norm(b, 2)
        for found in (*sums_of_product(a, b), product_norm(a, b)):
            assert 1e-16 * float(with_more) < found < 1e-12 * float(with_more)
    assert sums_of_product(1e-200 * A, 1e-200 * A.mT)[0] > 0 and product_norm(0 * A, B) == 0.0
    W = normal(40, 30)
    assert spectral_norm(W) >= float(torch.linalg.svdvals(W)[0])


def exact_norms(A: Tensor, B: Tensor) -> list[mp.mpf]:
    """`||A B||_1`, `||A B||_inf` and `||A B||_2` to 60 digits."""
    W = mp.matrix(A.tolist()) * mp.matrix(B.tolist())
    rows, columns = range(W.rows), range(W.cols)
    sums = [
        max(sum(abs(W[i, j]) for i in rows) for j in columns),
        max(sum(abs(W[i, j]) for j in columns) for i in rows),
    ]
    return [*sums, mp.sqrt(max(mp.eigsy(W * W.T, eigvals_only=True)))]


KINDS = ("random", "orthogonal", "rank one", "cancelling", "graded", "equal entries", "zero")


def matrix(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    """Matrices whose norms rounding may make too small."""
    W, most = normal(rows, columns, seed=seed), max(rows, columns)
    if kind == "orthogonal":
        return orthogonal(most, seed)[:rows, :columns].contiguous()
    if kind == "rank one":
        return W[:, :1] @ W[:1]
    if kind == "cancelling":
        return W @ (torch.eye(columns).double() - torch.ones(columns, columns).double() / columns)
    if kind == "graded":
        return W * 10.0 ** -torch.arange(0, 3 * columns, 3).double()
    return W if kind == "random" else torch.full_like(W, 0.1 if kind == "equal entries" else 0.0)


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.tuples(*[st.integers(1, 6)] * 3), st.integers(0, 10**6),
       st.sampled_from([1.0, 1e-120, 1e120]))  # fmt: skip
def test_norms_are_rounded_up_and_tight(
    left: str, right: str, sides: tuple[int, int, int], seed: int, size: float
) -> None:
    """Against 60 digits: never below the truth, and off by no more than rounding of what the product is made of."""
    A, B = matrix(left, sides[0], sides[1], seed) * size, matrix(right, sides[1], sides[2], seed + 1)
    with mp.workdps(60):
        truth = exact_norms(A, B)
        scale = float(mp.mpf(float(A.norm() / size)) * float(B.norm())) * size
        found = (*sums_of_product(A, B), product_norm(A, B))
        for bound, norm in zip(found, truth, strict=True):
            assert mp.mpf(float(bound)) >= norm
            assert float(bound) <= float(norm) * (1 + 1e-9) + 1e-12 * scale + 1e-280
        alone = exact_norms(A, torch.eye(sides[1]).double())[2]
        square = torch.nn.functional.pad(A, (0, max(0, sides[0] - sides[1]), 0, max(0, sides[1] - sides[0])))
        for bound in (spectral_norm(A), squared_bound(square)):  # the second is what is taken off the CPU
            assert mp.mpf(float(bound)) >= alone
            assert float(bound) <= float(alone) * (1 + 1e-9) + 1e-280


@pytest.mark.parametrize("side", [200, 1000])
def test_squaring_is_as_tight_as_said_where_all_singular_values_are_equal(side: int) -> None:
    """Nothing else is left by squaring longer; of 200 rows, 24 squarings leave 200^(1 / 2^25)."""
    turn = orthogonal(side, 1)
    bound = float(squared_bound(turn)) if side < 500 else float(squared_bound(turn, squarings=4)) / side ** (1 / 32)
    assert 1.0 <= bound * (1 + 1e-12) <= 1 + 1e-6


def test_matrices_taken_together_have_the_norms_that_each_has_alone() -> None:
    arch = Architecture(layers=3, width=8, heads=4, key_heads=2, mlp="gated")
    layers = list(Transformer.random(arch).weights.layers)
    heads, mlps = HeadNorms.of_layers(arch, (0, 2, 3), layers), MLPNorms.of_layers(arch, layers)
    for index, layer in enumerate(layers):
        alone, mlp = HeadNorms.of_layers(arch, range(4), [layer])[0], MLPNorms.of_layers(arch, [layer])[0]
        assert (mlps[index].up, mlps[index].gate, mlps[index].down) == pytest.approx((mlp.up, mlp.gate, mlp.down))
        for name in ("scores", "columns", "rows", "spectral"):
            assert getattr(heads[index], name).tolist() == pytest.approx(getattr(alone, name)[[0, 2, 3]].tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_tell_tensors_apart(dtype: torch.dtype) -> None:
    W = normal(300, 300).to(dtype)
    others = [
        W,
        2 * W,
        -W,
        W.flip(0),
        W.T.contiguous(),
        W.clone(),
        torch.zeros_like(W),
        W.clamp(max=float(W.abs().max()) / 2),
    ]
    sums = checksums(others)
    assert sums[0] == sums[5] and len(set(sums)) == len(sums) - 1
