"""Two tokens in the plane: where they end, against the known points of rest."""

import math

import polars as pl
import pytest
import torch

from rankscope.studies.wu2024 import fig1
from rankscope.theory.hand_built import equilibrium, equilibrium_step


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


def test_two_tokens_multipliers_and_collapse() -> None:
    c = math.sqrt(1 - 1 / fig1.W**2)
    assert fig1.multiplier(1, fig1.W) == pytest.approx(1 + c, rel=1e-4)
    assert fig1.multiplier(-1, fig1.W) == pytest.approx(1 - c, rel=1e-4)
    paths = fig1.trajectories()
    assert len(paths) == 3 * 2 * (fig1.LAYERS + 1)
    end = paths.filter(layer=fig1.LAYERS)
    assert (end.filter(~pl.col("norm"))["log10_relative_mu"] < -10).all()
    kept = end.filter(start="first", norm=True)
    assert float(kept["log10_relative_mu"][0]) > -1
    # Without LN, with W_V divided by its norm (A3), tokens shrink as well.
    assert (end.filter(~pl.col("norm"))["log10_mu"] < -15).all()
