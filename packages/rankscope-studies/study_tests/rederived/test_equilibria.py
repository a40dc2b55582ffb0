"""Theorem 3's networks (Wu et al. 2024): which equilibria hold their tokens, and how many starts come to them.

Causal attention that averages evenly, values `I + w N` (N: ones above the diagonal), a norm that only scales.
"""

import itertools
import math

import numpy as np
import pytest

from study_tests.rederived.plain import Array


def step(X: Array, w: float) -> Array:
    """One layer; tokens are rows of length one."""
    means = np.cumsum(X, -2) / np.arange(1, X.shape[-2] + 1)[:, None]
    moved = means.copy()
    moved[..., 1:] += w * means[..., :-1]
    return moved / np.linalg.norm(moved, axis=-1, keepdims=True)


def resting(n: int, rank: int, w: float, signs: tuple[int, ...]) -> Array:
    """The equilibrium of this rank and these signs: the first tokens are the last unit vector, each later one is the
    one before it moved one place to the left and divided by -w, with a last entry that makes its length one."""
    X, equal = np.zeros((n, n)), n - rank + 1
    X[:equal, -1] = 1.0
    for i, sign in enumerate(signs, equal):
        X[i, :-1] = -X[i - 1, 1:] / w * (equal if i == equal else 1)
        X[i, -1] = sign * math.sqrt(1 - float(X[i] @ X[i]))
    return X


def own_multipliers(X: Array, w: float, token: int) -> Array:
    """|Eigenvalues| of a layer for small moves of one token along its sphere, the tokens before it at rest: its
    Jacobian by central differences, on an orthonormal basis of the directions across the token."""
    n = X.shape[1]
    basis = np.linalg.svd(X[token][None])[2][1:]
    columns = []
    for direction in basis:
        ends = []
        for sign in (1, -1):
            moved = X.copy()
            moved[token] += sign * 1e-6 * direction
            moved[token] /= np.linalg.norm(moved[token])
            ends.append(step(moved, w)[token])
        columns.append(basis @ (ends[0] - ends[1]) / 2e-6)
    return np.sort(np.abs(np.linalg.eigvals(np.array(columns).T))) if n > 1 else np.zeros(0)


def above_one(n: int, w: float) -> list[tuple[int, tuple[int, ...], Array]]:
    """(rank, signs, tokens) of every equilibrium above rank one."""
    return [
        (rank, signs, resting(n, rank, w, signs))
        for rank in range(2, n + 1)
        for signs in itertools.product((1, -1), repeat=rank - 1)
    ]


@pytest.mark.parametrize("w", [1.05, 2.0, 3.0, 30.0])
def test_of_two_tokens_one_equilibrium_is_stable_and_one_is_not(w: float) -> None:
    """Token 2 at (-1/w, +-c), c = sqrt(1 - 1/w^2): 1 + c and 1 - c times as far after a layer."""
    c = math.sqrt(1 - 1 / w**2)
    for _, (sign,), X in above_one(2, w):
        assert np.abs(step(X, w) - X).max() < 1e-14
        assert own_multipliers(X, w, 1)[0] == pytest.approx(1 + sign * c, abs=1e-6)


@pytest.mark.parametrize("w", [4.0, 10.0])
def test_of_six_for_three_tokens_two_are_neutral_and_four_unstable(w: float) -> None:
    largest = {}
    for rank, signs, X in above_one(3, w):
        assert np.abs(step(X, w) - X).max() < 1e-14 and np.linalg.matrix_rank(X) == rank
        largest[rank, signs] = max(own_multipliers(X, w, token)[-1] for token in range(4 - rank, 3))
    assert len(largest) == 6
    neutral = [key for key, size in largest.items() if size == pytest.approx(1, abs=1e-4)]
    assert len(neutral) == 2 and all(size > 1.1 for key, size in largest.items() if key not in neutral)


@pytest.mark.parametrize("n", [4, 5])
def test_from_four_tokens_on_none_is_stable(n: int) -> None:
    for rank, _, X in above_one(n, n + 1.0):
        assert max(own_multipliers(X, n + 1.0, token)[-1] for token in range(n - rank + 1, n)) > 1.1


def test_token_one_is_held_from_one_side_only() -> None:
    """So even the stable equilibrium attracts no whole neighbourhood: token 1 a little to the left of (0, 1) goes round
    to (0, -1) and takes token 2 along."""
    w = 2.0
    for angle, held in ((1e-3, True), (-1e-3, False)):
        X = resting(2, 2, w, (-1,))
        X[0] = math.sin(angle), math.cos(angle)
        for _ in range(5000):
            X = step(X, w)
        # Held: token 1 is back at (0, 1) as 1/t, token 2 beside B. Else both are at (0, -1).
        assert bool(abs(X[0] @ X[1]) < 0.9 and X[0, 1] > 0) is held


def share(n: int, w: float, starts: int, layers: int) -> float:
    """The share of random starts that end above rank one: the second singular value above 0.3 / w of the first."""
    X = np.random.default_rng(n).normal(size=(starts, n, n))
    X /= np.linalg.norm(X, axis=-1, keepdims=True)
    for _ in range(layers):
        X = step(X, w)
    sizes = np.linalg.svd(X, compute_uv=False)
    return float((sizes[:, 1] / sizes[:, 0] > 0.3 / w).mean())


def test_how_many_starts_end_above_rank_one_depends_on_w() -> None:
    few, some, many = (share(2, w, 2000, 300) for w in (1.05, 3.0, 30.0))
    assert 0.004 < few < 0.022 and 0.07 < some < 0.12 and 0.095 < many < 0.15 and few < some < many
    assert share(5, 6.0, 2000, 300) < 0.02


@pytest.mark.slow
def test_shares_of_all_sizes() -> None:
    """20,000 starts: N = 2, 1.2% at w = 1.05, 12.0% at 30 and 12.2% at 100; 10,000: N = 5, none at 1.2, 1.5% at 30."""
    assert share(2, 1.05, 20_000, 400) == pytest.approx(0.012, abs=0.003)
    assert share(2, 30.0, 20_000, 400) == pytest.approx(0.120, abs=0.008)
    assert share(2, 100.0, 20_000, 400) == pytest.approx(0.122, abs=0.008)
    assert share(3, 1.2, 5000, 1000) < 0.003 and 0.05 < share(3, 10.0, 5000, 1000) < 0.08
    assert share(5, 1.2, 5000, 1000) == 0 and 0.008 < share(5, 30.0, 5000, 1000) < 0.022
