"""Residuals at initialisation, and the depth that they reach."""

import math

import pytest
import torch

from rankscope.sources import bundled_excerpts, word_tokens
from rankscope_studies.remedies import at_initialisation
from rankscope_studies.remedies.at_initialisation import DepthReached, depth_reached, over_seeds
from rankscope_studies.remedies.measurements import RemedyMeasurements


def test_depth_reached_is_the_last_layer_before_the_first_fall() -> None:
    assert depth_reached([0.0, -0.9, -1.1, 0.0]) == DepthReached(1, False)
    assert depth_reached([-5.0, 0.0, 0.0]) == DepthReached(2, True)  # of the input nothing is asked
    assert depth_reached([0.0, 0.0, math.nan, 0.0]) == DepthReached(1, False)  # known no further
    assert depth_reached([0.0, -3.0], threshold=1e-4) == DepthReached(1, True)
    assert str(over_seeds([DepthReached(3, False), DepthReached(9, True), DepthReached(9, True)])) == "all 9"


def test_residuals_at_the_start_are_those_of_a_plain_pass() -> None:
    measured = at_initialisation.measured("gate", "pre", 2, 0).filter(variant="whole").sort("layer")["log10"]
    X, _ = word_tokens(
        bundled_excerpts(at_initialisation.TOKENS)[: at_initialisation.SAMPLES],
        at_initialisation.WIDTH,
        at_initialisation.TOKENS,
    )
    states = at_initialisation.network("gate", "pre", 2, 0).run(X.double()).states
    plain = [sum(math.log10(float(_relative(sample))) for sample in state) / len(state) for state in states]
    assert measured.to_list() == pytest.approx(plain, abs=1e-10)


def _relative(X: torch.Tensor) -> torch.Tensor:
    """||X - 1 m^T|| / ||X|| in the norm sqrt(||.||_1 ||.||_inf), m the mean."""

    def size(M: torch.Tensor) -> torch.Tensor:
        return (M.abs().sum(0).max() * M.abs().sum(1).max()).sqrt()

    return size(X - X.mean(0)) / size(X)


@pytest.mark.slow
def test_what_does_not_go_is_said_and_what_leaves_nothing_too(tables: RemedyMeasurements) -> None:
    assert "norm_place must be 'pre'" in str(tables.refused("lnscale", "post"))
    assert tables.refused("lnscale", "pre") is None and tables.curves("lnscale", "post") == []
    assert tables.curves("rezero", "no skips") == []
    assert at_initialisation.ZERO in tables.initial.filter(remedy="rezero", variant="no skips")["note"].to_list()
    for curve in tables.curves("rezero", "post"):
        assert max(curve) - min(curve) < 1e-12  # the identity
    (mine,), (plain, _) = tables.curves("attnscale", "post"), tables.curves("none", "post")
    assert mine == pytest.approx(plain)
