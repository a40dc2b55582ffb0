"""Figure 2 of the 2021 paper on networks that take a moment."""

import pytest
import torch

from rankscope.metrics import relative_residual
from rankscope_studies.dong2021 import fig2
from rankscope_studies.study import mean_by_layer
from study_tests.dong2021.test_networks import subject


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_figure_2_measures_every_curve_in_both_readings(family: str) -> None:
    network = subject(family)
    table = fig2._curves(network, seed=0)
    seen = table.select("mode", "curve", "arithmetic").unique()
    assert len(seen) == 2 * (4 + 3)
    curves = table.filter(mode="published", curve="transformer", arithmetic="float32")
    states = network.net.run(network.X).states
    by_hand = torch.stack([relative_residual(state) for state in states], 1)  # [excerpt, layer]
    singles = curves.sort("excerpt", "layer")["value"].to_list()
    assert singles == pytest.approx(by_hand.flatten().tolist(), rel=1e-4)
    assert mean_by_layer(curves) == pytest.approx(by_hand.mean(0).tolist(), rel=1e-4)
    san = table.filter(mode="defined", curve="san", arithmetic="deviation").sort("layer")
    assert san["log10"][-1] < -6 < min(curves["log10"].to_list())
