"""Tokens on a sphere: who reaches whom by brute force, directions by search, tokens that are close."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.nets import mask_matrix
from rankscope.theory import certify
from rankscope.theory.sphere import hemisphere, reaching
from tests.builders import normal
from tests.theory.families import EVERY_MASK, SPHERE, net_of
from tests.theory.plain import distances


@settings(max_examples=30)
@given(st.sampled_from(EVERY_MASK), st.integers(1, 9), st.integers(0, 9))
def test_who_reaches_all_by_floyd_and_warshall(mask: str, n: int, steps: int) -> None:
    far = [max(row) for row in distances(mask, n)]
    assert reaching(mask_matrix(mask, n), steps) == sum(each <= steps for each in far)


@pytest.mark.parametrize("n", [2, 3, 6, 30, 300])
def test_the_hemisphere_by_search(n: int) -> None:
    """No random direction has a larger smallest cosine than the one that least squares finds."""
    Y = torch.nn.functional.normalize(normal(n, 3, seed=n) + torch.tensor([1.5, 1.5, 0.0]).double(), dim=-1)
    w, alpha = hemisphere(Y)
    tries = torch.nn.functional.normalize(normal(20000, 3, seed=1), dim=-1)
    best = float((Y @ tries.mT).amin(0).max())
    if alpha > 1e-6:
        assert float(w.norm()) == pytest.approx(1.0) and best <= alpha + 1e-9
    else:
        assert best <= 1e-6


def test_close_tokens_among_many_on_a_sphere() -> None:
    """Tokens that differ by 1e-10 among forty: distances must not be taken by products of lengths."""
    net = net_of("orthogonal", width=3, mask="unidirectional", **SPHERE)
    for close in (1e-4, 1e-8, 1e-10, 1e-14):
        X = 1 + close * normal(1, 40, 3)
        found = certify(net, X, theorems=["hemisphere", "wu2024-cor1"])
        assert found.table["met"].all() and found.broken().is_empty()
        assert float(found.of("hemisphere")["slack"].max()) < 1.0  # type: ignore[arg-type]
