"""Norms and Lipschitz constants of weights, rounded up, against grids and singular values."""

import pytest
import torch

from rankscope.nets.mlp import ACTIVATIONS
from rankscope.theory.weight_norms import LIPSCHITZ, product_norm, spectral_norm, sums_of_product
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
