"""Taylor coefficients against mpmath's own derivatives."""

import mpmath as mp
import pytest
import torch

from rankscope.deviation.activations import SERIES
from rankscope.nets import ACTIVATIONS
from tests.deviation.reference import ACTIVATIONS as EXACT

POINTS = [-12.0, -7.3, -2.0, -0.1, 0.3, 1.1, 4.0]


def test_every_activation_of_an_architecture_has_a_series() -> None:
    assert set(SERIES) == set(ACTIVATIONS) == set(EXACT)


@pytest.mark.sampled(2)
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
