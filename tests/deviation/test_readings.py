"""Metrics of a state: those of float64 where it can see, and at any scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.deviation import DeviationStep, Scaled, State
from rankscope.deviation.propagate import PassInputs, run_block
from rankscope.deviation.readings import read
from rankscope.deviation.scaled import LOWEST
from rankscope.metrics import metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


def test_what_falls_through_the_lowest_scale_is_at_the_floor() -> None:
    """Pure attention cubes a residual of 1e-(1e299) until logs end."""
    net = Transformer.random(Architecture(layers=6, width=8, heads=1), init="xavier").variant("san")
    inputs = PassInputs.of(net, tokens(5, 8))
    state, readings = inputs.state, []
    state = State(state.x, Scaled(state.R.value, state.R.log + 1e-2 * LOWEST), state.valid)
    for index in range(6):
        state = run_block(inputs.block(index), inputs.rules, state).state
        readings.append(read(metric("residual"), DeviationStep(index + 1, state, None)))
    marked = [bool(reading.below_floor) for reading in readings if reading is not None]
    assert marked[-1] and not marked[0]
    assert readings[0] is not None and float(readings[0].log10) < -1e100


@settings(max_examples=4)
@given(st.floats(0.01, 3), st.integers(0, 99))
def test_metrics_agree_with_float64s_where_it_can_see(scale: float, seed: int) -> None:
    """Every metric but those of routing, on a transformer that does not collapse."""
    from rankscope.metrics import METRICS

    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"), seed=seed, init="xavier")
    X = scale * tokens(6, 8, batch=2, seed=seed)
    names = [name for name, each in METRICS.items() if each.of != "routing"]
    padding = torch.arange(6)[None] >= torch.tensor([[6], [4]])
    fine, plain = (measure(net, X, padding, names, a) for a in ("deviation", "float64"))
    for name in names:
        mine, theirs = fine.curve(name), plain.curve(name)
        size = theirs.nan_to_num(0).abs().clamp(min=1e-6)
        assert torch.allclose(mine / size, theirs / size, rtol=1e-7, atol=1e-7, equal_nan=True), name


@pytest.mark.parametrize("name", ["residual@argmin", "relative_residual@argmin", "max_residual@argmin"])
def test_other_centres_work_at_any_scale(name: str) -> None:
    net = Transformer.random(Architecture(layers=5, width=6, heads=1), init="xavier").variant("san")
    X = tokens(4, 6)
    log10 = measure(net, X, metrics=[name]).curve(name, "log10")[0]
    mean = measure(net, X, metrics=[name.partition("@")[0]]).curve(name.partition("@")[0], "log10")[0]
    assert log10[-1] < -30
    assert bool((log10 <= mean + 1e-9).all()) and bool((mean - log10 < math.log10(2)).all())
    first = metric(name).compute(X)
    assert float(log10[0]) == pytest.approx(math.log10(float(first)))


def test_value_and_log10_say_the_same_or_the_value_is_out_of_range() -> None:
    arch = Architecture(layers=40, width=8, heads=2, biases=False)
    shrinking = Transformer.random(arch).variant("san")
    profile = measure(shrinking, tokens(5, 8), metrics=["mu", "sigma_min", "max_residual"], check=False)
    for name in profile.metrics:
        value, log10 = profile.curve(name), profile.curve(name, "log10")
        assert bool((value[log10 < -330] == 0).all()) and bool((log10 < -330).any())
        inside = (log10 > -300) & (value > 0)
        assert torch.allclose(value[inside].log10(), log10[inside], rtol=1e-9)


def test_no_token_at_all_has_no_value() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    names = ["mu", "relative_residual", "max_cosine_gap", "residual_effective_rank", "dobrushin", "stable_rank"]
    profile = measure(net, torch.randn(2, 0, 8), metrics=names)
    for name in names:
        assert bool(profile.curve(name).isnan().all())
