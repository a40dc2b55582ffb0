"""Taylor coefficients against mpmath's own derivatives."""

import mpmath as mp
import pytest
import torch

from rankscope.deviation.activations import SERIES
from rankscope.deviation.mlp import activation
from rankscope.deviation.scaled import Scaled
from rankscope.nets.mlp import ACTIVATIONS
from tests.deviation.reference import ACTIVATIONS as EXACT

POINTS = [-12.0, -7.3, -2.0, -0.1, 0.3, 1.1, 4.0]


def test_every_activation_of_an_architecture_has_a_series() -> None:
    assert set(SERIES) == set(ACTIVATIONS) == set(EXACT)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", POINTS)
def test_coefficients_are_derivatives_over_factorials(name: str, z: float) -> None:
    mine = SERIES[name](torch.tensor([z], dtype=torch.float64), 8)
    with mp.workdps(250):
        theirs = mp.taylor(EXACT[name], mp.mpf(z), 8)
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            # The first derivatives to their own size, tails included; the others to that of the first.
            unit = abs(theirs[k]) if k < 2 else abs(theirs[1]) + abs(theirs[k])
            assert abs(mp.mpf(float(a)) - b) <= mp.mpf("1e-11") * max(unit, mp.mpf("1e-300")), k


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", [*POINTS, 0.0])
@pytest.mark.parametrize("log", [-3000.0, -500.0, -60.0, -12.0, -6.5, -5.0, -4.5, -4.0, 0.0, 3.0])
def test_an_activations_change_is_exact_at_every_scale(name: str, z: float, log: float) -> None:
    """act(z + d) - act(z) for d = +-e^log, on both sides of the switch to plain differences."""
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
            if z < -5 and d < 0.1 and name != "tanh":  # in a tail that ends at 0, to its own size
                assert abs(error) <= mp.mpf("1e-9") * abs(true)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", [15.0, 36.1, 113.3, 900.0])
@pytest.mark.parametrize("log", [-8.0, -5.0, -4.0, -1.0, 1.0])
def test_a_step_beside_a_large_value_keeps_its_digits(name: str, z: float, log: float) -> None:
    """Where z + d - z is rounded at the size of z, the change is as exact as d is."""
    steps = torch.tensor([[[1.0], [-0.6]]], dtype=torch.float64)
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    change = activation(name, common, Scaled(steps, torch.tensor([log], dtype=torch.float64)))[1]
    with mp.workdps(900):
        for step, mine in zip(steps.flatten(), change.value.flatten(), strict=True):
            d = mp.mpf(float(step)) * mp.exp(log)
            true = EXACT[name](mp.mpf(z) + d) - EXACT[name](mp.mpf(z))
            assert abs(mp.mpf(float(mine)) * mp.exp(mp.mpf(float(change.log))) - true) < 3e-15 * abs(d)


@pytest.mark.parametrize(("z", "d"), [(1e6, -2e6), (1e10, -3e10), (-1e119, 2e119), (40.0, -79.0)])
def test_a_step_of_tanh_from_one_tail_into_the_other(z: float, d: float) -> None:
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    change = activation("tanh", common, Scaled.plain(torch.tensor([[[d]]], dtype=torch.float64)))[1]
    with mp.workdps(200):
        true = mp.tanh(mp.mpf(z) + mp.mpf(d)) - mp.tanh(mp.mpf(z))
    assert float(change.explicit()) == pytest.approx(float(true), rel=1e-13)
