"""When a rule raises an alarm and when again, what the alarm does, and that a resumed run has the same alarms."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope import Monitor, read
from rankscope.errors import MonitorError, TrainingWarning
from rankscope.monitor import Alarm, default_rules
from rankscope.monitor.alarm_rules import Collapse, EntropyCollapse, TokenSize
from tests.monitor.made_up_runs import Run, healthy, heard, otherwise, rows
from tests.raising import raises


def test_it_speaks_again_only_after_it_was_quiet_as_long() -> None:
    def run(measurements: Sequence[int]) -> Run:
        return otherwise({"relative_mu": lambda layer, index: 0.001 if index in measurements else 0.7})

    assert [each.step for each in heard([Collapse()], run([1, 2, 4, 5, 6]))] == [20]
    assert [each.step for each in heard([Collapse()], run([1, 2, 5, 6]))] == [20, 60]
    assert not heard([Collapse()], run([1, 3, 5, 7]))


def test_several_layers_make_one_alarm() -> None:
    (alarm,) = heard([EntropyCollapse()], otherwise({"entropy": lambda layer, index: 0.01}))
    assert "The same holds of layer 2, layer 3, layer 4." in alarm.sentence


@pytest.mark.slow
@settings(max_examples=5)
@given(st.integers(0, 8))
def test_a_rule_that_goes_on_from_its_state_says_what_an_undisturbed_one_does(cut: int) -> None:
    def run(name: str, layer: int, index: int) -> float:
        return healthy(name, layer, index) * 10 ** (3 * math.sin(index + layer))

    whole, first, second = default_rules(), default_rules(), default_rules()
    said = [[alarm for rule in whole for alarm in rule.on_measurement(rows(k, run, k), k)] for k in range(9)]
    for k in range(cut):
        for rule in first:
            rule.on_measurement(rows(k, run, k), k)
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(before.state_dict())
    again = [[alarm for rule in second for alarm in rule.on_measurement(rows(k, run, k), k)] for k in range(cut, 9)]
    assert again == said[cut:] and any(said)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def blown_up(model: Any, step: int) -> None:
    """From the fourth step on, the second layer adds far too much."""
    with torch.no_grad():
        model.layers[1].linear2.weight.mul_(1e4 if step == 4 else 1.0)


def trained(run: Path, steps: range, monitor: Monitor, model: nn.Module) -> None:
    for step in steps:
        blown_up(model, step)
        monitor.step(loss=1.0)


def alarms(folder: Path) -> list[dict[str, Any]]:
    return read(folder).tables["alarms"].to_dicts()


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_an_alarm_warns_and_is_written(tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, every=1, probe=X, run=tmp_path) as monitor:
        with pytest.warns(TrainingWarning) as warned:
            trained(tmp_path, range(1, 8), monitor, model)
        assert not monitor.should_stop
    (row,), (warning,) = alarms(tmp_path), warned
    assert str(warning.message) == row["sentence"]
    assert (row["step"], row["since"], row["layer"], row["action"]) == (5, 4, 2, "warn")


def test_an_alarm_may_stop_the_training_or_call_a_function(tmp_path: Path) -> None:
    model = encoder()
    called: list[Alarm] = []
    rules = [TokenSize(action="stop"), TokenSize(patience=3, action=called.append)]
    rules[1].name = "mine"
    with Monitor(model, every=1, probe=X, run=tmp_path, alarms=rules) as monitor:
        with pytest.warns(TrainingWarning):
            trained(tmp_path, range(1, 8), monitor, model)
        assert monitor.should_stop
    assert [(each.rule, each.step) for each in called] == [("mine", 6)]
    assert [row["action"] for row in alarms(tmp_path)] == ["stop", "call"]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::rankscope.errors.TrainingWarning")
@pytest.mark.parametrize("by_state", [True, False])
def test_a_run_that_goes_on_has_the_alarms_of_an_undisturbed_one(tmp_path: Path, by_state: bool) -> None:
    model = encoder()
    with Monitor(model, every=1, probe=X, run=tmp_path / "whole") as monitor:
        trained(tmp_path, range(1, 9), monitor, model)
    model = encoder()
    with Monitor(model, every=1, probe=X, run=tmp_path / "parts") as monitor:
        trained(tmp_path, range(1, 5), monitor, model)
        state = monitor.state_dict()
        kept = {name: each.clone() for name, each in model.state_dict().items()}
        trained(tmp_path, range(5, 7), monitor, model)  # lost
    model.load_state_dict(kept)
    with Monitor(model, every=1, probe=X, run=tmp_path / "parts") as monitor:
        monitor.load_state_dict(state) if by_state else monitor.resume(4)
        trained(tmp_path, range(5, 9), monitor, model)
    assert alarms(tmp_path / "parts") == alarms(tmp_path / "whole")
    assert len(alarms(tmp_path / "whole")) == 1


def test_a_rule_of_ones_own_is_any_object_with_on_measurement(tmp_path: Path) -> None:
    class Loss:
        def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
            loss = rows.filter(metric="loss")["value"]
            high = len(loss) and loss[0] > 2
            return [Alarm(step, step, "loss", None, None, "stop", "the loss is above 2")] if high else []

    model = encoder()
    with Monitor(model, every=2, probe=X, run=tmp_path, alarms=[Loss()]) as monitor:
        monitor.step(loss=1.0)
        monitor.step(loss=1.5)
        assert not monitor.should_stop
        monitor.step(loss=4.0)
        with pytest.warns(TrainingWarning, match="the loss is above 2"):
            monitor.step(loss=3.0)
        assert monitor.should_stop


def test_rules_without_their_metrics_are_noted(tmp_path: Path) -> None:
    with Monitor(encoder(), "relative_mu", probe=X, run=tmp_path) as monitor:
        assert not any("tokens collapse" in note for note in monitor.notes)
        assert any("'a head has died' needs head_mu" in note for note in monitor.notes)


def test_a_rule_without_patience_is_refused() -> None:
    with raises(MonitorError, subject="patience"):
        Collapse(patience=0)
