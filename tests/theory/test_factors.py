"""The ladder of bounds by measured factors, from loose to exact."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.theory import certify
from tests.theory.families import PURE, Case


@pytest.mark.slow
@settings(max_examples=4)
@given(PURE, st.sampled_from(["mean", "argmin"]))
def test_exact_below_attention_below_oscillation(case: Case, centre: str) -> None:
    net, X = case
    if centre == "argmin":
        net, X = net.variant(layers=min(2, net.arch.layers)), X[:, :4]
    found = certify(net, X, centre=centre)
    assert found.broken().is_empty()
    one, measured = found.of("dong2021-2.3-gamma1"), found.of("dong2021-2.3")
    exact, attention, oscillation = (found.of(name) for name in ("exact-factors", "attention-factors", "oscillation"))
    kappa = math.log10(max(2 * (1 - 1 / X.shape[1]), 1e-300)) if centre == "mean" else math.log10(2)
    for row in range(len(exact)):
        if not exact["met"][row] or exact["below_floor"][row]:
            continue
        value = exact["log10_measured"][row]
        # Outward by no more than a hundred times the 1e-7 to which passes must agree.
        rounding = 1e-5 * (1 + abs(value)) if math.isfinite(value) else 1e-5
        gap = exact["slack"][row]
        # The argmin is itself found to a tolerance of 1e-5 only, at both ends.
        assert 0 <= gap <= rounding + (centre == "argmin") * 1e-2 * (row + 1)
        if not (attention["met"][row] and oscillation["met"][row]):  # their own inputs are rounding
            continue
        assert exact["log10_bound"][row] <= attention["log10_bound"][row] + rounding + (centre == "argmin") * 1e-2
        # |P - mean row| <= 2 (1 - 1/n) |P - 1p|, which the mean's own kappa pays for.
        assert attention["log10_bound"][row] <= oscillation["log10_bound"][row] + rounding + (
            0 if centre == "mean" else 1e-2 + kappa * (row + 1)
        )
        if one["met"][row] and measured["met"][row]:
            assert one["log10_bound"][row] <= measured["log10_bound"][row]
