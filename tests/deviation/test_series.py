"""Taylor coefficients against mpmath's own derivatives."""

import mpmath as mp
import pytest
import torch

from rankscope.deviation.mlp import LARGE, activation
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.series import SERIES
from rankscope.nets.activations import ACTIVATIONS
from tests.deviation.reference import ACTIVATIONS as EXACT

POINTS = [-7.3, -2.0, -0.7517916, -0.1, 0.3, 1.1, 4.0]


def test_every_activation_of_an_architecture_has_a_series() -> None:
    assert set(SERIES) == set(ACTIVATIONS) == set(EXACT)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", POINTS)
def test_coefficients_are_derivatives_over_factorials(name: str, z: float) -> None:
    mine = SERIES[name](torch.tensor([z], dtype=torch.float64), 8)
    with mp.workdps(60):
        theirs = mp.taylor(EXACT[name], mp.mpf(z), 8)
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert abs(float(a) - float(b)) < 1e-12 * max(1.0, abs(float(b))), k


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", [*POINTS, 0.0])
@pytest.mark.parametrize("log", [-3000.0, -500.0, -60.0, -12.0, -5.0, -3.95, -3.85, 0.0, 3.0])
def test_an_activations_change_is_exact_at_every_scale(name: str, z: float, log: float) -> None:
    """act(z + d) - act(z) for d = +-e^log, on both sides of the switch to plain differences."""
    assert -3.95 < float(mp.log(LARGE)) < -3.85
    steps = torch.tensor([[[1.0], [-0.6]]], dtype=torch.float64)
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    value, change = activation(name, common, Scaled(steps, torch.tensor([log], dtype=torch.float64)))
    with mp.workdps(1500):
        # To rounding of the step itself: in an activation's flat tail the change is smaller than that.
        assert float(value.explicit()) == pytest.approx(float(EXACT[name](mp.mpf(z))), rel=1e-13, abs=1e-15)
        for step, mine in zip(steps.flatten(), change.value.flatten(), strict=True):
            d = mp.mpf(float(step)) * mp.exp(log)
            true = EXACT[name](mp.mpf(z) + d) - EXACT[name](mp.mpf(z))
            error = mp.mpf(float(mine)) * mp.exp(mp.mpf(float(change.log))) - true
            assert abs(error / d) < 3e-13
