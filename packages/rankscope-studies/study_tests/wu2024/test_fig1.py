"""Two tokens in the plane: where they end, against the known points of rest."""

import math

import pytest
import torch

from rankscope_studies.hand_built import equilibrium, equilibrium_step
from rankscope_studies.wu2024 import fig1


def test_two_tokens_end_where_the_fixed_points_say() -> None:
    """The basin map against the known points of rest: B, or token 1."""
    w = 2.0
    basins = fig1.basin_map(24, w)
    first, second = (torch.tensor(basins[name].to_list()) for name in ("angle_1", "angle_2"))
    X = fig1.pairs(first, second).double()
    for _ in range(3000):
        X = equilibrium_step(X, w)
    # By the symmetry X -> -X, token 1 may be taken to rest at (0, 1).
    X = X * X[:, :1, 1:].sign()
    B = equilibrium(2, 2, w, [-1])[1]
    at_B = (X[:, 1] - B).norm(dim=-1) < 2e-3
    at_token_1 = (X[:, 1] - X[:, 0]).norm(dim=-1) < 2e-3
    assert bool((at_B ^ at_token_1).all())
    assert at_B.tolist() == basins["apart"].to_list()
    assert 0 < int(at_B.sum()) < len(at_B) / 2


def test_a_small_move_away_from_a_point_of_rest_grows_or_shrinks() -> None:
    c = math.sqrt(1 - 1 / fig1.W**2)
    assert fig1.multiplier(1, fig1.W) == pytest.approx(1 + c, rel=1e-4)
    assert fig1.multiplier(-1, fig1.W) == pytest.approx(1 - c, rel=1e-4)


@pytest.mark.slow
def test_two_tokens_without_a_norm_fall_as_the_formula_says() -> None:
    """They differ by 2^-t (x_2 - x_1) W_V^t, which A3 divides by ||W_V||^t; the residual is that over sqrt 2."""
    layers, w = 12, fig1.W
    paths = fig1.trajectories(layers)
    assert len(paths) == 3 * 2 * (layers + 1)
    gain = w / 2 + math.sqrt(1 + w**2 / 4)  # the largest singular value of [[1, w], [0, 1]]
    for name, angles in fig1.STARTS.items():
        (x, y), (u, v) = ((math.cos(math.radians(a)), math.sin(math.radians(a))) for a in angles)
        logs = paths.filter(start=name, norm=False)["log10_mu"].to_list()
        apart = [math.hypot(u - x, (u - x) * t * w + v - y) / math.sqrt(2) for t in range(layers + 1)]
        assert logs == pytest.approx([math.log10(d) - t * math.log10(2 * gain) for t, d in enumerate(apart)], abs=1e-9)
    kept = paths.filter(layer=layers, start="first", norm=True)
    assert float(kept["log10_relative_mu"][0]) > -1
