"""Metrics of a state: those of float64 where it can see, and at any scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.deviation import LOWEST, DeviationStep, PassInputs, Scaled, State
from rankscope.deviation.propagate import run_block
from rankscope.deviation.readings import read
from rankscope.metrics import metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


@pytest.mark.parametrize(("log", "falls_through"), [(-1e100, False), (1e-2 * LOWEST, True)])
def test_what_falls_through_the_lowest_scale_is_at_the_floor(log: float, falls_through: bool) -> None:
    """Pure attention cubes a residual, until the log of its scale ends."""
    net = Transformer.random(Architecture(layers=6, width=8, heads=1), init="xavier").variant("san")
    inputs = PassInputs.of(net, tokens(5, 8))
    R = Scaled(tokens(5, 8, seed=3), torch.tensor([log], dtype=torch.float64))
    state = State(Scaled.plain(tokens(1, 8)[:, 0]), R, inputs.state.valid)
    for index in range(6):
        state = run_block(inputs.block(index), inputs.rules, state).state
    reading = read(metric("residual"), DeviationStep(6, state, None))
    assert reading is not None and bool(reading.below_floor) == falls_through
    lowest = (LOWEST if falls_through else 3**6 * log) / math.log(10)
    assert float(reading.log10) == pytest.approx(lowest, rel=1e-9)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.floats(0.01, 3), st.integers(0, 99))
def test_metrics_agree_with_float64s_where_it_can_see(scale: float, seed: int) -> None:
    """Every metric but those of routing and of scores, on a transformer that does not collapse."""
    from rankscope.metrics import METRICS

    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"), seed=seed, init="xavier")
    X = scale * tokens(6, 8, batch=2, seed=seed)
    names = [name for name, each in METRICS.items() if each.of not in ("routing", "scores")]
    padding = torch.arange(6)[None] >= torch.tensor([[6], [4]])
    fine, plain = (measure(net, X, padding, names, a) for a in ("deviation", "float64"))
    for name in names:
        mine, theirs = fine.curve(name), plain.curve(name)
        size = theirs.nan_to_num(0).abs().clamp(min=1e-6)
        assert torch.allclose(mine / size, theirs / size, rtol=1e-7, atol=1e-7, equal_nan=True), name


@pytest.mark.sampled(1)
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


@pytest.mark.slow
def test_value_and_log10_say_the_same_or_the_value_is_out_of_range() -> None:
    arch = Architecture(layers=120, width=8, heads=2, biases=False)
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
