"""Equilibria of every rank: fixed, of that rank, nearly one direction; two tokens by simulation."""

import itertools
import math

import pytest
import torch

from rankscope.errors import ArchitectureError
from rankscope.metrics import numerical_rank, stable_rank
from rankscope.profiles import measure
from rankscope_studies.hand_built import (
    anisotropy_bound,
    equilibrium,
    equilibrium_network,
    equilibrium_step,
    spectral_radius,
)
from tests.raising import raises

EVERY = [(n, rank) for n in (2, 3, 6) for rank in range(1, n + 1)] + [(8, 1), (8, 7), (8, 8)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("n", "rank"), EVERY)
@pytest.mark.parametrize("w", ["just enough", "more"])
def test_fixed_to_1e_12_for_every_rank_and_all_signs(n: int, rank: int, w: str) -> None:
    size = n - rank + 1 + (1e-3 if w == "just enough" else 2.5)
    for signs in itertools.product((1, -1), repeat=rank - 1):
        X = equilibrium(n, rank, size, list(signs))
        assert float((equilibrium_step(X, size) - X).abs().max()) < 1e-12
        assert float((X.norm(dim=1) - 1).abs().max()) < 1e-12
        assert int(numerical_rank(X)) == rank


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("n", "rank"), EVERY)
def test_the_canonical_network_leaves_it_where_it_is(n: int, rank: int) -> None:
    """The canonical network runs the same dynamics; from rank two on its tokens stay apart."""
    w = n + 1.0
    X = equilibrium(n, rank, w)
    state = equilibrium_network(n, w, layers=1).run(X[None]).output[0]
    assert float((state - X).abs().max()) < 1e-12
    if rank > 1:
        mu = measure(equilibrium_network(n, w, layers=3), X[None], metrics="mu").curve("mu")
        assert float(mu.min()) > 0.1


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("w", [1.5, 5.0])
def test_full_rank_yet_nearly_one_direction(n: int, w: float) -> None:
    X = equilibrium(n, n, w)
    assert float(stable_rank(X)) <= anisotropy_bound(n, w) * (1 + 1e-12)


def test_two_tokens_by_hand() -> None:
    """N = d = 2: token 2 rests at A = (-1/w, +c), unstable, and B = (-1/w, -c), stable, c = sqrt(1 - 1/w^2).
    With y = X22 / X21 a step is y' = y + w + 1/X21, of slope 1 + X22."""
    w = 2.0
    c = math.sqrt(1 - 1 / w**2)
    upper, lower = equilibrium(2, 2, w, [1]), equilibrium(2, 2, w, [-1])
    torch.testing.assert_close(upper, torch.tensor([[0, 1], [-1 / w, c]], dtype=torch.float64))
    torch.testing.assert_close(lower, torch.tensor([[0, 1], [-1 / w, -c]], dtype=torch.float64))
    # The first token's own slope: (x, 1) -> (x, 1 + w x), so x' = x up to first order: eigenvalue 1.
    assert spectral_radius(upper, w) == pytest.approx(max(1.0, 1 + c))
    assert spectral_radius(lower, w) == pytest.approx(1.0)
    for X22 in (c, -c):
        X = torch.tensor([[0.0, 1.0], [-1 / w, X22]], dtype=torch.float64)
        near = X.clone()
        angle = math.atan2(near[1, 1], near[1, 0]) + 1e-6
        near[1] = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        moved = equilibrium_step(near, w)
        before, after = (float(each[1, 1] / each[1, 0] - X22 / (-1 / w)) for each in (near, moved))
        assert after / before == pytest.approx(1 + X22, rel=1e-4)


def test_two_tokens_basin_of_attraction() -> None:
    """Given token 1 at rest, starts with X21 < 0 below A go to B (rank two), the others to rank one."""
    w = 2.0
    c = math.sqrt(1 - 1 / w**2)
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1] + 1e-3
    X = torch.stack([torch.stack([torch.zeros_like(angles), torch.ones_like(angles)], -1),
                     torch.stack([angles.cos(), angles.sin()], -1)], 1)  # fmt: skip
    start = X.clone()
    for _ in range(4000):
        X = equilibrium_step(X, w)
    to_B = (X[:, 1] - torch.tensor([-1 / w, -c], dtype=torch.float64)).norm(dim=-1) < 1e-3
    to_one = (X[:, 1] - torch.tensor([0.0, 1.0], dtype=torch.float64)).norm(dim=-1) < 0.05
    assert bool((to_B | to_one).all()) and bool(to_B.any()) and bool(to_one.any())
    # A is the boundary: on the left half circle, whatever lies below it goes to B.
    left = start[:, 1, 0] < -1e-9
    slope_of_A = c / (-1 / w)
    y = start[:, 1, 1] / start[:, 1, 0]
    assert torch.equal(to_B[left], (y > slope_of_A)[left])


def test_random_starts_rarely_stay_apart() -> None:
    """At N = 4 only a small part of random starts ends at rank above one; none of the full-rank equilibria is
    stable in every direction."""
    for signs in itertools.product((1, -1), repeat=3):
        assert spectral_radius(equilibrium(4, 4, 5.0, list(signs)), 5.0) >= 1.0
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(400, 4, 4, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True)
    for _ in range(3000):
        X = equilibrium_step(X, 5.0)
    apart = (X - X.mean(1, keepdim=True)).flatten(1).norm(dim=1) > 0.1
    assert int(apart.sum()) < 40


def test_what_is_no_equilibrium() -> None:
    for arguments, subject in [((3, 4, 2.0), "rank"), ((3, 2, 2.0), "w"), ((3, 3, 2.0, [1]), "signs")]:
        with raises(ArchitectureError, subject):
            equilibrium(*arguments)  # type: ignore[arg-type]
