"""Equilibria of every rank, their stability, and where random starts end."""

import math
from pathlib import Path

import polars as pl
import pytest

from rankscope_studies.hand_built import equilibrium, spectral_radius
from rankscope_studies.wu2024 import thm3


@pytest.mark.parametrize("n", [2, 3, 4])
def test_multipliers_are_those_of_the_whole_jacobian(n: int) -> None:
    """Block by block against autograd: the mask is causal, so the blocks have all the eigenvalues."""
    for signs in ([-1] * (n - 1), [(-1) ** k for k in range(n - 1)]):
        X = equilibrium(n, n, n + 1.0, signs)
        whole = spectral_radius(X, n + 1.0)
        assert float(thm3.multipliers(X, n + 1.0).max()) == pytest.approx(whole, abs=1e-3)


def test_equilibria_of_every_rank_and_their_ends(tmp_path: Path) -> None:
    equilibria = thm3.equilibria(4)
    assert len(equilibria) == 1 + 2 + 4 + 8
    assert float(equilibria["moved"].max()) < 1e-12  # type: ignore[arg-type]
    assert equilibria["rank"].to_list() == equilibria["numerical_rank"].to_list()
    above = equilibria.filter(pl.col("rank") > 1)
    assert (above["largest_multiplier"] > 1).all() and (above["unstable_directions"] > 0).all()
    ends = thm3.random_starts(3, 200)
    assert 0 < int(ends["apart"].sum()) < 40
    assert (ends.filter("apart")["third_singular_value"] < 1e-3).all()
    assert ends.equals(thm3.random_starts(3, 200))


def test_of_two_tokens_one_choice_of_sign_is_stable() -> None:
    """Where token 2 is at rest apart from token 1, a small move along the circle becomes 1 +- sqrt(1 - 1/w^2) times as
    long. The equilibrium of rank one, which is stable too, is not counted. Of four tokens none above it is stable."""
    table = pl.concat([thm3.equilibria(n) for n in (2, 4)])
    w = table["w"][0]
    said = thm3._stability(table)
    assert f" 2: {1 - math.sqrt(1 - 1 / w**2):.3f}, 4: " in said.ours
    assert "rank one 1 of 2 at N = 2 are stable, none neutral" in said.because
