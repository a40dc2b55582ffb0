import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.deviation import LOWEST, Scaled

logs = st.floats(-2000, 2000)
numbers = st.floats(-1e3, 1e3).filter(lambda v: v == 0 or abs(v) > 1e-3)


def scaled(value: float, log: float) -> Scaled:
    return Scaled(torch.tensor([[value]], dtype=torch.float64), torch.tensor([log], dtype=torch.float64))


def exact(x: Scaled) -> Any:
    import mpmath as mp

    return mp.mpf(float(x.value)) * mp.exp(mp.mpf(float(x.log)))


@given(numbers, logs, numbers, logs)
def test_sums_are_right_at_any_scale(a: float, s: float, b: float, t: float) -> None:
    import mpmath as mp

    with mp.workdps(2000):
        x, y = scaled(a, s).normalised(), scaled(b, t).normalised()
        total, u, v = exact(x + y), exact(x), exact(y)
        assert abs(total - (u + v)) <= mp.mpf("1e-13") * max(abs(u), abs(v))


@given(st.floats(1e-200, 1e200), logs)
def test_normalising_changes_nothing_but_the_split(a: float, s: float) -> None:
    tidy = scaled(a, s).normalised()
    assert float(tidy.log) + math.log(float(tidy.value)) == pytest.approx(s + math.log(a), rel=1e-14, abs=1e-10)
    assert 1e-14 < float(tidy.value) < 1e14


def test_zero_has_the_lowest_scale_and_adds_nothing() -> None:
    zero = scaled(0.0, 5.0).normalised()
    assert float(zero.log) == LOWEST
    assert float((zero + scaled(2.0, -800.0)).value) == 2.0
    assert float((zero + zero).value) == 0.0
    assert float(zero.explicit()) == 0.0


def test_the_log_of_the_size_is_that_of_the_largest_entry_with_its_scale() -> None:
    value = torch.tensor([[1e-3, -40.0], [0.0, 0.0], [1e-200, 0.0]], dtype=torch.float64)
    found = Scaled(value, torch.tensor([-7000.0, 3.0, 5.0], dtype=torch.float64)).log_size().tolist()
    assert found == pytest.approx([-7000.0 + math.log(40.0), LOWEST, 5.0 + math.log(1e-200)], rel=1e-14)


def test_scales_beyond_the_range_are_cut_off_only_where_numbers_are_asked_for() -> None:
    tiny, huge = scaled(1.0, -5000.0), scaled(1.0, 5000.0)
    assert float(tiny.explicit()) == 0.0
    assert math.isfinite(float(huge.explicit()))
    assert float(tiny.at(tiny.log)) == 1.0


def test_samples_keep_their_own_scales() -> None:
    a = Scaled(torch.ones(2, 3, dtype=torch.float64), torch.tensor([0.0, -900.0], dtype=torch.float64))
    b = Scaled(torch.ones(2, 3, dtype=torch.float64), torch.tensor([-900.0, 0.0], dtype=torch.float64))
    total = a + b
    assert torch.equal(total.value, torch.ones(2, 3, dtype=torch.float64))
    assert total.log.tolist() == [0.0, 0.0]
