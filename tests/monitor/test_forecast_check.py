"""Real small trainings beside their forecasts: one that learns, one that does not, and one of another network."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope import Architecture, Monitor, forecast
from rankscope.errors import MonitorError, TrainingWarning
from rankscope.forecasts import LEARNT, Design, Forecast, Plan, Recipe
from rankscope.monitor.forecast_check import ForecastCheck
from rankscope.runs import Manifest, read
from rankscope.trainings import TRAINING, TrainingRun, read_training
from tests.monitor.small import encoder, tokens
from tests.raising import raises

STEPS, TOKENS = 160, 24
LEARNS = Architecture(
    layers=2, width=48, heads=4, norm_place="pre", final_norm=True, mask="causal", positions="absolute", length=TOKENS
)
COLLAPSES = LEARNS.replace(layers=16, norm="none", final_norm=False, attention_skip=0.0, mlp="none")


def forecast_for(arch: Architecture) -> Forecast:
    return forecast(arch, design=Design(tokens=TOKENS), recipe=Recipe(steps=STEPS, lr=3e-3))


@pytest.fixture(scope="module")
def learns() -> Forecast:
    return forecast_for(LEARNS)


@pytest.fixture(scope="module")
def collapses() -> Forecast:
    return forecast_for(COLLAPSES)


def trained(plan: Plan, run: Path, expected: Any, steps: int = STEPS, every: int = 40, **options: Any) -> Monitor:
    """Train the network of a plan, drawn from another seed than its forecast, in a loop with a monitor."""
    model = replace(plan, recipe=replace(plan.recipe, seed=plan.recipe.seed + 1)).model()
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.recipe.lr)
    probe = {"inputs": plan.task.held_out(8).inputs}
    with Monitor(model, every=every, probe=probe, run=run, forecast=expected, blocks="net.layers", alarms=(),
                 padding="none", **options) as monitor:  # fmt: skip
        for step in range(monitor.steps, steps):
            batch = plan.task.batch(plan.recipe.batch_size, 5, step)
            loss = plan.task.loss(model(batch.inputs), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    return monitor


@pytest.mark.slow
def test_a_network_that_learns_as_forecast(learns: Forecast, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no alarm
        monitor = trained(learns.design, tmp_path, learns)
    check = monitor.forecast
    assert check is not None and (check.agrees, check.learnt, check.holds) == (True, True, True)
    run = read_training(tmp_path)
    assert run.alarms.is_empty()
    written = run.manifest.more["forecast"]
    assert written["probability"] == learns.probability and written["verdict"] == learns.verdict
    assert written["steps"] == STEPS and written["holds"] is True
    assert written["log10_residual"] == {str(k): log for k, log in enumerate(learns.table["residual"])}
    # What is said is what the tables have.
    first = run.table.filter(step=0, metric="relative_residual").sort("layer")["value"]
    differences = [math.log10(value) - log for value, log in zip(first, learns.table["residual"], strict=True)]
    assert [*written["log10_difference"].values()] == pytest.approx(differences)
    assert f"{max(map(abs, differences)):.2g} in log10 at most" in run.forecast[1]
    steps, losses = run.scalar("loss")
    blind = learns.design.task.blind
    assert steps[-1] == STEPS and losses[-1] < blind - LEARNT["next-character"]
    assert run.forecast[0] == learns.verdict[0]
    assert run.forecast[2].startswith("In the end the forecast holds: it learns, and a probability of")
    assert f"the loss, {losses[-1]:.3g} since step 120, is below {blind - 0.1:.3g}" in run.forecast[2]
    assert run.forecast[2] in run.sentence


@pytest.mark.slow
def test_a_network_that_does_not_learn_as_forecast(collapses: Forecast, tmp_path: Path) -> None:
    monitor = trained(collapses.design, tmp_path, collapses)
    check = monitor.forecast
    assert collapses.probability < 0.3
    assert check is not None and (check.agrees, check.learnt, check.holds) == (True, False, True)
    assert "the forecast holds: it does not learn" in check.sentences[1]
    assert read(tmp_path).tables["alarms"].is_empty()


def test_a_forecast_of_another_network_is_told_apart(collapses: Forecast, learns: Forecast, tmp_path: Path) -> None:
    """Of the same depth and another skip; and of another depth."""
    whole = learns.design.changed(layers=16)
    with pytest.warns(TrainingWarning, match="was not of this network") as warned:
        monitor = trained(whole, tmp_path / "a", collapses, steps=0)
    check = monitor.forecast
    assert check is not None and check.agrees is False and len(warned) == 1
    run = read_training(tmp_path / "a")
    assert run.alarms["rule"].to_list() == [check.name] and run.alarms["step"].to_list() == [0]
    with pytest.warns(TrainingWarning, match="it has 16 layers, and the forecast 2"):
        trained(whole, tmp_path / "b", learns, steps=0)
    assert "layer" in run.forecast[1] and "in log10" in run.forecast[1]


@pytest.mark.slow
def test_a_loss_that_does_not_fall_as_forecast_is_an_alarm_from_half_of_the_steps_on(
    learns: Forecast, tmp_path: Path
) -> None:
    """At a rate so small that no weight moves, it cannot learn."""
    still = replace(learns.design, recipe=replace(learns.design.recipe, lr=1e-30))
    with pytest.warns(TrainingWarning, match="So far the forecast does not hold: it does not learn") as warned:
        trained(still, tmp_path, learns, steps=STEPS - 40)
    assert len(warned) == 1
    run = read_training(tmp_path)
    assert run.alarms["step"].to_list() == [STEPS // 2]
    assert run.manifest.more["forecast"]["holds"] is False
    assert f"step {STEPS - 40} of {STEPS}" in run.forecast[2].lower()


@pytest.mark.slow
def test_before_half_of_the_steps_nothing_is_decided(learns: Forecast, tmp_path: Path) -> None:
    check = trained(learns.design, tmp_path, learns, steps=40).forecast
    assert check is not None and check.agrees is True and check.learnt is None and check.holds is None
    assert "Half of the steps are to be made first" in read_training(tmp_path).forecast[2]


@pytest.mark.slow
def test_a_run_that_was_continued_says_the_same(learns: Forecast, tmp_path: Path) -> None:
    """From the table alone, and from a checkpoint's state."""
    whole = trained(learns.design, tmp_path / "whole", learns)
    said = read_training(tmp_path / "whole").forecast
    first = trained(learns.design, tmp_path / "run", learns, steps=80)
    model, probe = learns.design.model(), {"inputs": learns.design.task.held_out(8).inputs}
    options: dict[str, Any] = {"every": 40, "probe": probe, "blocks": "net.layers", "alarms": (), "padding": "none"}
    opened = Monitor(model, run=tmp_path / "run", forecast=learns, **options)
    opened.close()  # nothing was said of where it continues
    assert read_training(tmp_path / "run").forecast[1:] == first.forecast.sentences  # type: ignore[union-attr]
    for state in (None, first.state_dict()):
        with Monitor(model, run=tmp_path / "run", forecast=learns, **options) as monitor:
            monitor.resume(80) if state is None else monitor.load_state_dict(state)
            assert monitor.forecast is not None and first.forecast is not None
            assert monitor.forecast.sentences == first.forecast.sentences
    assert whole.forecast is not None and said[1:] == whole.forecast.sentences


@dataclass
class Expected:
    """A forecast of one's own, as the protocol has it."""

    probability: float = 0.9
    verdict: Sequence[str] = ("it will learn",)
    steps: int = 100
    learnt_below: float = 2.0
    table: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame({"layer": [0, 1, 2], "residual": [-0.1, -4.0, -12.0]})
    )


def measured(
    step: int, residuals: Sequence[float] = (), loss: float | None = None, most: float | None = None, floor: float = 0.0
) -> pl.DataFrame:
    """The rows of a made-up measurement."""
    rows: list[dict[str, Any]] = [
        {"step": step, "layer": k, "metric": "relative_residual", "value": value, "floor": floor, "samples": 2,
         "broken": 0}
        for k, value in enumerate(residuals)
    ]  # fmt: skip
    if loss is not None:
        broken = not math.isfinite(loss)
        rows.append({"step": step, "metric": "loss", "value": None if broken else loss, "most": most or loss,
                     "samples": 1, "broken": int(broken)})  # fmt: skip
    return pl.DataFrame(rows, schema=TRAINING)


def test_what_rounding_hides_is_no_disagreement() -> None:
    check = ForecastCheck(Expected())
    assert check.on_measurement(measured(0, (0.8, 1e-4, 3e-8), floor=1e-7), 0) == []
    assert check.agrees is True and list(check.described()["log10_difference"]) == ["0", "1"]
    other = ForecastCheck(Expected())  # 1e-4 was forecast, and rounding of 1e-7 would have shown that
    (alarm,) = other.on_measurement(measured(0, (0.8, 3e-8, 3e-8), floor=1e-7), 0)
    assert other.agrees is False and "at layer 1 tokens are apart by no more than rounding" in alarm.sentence


def test_another_draw_of_weights_is_no_disagreement_and_a_decade_is() -> None:
    assert ForecastCheck(Expected()).on_measurement(measured(0, (0.6, 3e-4, 1e-10)), 0) == []
    assert ForecastCheck(Expected()).on_measurement(measured(0, (0.05, 1e-4, 1e-12)), 0)


def test_layers_that_are_measured_after_training_are_not_compared() -> None:
    check = ForecastCheck(Expected())
    assert check.on_measurement(measured(100, (0.01, 0.01, 0.01)), 100) == []
    assert check.agrees is None and "weights had moved" in check.sentences[0]


def test_some_layers_are_compared_alone() -> None:
    assert ForecastCheck(Expected(), whole=False).on_measurement(measured(0, (0.8, 1e-4)), 0) == []
    assert ForecastCheck(Expected()).on_measurement(measured(0, (0.8, 1e-4)), 0)


def test_a_forecast_without_layers_says_so() -> None:
    check = ForecastCheck(Expected(table=pl.DataFrame()))
    assert check.on_measurement(measured(0, (0.8,)), 0) == [] and "no table" in check.sentences[0]
    check = ForecastCheck(Expected())
    assert check.on_measurement(measured(0), 0) == [] and "was not measured" in check.sentences[0]


@pytest.mark.parametrize(
    ("probability", "loss", "learnt", "holds"),
    [(0.9, 1.5, True, True), (0.9, 2.5, False, False), (0.1, 1.5, True, False), (0.1, 2.5, False, True),
     (0.5, 1.5, True, None), (0.5, 2.5, False, None), (0.9, math.nan, False, False)],
)  # fmt: skip
def test_outcomes_beside_probabilities(probability: float, loss: float, learnt: bool, holds: bool | None) -> None:
    check = ForecastCheck(Expected(probability=probability))
    check.on_measurement(measured(40, loss=3.0), 40)
    early = check.learnt
    alarms = check.on_measurement(measured(100, loss=loss), 100)
    assert (early, check.learnt, check.holds) == (None, learnt, holds)
    assert bool(alarms) == (probability == 0.9 and not learnt)  # what learns against a forecast is no fault
    before = check.sentences
    assert check.on_measurement(measured(140, loss=9.0), 140) == [] and check.sentences == before  # the steps are made


def test_the_outcome_of_another_network_speaks_neither_for_the_forecast_nor_against() -> None:
    check = ForecastCheck(Expected())
    check.on_measurement(measured(0, (0.8, 0.8, 0.8)), 0)
    for step, loss in ((60, 3.0), (80, 1.5)):
        assert check.on_measurement(measured(step, loss=loss), step) == []
        assert check.learnt is (loss < 2) and check.holds is None and "of another network" in check.sentences[1]


def test_a_loss_of_another_task_decides_nothing() -> None:
    check = ForecastCheck(Expected())
    check.on_measurement(measured(40, loss=0.5, most=1.1), 40)
    check.on_measurement(measured(100, loss=0.4), 100)
    assert check.learnt is None and "of another task" in check.sentences[1]
    check = ForecastCheck(Expected(learnt_below=math.nan))
    check.on_measurement(measured(100, loss=0.4), 100)
    assert check.learnt is None and check.described()["learnt_below"] is None


def test_a_run_without_a_forecast_says_nothing_of_one() -> None:
    run = TrainingRun(Path(), Manifest(), pl.DataFrame(), pl.DataFrame(), pl.DataFrame())
    assert run.forecast == []


def test_what_is_no_forecast_is_refused(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with raises(MonitorError, subject="forecast"):
        Monitor(model, run=tmp_path, forecast=0.9)  # type: ignore[arg-type]
    with raises(MonitorError, subject="forecast"):
        ForecastCheck(Expected(probability=math.nan))
    with raises(MonitorError, subject="alarms"):
        Monitor(model, run=tmp_path, alarms=3, forecast=Expected())  # type: ignore[arg-type]


def test_a_run_that_is_opened_and_not_continued_keeps_what_was_said(tmp_path: Path) -> None:
    def opened() -> Monitor:
        return Monitor(
            encoder(), "mu", 40, tokens(99), run=tmp_path, forecast=Expected(table=pl.DataFrame()), alarms=()
        )

    before = opened()
    first = read(tmp_path).entries["training"].manifest.more["forecast"]
    for step, loss in ((40, 3.0), (100, 1.0)):
        before.step(step, loss=loss)
    before.close()
    said = read(tmp_path).entries["training"].manifest.more["forecast"]
    assert (first["holds"], said["holds"]) == (None, True)
    opened().close()
    assert read(tmp_path).entries["training"].manifest.more["forecast"] == said
