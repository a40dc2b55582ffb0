"""What is measured of passes that are replayed is what `measure` reads."""

import math
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import DeviationStep, PassInputs, perturbation, second_pass
from rankscope.deviation.decisions import Presuming, Recording, answering
from rankscope.deviation.propagate import StartingTensors
from rankscope.deviation.replay import ReplayCache
from rankscope.metrics import METRICS, Metric, Of, chosen_metrics, relative_mu
from rankscope.nets import Architecture, Step, Transformer, converted
from rankscope.profiles import DEFAULT_METRICS, MetricReader, captured, measure, readings_table
from rankscope.profiles.agreement import AGREED
from rankscope.profiles.captured import CapturedPasses, _passes, captured_steps
from rankscope.profiles.readers import CheckReader, LayerStep
from tests.builders import normal
from tests.strategies import architectures

NAMES = [name for name, each in METRICS.items() if each.of in ("tokens", "attention")]
OF_HEADS = Metric("relative_mu_of_heads", relative_mu, of="heads")
CHOSEN = [*chosen_metrics("these tests", [*NAMES, "head_residual"]), OF_HEADS]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> ReplayCache:
    """A cache of this test's own."""
    own = ReplayCache()
    monkeypatch.setattr(captured, "replay_cache", own)
    return own


def steps_of(
    net: Transformer, X: Tensor, padding: Tensor, metrics: list[Metric], check: bool, hold: bool = False, start: int = 0
) -> list[LayerStep]:
    inputs = PassInputs.of(net, X, padding)
    steps = captured_steps(inputs, ~padding, start, metrics, check=check, hold=hold)
    assert steps is not None
    return list(steps)


def read(steps: list[LayerStep], metrics: list[Metric]) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The table and the checks of these layers."""
    reader, checks = MetricReader(metrics), CheckReader()
    for step in steps:
        reader.read(step)
        checks.read(step)
    return readings_table(reader.result(), "as given", "deviation"), checks.result()


def assert_same(
    found: pl.DataFrame,
    expected: pl.DataFrame,
    share: float = 1e-9,
    digits: float | None = None,
    by_deviation: pl.DataFrame | None = None,
) -> None:
    """Readings are equal, and marks are, but for those next to the line: what two passes agree to changes with the
    order of sums by a digit or so, and with it whether nine digits are reached. With `by_deviation`, marks may also be
    those of passes that are in deviation arithmetic from the input on, and there may be more of them at some digits
    less: metrics without a rule are read off `x + R`, of which two passes may share the rounding or not."""
    numbers = ("value", "log10", "floor", "digits", "below_floor")
    assert found.drop(*numbers).equals(expected.drop(*numbers))
    assert found["digits"].is_null().equals(expected["digits"].is_null())
    assert -math.log10(AGREED) == pytest.approx(9)
    differ = found["below_floor"] != expected["below_floor"]
    if by_deviation is not None:
        differ &= found["below_floor"] != by_deviation["below_floor"]
    for row, same in zip(*(each.filter(differ).iter_rows(named=True) for each in (found, expected)), strict=True):
        more = by_deviation is not None and row["below_floor"]
        assert row["digits"] > 5 if more else all(7.5 < each["digits"] < 10.5 for each in (row, same)), (row, same)
    known = ~(found["below_floor"] | expected["below_floor"])
    for name in ("value", "log10"):
        a, b = (torch.tensor(each.filter(known)[name].fill_null(torch.nan).to_list()) for each in (found, expected))
        torch.testing.assert_close(a, b, rtol=share, atol=share, equal_nan=True)
    if digits is not None:
        a, b = (torch.tensor(each["digits"].fill_null(torch.nan).to_list()) for each in (found, expected))
        torch.testing.assert_close(a, b, rtol=0.0, atol=digits, equal_nan=True)


def collapsing(variant: str) -> tuple[Transformer, Tensor]:
    """A network and tokens of which float64 sees some layers and some samples, not others."""
    arch = Architecture(layers=8, width=16, heads=2, mlp_width=32, norm="layer")
    X = normal(3, 6, 16, seed=1)
    X[1] = 1e-3 * X[1] + normal(1, 16, seed=2)
    X[2] = X[2, :1]
    return Transformer.random(arch, seed=3).variant(variant), X


PADDING = torch.zeros(3, 6, dtype=torch.bool)
PADDING[0, 4:], PADDING[1, :2] = True, True

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "check", "metrics", "padding"),
    [
        ("san", False, chosen_metrics("these tests", ["mu", "entropy", "head_residual"]), PADDING),
        ("san", True, chosen_metrics("these tests", DEFAULT_METRICS), torch.zeros_like(PADDING)),
        *(
            pytest.param(variant, check, CHOSEN, padding, marks=SLOW)
            for variant in ("transformer", "san", "san+mlp", "san+norm+skip")
            for check in (True, False)
            for padding in (PADDING, torch.zeros_like(PADDING))
        ),
    ],
)
def test_through_collapse(
    variant: str, check: bool, metrics: list[Metric], padding: Tensor, cache: ReplayCache
) -> None:
    """Recorded, presumed and presumed again: readings, digits and marks, and what the pass says about itself."""
    net, X = collapsing(variant)
    profile = measure(net, X, padding, metrics=metrics, check=check)
    for _ in range(3):
        found, checks = read(steps_of(net, X, padding, metrics, check), metrics)
        assert_same(found, profile.table, 1e-11, 0.5)
        assert checks == {name: profile.manifest.networks[0].checks[name] for name in checks}
    (computation,) = cache.computations.values()
    assert computation.run is not None and computation.changes == 0
    if variant == "san":
        assert float(profile.curve("mu", "log10").min()) < -300
    assert check == found["digits"].is_not_null().any()


def with_rule(arch: Architecture) -> Architecture:
    """The architecture with a kernel that deviation arithmetic has a rule for."""
    return arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch


NARROW = Architecture(
    layers=2, width=8, heads=1, head_width=4, positions="absolute", length=16, mlp="gated", mlp_width=12, norm="none",
    attention_skip=0.0, mlp_skip=0.0,
)  # fmt: skip
"""Its tokens become short, and a replayed pass keeps them at another scale."""


@SLOW
@settings(max_examples=6)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 999), st.booleans())
@example(NARROW, 1, 0, 0, True)
def test_of_any_network_and_tokens(arch: Architecture, n: int, before: int, seed: int, check: bool) -> None:
    """Also with tokens for which other shortcuts are allowed, which the replayed pass then does without."""
    cache = ReplayCache()
    net, metrics = Transformer.random(with_rule(arch), seed=seed, init="xavier"), CHOSEN
    padding = torch.zeros(2, before + n + 1, dtype=torch.bool)
    padding[1, :before], padding[1, before + n :] = True, True
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        X = close * normal(2, before + n + 1, 8, seed=seed + number) + (1 - close) * normal(1, 1, 8, seed=seed + 7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captured, "replay_cache", cache)
            found, _ = read(steps_of(net, X, padding, metrics, check), metrics)
        (computation,) = cache.computations.values()
        by_deviation = None
        if computation.changes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(second_pass, "trusts_floats", lambda arch: False)
                by_deviation = measure(net, X, padding, metrics=metrics, check=check).table
        expected = measure(net, X, padding, metrics=metrics, check=check).table
        assert_same(found, expected, by_deviation=by_deviation)


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=SLOW)])
def test_layers_that_are_held_are_those_of_the_pass(check: bool) -> None:
    """Their tokens and patterns, for readers that look at more than metrics; else there are metrics alone."""
    net, X = collapsing("san+norm+skip")
    net, metrics = net.variant(layers=[1, 2, 3]), chosen_metrics("these tests", ["mu", "entropy"])
    shown: list[LayerStep] = []

    class Shown:
        needs: frozenset[Of] = frozenset(("tokens", "attention"))
        cost = "nothing"

        def read(self, step: LayerStep) -> None:
            shown.append(step)

        def result(self) -> None:
            """Nothing."""

    profile = measure(net, X, PADDING, metrics=metrics, check=check, readers=[Shown()])
    for _ in range(3):
        held = steps_of(net, X, PADDING, metrics, check, hold=True)
        assert_same(read(held, metrics)[0], profile.table, 1e-11)
        for step, expected in zip(held, shown, strict=True):
            assert step.layer == expected.layer and type(step.step) is type(expected.step)
            torch.testing.assert_close(step.tokens, expected.tokens, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(step.residual.R, expected.residual.R, rtol=1e-9, atol=1e-9)
            assert (step.attention is None) == (expected.attention is None) == (step.layer == 0)
            torch.testing.assert_close(step.attention, expected.attention, rtol=1e-11, atol=1e-13)
    for step in steps_of(net, X, PADDING, metrics, check, start=5):
        assert isinstance(step.step, Step) and step.attention is None and step.start == 5
        assert step.readings(metrics) and step.valid.equal(~PADDING)


def test_samples_that_are_not_finite_are_read_as_by_measure(cache: ReplayCache) -> None:
    """And so is the first layer that is not finite, also where the recorded tokens were."""
    net = Transformer.random(Architecture(layers=2, width=8, heads=2), seed=1)
    metrics = chosen_metrics("these tests", ["mu", "entropy", "relative_mu"])
    padding = torch.zeros(2, 6, dtype=torch.bool)
    for entry, first in ((1.0, None), (1.0, None), (math.inf, 0), (math.inf, 0)):
        X = normal(2, 6, 8, seed=1)
        X[0, 1, 2] = entry
        profile = measure(net, X, metrics=metrics)
        found, checks = read(steps_of(net, X, padding, metrics, True), metrics)
        assert_same(found, profile.table)
        assert checks == {name: profile.manifest.networks[0].checks[name] for name in checks}
        assert checks["first_layer_not_finite"] == first
        assert found.filter(sample=0)["value"].is_nan().any() == (first == 0)
        assert not found.filter(sample=1)["value"].is_nan().any()
    assert len(cache.computations) == 1


def test_passes_that_cannot_be_captured_are_left_to_others() -> None:
    net, metrics = Transformer.random(Architecture(layers=1, width=8, heads=2)), chosen_metrics("these tests", "mu")
    X, none = torch.zeros(2, 0, 8, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.bool)
    assert captured_steps(PassInputs.of(net, X, none), ~none, 0, metrics, check=True, hold=False) is None


@pytest.mark.parametrize(
    ("variant", "close"),
    [
        ("transformer", 1.0),
        ("san", 1e-9),
        *(
            pytest.param(variant, close, marks=SLOW)
            for variant in ("transformer", "san", "san+mlp", "san+norm+skip")
            for close in (1.0, 1e-9)
            if (variant, close) not in (("transformer", 1.0), ("san", 1e-9))
        ),
    ],
)
def test_nothing_that_is_replayed_waits_for_a_number(
    variant: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without numbers (torch's "meta") both passes and what is read of them go through once they were
    asked: no question reaches the host, nothing comes from it. A CUDA graph allows neither."""
    arch = Architecture(layers=2, width=16, heads=2, mlp_width=32, norm="layer", mask="causal")
    arch = arch.replace(kept_heads=((0,),) * 2) if variant == "transformer" else arch
    net = Transformer.random(arch, seed=1).variant(variant)
    X = close * normal(2, 8, 16) + (1 - close) * normal(1, 1, 16, seed=7)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[1, 6:] = True
    metrics, inputs = chosen_metrics("these tests", DEFAULT_METRICS), PassInputs.of(net, X, padding)
    with answering(Recording()) as recording:
        expected = _passes(inputs.net, metrics, True, True, (inputs.tensors, ~padding))

    def on_meta(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    meta_net = replace(inputs.net, weights=converted(inputs.net.weights, on_meta))
    given: tuple[StartingTensors, Tensor] = converted((inputs.tensors, ~padding), on_meta)
    rows, drawn = perturbation._row, []

    def row_on_meta(copies: int, length: int, device: torch.device) -> Tensor:
        drawn.append(device)
        return on_meta(rows(copies, length, torch.device("cpu")))

    monkeypatch.setattr(perturbation, "_row", row_on_meta)
    monkeypatch.setattr(perturbation, "_longest", {})
    with answering(Presuming(recording.answers)) as asking:
        result: CapturedPasses = _passes(meta_net, metrics, True, True, given)
        violations = asking.violations(given[0][0])
    assert violations.is_meta and len(violations) > 10
    assert result.numbers.is_meta and result.numbers.shape == expected.numbers.shape
    assert result.pieces == expected.pieces
    assert [type(step) for step in result.steps] == [type(step) for step in expected.steps]
    assert isinstance(result.steps[-1], Step if close == 1.0 else DeviationStep)
    assert all(device.type == "meta" for device in drawn)
