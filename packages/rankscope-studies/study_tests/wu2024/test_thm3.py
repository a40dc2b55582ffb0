"""Equilibria of every rank, their stability, and where random starts end."""

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
