"""Each rule speaks of a run that has its fault, at the right layer and step, and not of one that has not."""

import math
from collections.abc import Callable, Mapping, Sequence
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
from rankscope.live.monitor import Alarm, AlarmRule, default_rules
from rankscope.live.monitor.rules import AttentionSink, Collapse, DeadHead, EntropyCollapse, GradientSize, TokenSize
from rankscope.runs.training import TRAINING
from tests.raising import raises

LAYERS = 4
Run = Callable[[str, int, int], float | None]
"""The number of a metric, at a layer and a measurement; None where it is no number."""
HEALTHY = {
    "relative_mu": 0.7, "mu": 30.0, "entropy": 2.5, "first_token_mass": 0.1, "head_mu": 2.0,
    "grad_query_key": 0.01, "grad_value_output": 0.1, "grad_mlp": 0.2, "grad_tokens": 1.0,
}  # fmt: skip


def rows(step: int, run: Run, index: int, heads: int = 3) -> pl.DataFrame:
    """A measurement of a made-up run: every metric, at every layer, of every head where it is of heads."""
    found = []
    for metric in HEALTHY:
        by_head = metric in ("entropy", "first_token_mass", "head_mu")
        for layer in range(1, LAYERS + 1):
            for head in range(heads) if by_head else [None]:
                name = f"{metric}/{head}" if metric == "head_mu" else metric
                value = run(name, layer, index)
                found.append([step, layer, head, metric, value, 0.0, value, value, 0.0,
                              4 if value is not None else 0, 0 if value is not None else 4])  # fmt: skip
    return pl.DataFrame(found, schema=TRAINING, orient="row")


def heard(rules: Sequence[AlarmRule], run: Run, measurements: int = 13, every: int = 10) -> list[Alarm]:
    return [
        alarm
        for k in range(measurements)
        for rule in rules
        for alarm in rule.on_measurement(rows(every * k, run, k), every * k)
    ]


def healthy(name: str, layer: int, index: int) -> float:
    return HEALTHY[name.split("/")[0]]


def otherwise(changes: Mapping[str, Callable[[int, int], float | None]]) -> Run:
    """A healthy run but for these."""
    return lambda name, layer, index: changes[name](layer, index) if name in changes else healthy(name, layer, index)


@pytest.mark.parametrize(
    ("rule", "changes", "layer", "head", "since", "step"),
    [
        # From layer 3 on and from the fifth measurement on, tokens differ by a hundredth.
        (Collapse(), {"relative_mu": lambda at, k: 0.01 if at >= 3 and k >= 4 else 0.7}, 3, None, 40, 50),
        # They never come below the threshold, and fall by three decades all the same.
        (Collapse(threshold=0.0), {"relative_mu": lambda at, k: 0.7 / 1000 ** (k >= 2),
                                   "mu": lambda at, k: 30.0 / 1000 ** (k >= 2)}, 1, None, 20, 30),
        (EntropyCollapse(), {"entropy": lambda at, k: 2.5 / (1 + k**2) if at == 2 else 2.5}, 2, None, 50, 60),
        (EntropyCollapse(), {"entropy": lambda at, k: 0.05 if at == 2 else 2.5}, 2, None, 0, 10),
        (AttentionSink(),
         {"first_token_mass": lambda at, k: 0.05 + 0.08 * k if at == 4 else 0.1}, 4, None, 100, 120),
        (TokenSize(), {"mu": lambda at, k: 30.0 * 10 ** (3 * (k >= 5 and at >= 2))}, 2, None, 50, 60),
        (TokenSize(), {"mu": lambda at, k: 30.0 / 10 ** (3 * (k >= 5 and at == 4))}, 4, None, 50, 60),
        (TokenSize(), {"mu": lambda at, k: None if k >= 3 and at == 2 else 30.0}, 2, None, 30, 30),
        # A sixth of a decade at each measurement is no jump; it adds up.
        (TokenSize(drift=1.0), {"mu": lambda at, k: 10 ** (0.15 * k) if at == 1 else 30.0}, 1, None, 70, 80),
        (GradientSize(), {"grad_mlp": lambda at, k: 1e3 if at == 3 and k >= 2 else 0.2}, 3, None, 20, 40),
        (GradientSize(), {"grad_query_key": lambda at, k: 1e-7 if at == 4 else 0.01}, 4, None, 0, 20),
        (GradientSize(), {"grad_query_key": lambda at, k: 1e-7}, 1, None, 0, 20),
        (GradientSize(), {"grad_tokens": lambda at, k: 1e4 if k >= 6 else 1.0}, 1, None, 60, 80),
        (GradientSize(), {"grad_mlp": lambda at, k: None if k == 2 else 0.2}, 1, None, 20, 20),
        (DeadHead(), {"head_mu/1": lambda at, k: 1e-6 if at == 2 and k >= 3 else 2.0}, 2, 1, 30, 70),
    ],
)  # fmt: skip
def test_a_fault_is_said_once_where_and_when_it_is(
    rule: AlarmRule, changes: Any, layer: int, head: int | None, since: int, step: int
) -> None:
    (alarm,) = heard([rule], otherwise(changes))
    assert (alarm.layer, alarm.head, alarm.since, alarm.step) == (layer, head, since, step)
    assert alarm.rule == rule.name and f"layer {layer}" in alarm.sentence and rule.advice in alarm.sentence
    assert alarm.sentence.startswith(f"Step {step}")
    assert (f"since step {since}" in alarm.sentence) is (since != step)
    others = [each for each in default_rules() if type(each) is not type(rule)]
    assert not heard(others, otherwise(changes))


@given(st.lists(st.floats(0.5, 2.0), min_size=200, max_size=200), st.integers(1, 3))
def test_a_run_that_stays_about_its_start_raises_nothing(band: list[float], heads: int) -> None:
    def run(name: str, layer: int, index: int) -> float:
        drawn = band[hash((name, layer, index)) % len(band)]
        return (
            min(1.0, drawn * healthy(name, layer, index)) if "relative" in name else drawn * healthy(name, layer, index)
        )

    rules = default_rules()
    for index in range(8):
        table = rows(index, run, index, heads)
        assert not [alarm for rule in rules for alarm in rule.on_measurement(table, index)]


def test_it_speaks_again_only_after_it_was_quiet_as_long() -> None:
    def run(measurements: Sequence[int]) -> Run:
        return otherwise({"relative_mu": lambda layer, index: 0.001 if index in measurements else 0.7})

    assert [each.step for each in heard([Collapse()], run([1, 2, 4, 5, 6]))] == [20]
    assert [each.step for each in heard([Collapse()], run([1, 2, 5, 6]))] == [20, 60]
    assert not heard([Collapse()], run([1, 3, 5, 7]))


def test_several_layers_make_one_alarm() -> None:
    (alarm,) = heard([EntropyCollapse()], otherwise({"entropy": lambda layer, index: 0.01}))
    assert "The same holds of layer 2, layer 3, layer 4." in alarm.sentence


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
    return read(folder).table("alarms").to_dicts()


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_an_alarm_warns_and_is_written(tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, every=1, probe=X, run=tmp_path) as monitor:
        with pytest.warns(TrainingWarning, match="Step 5, since step 4: tokens of layer 2 blow up"):
            trained(tmp_path, range(1, 8), monitor, model)
        assert not monitor.should_stop
    (row,) = alarms(tmp_path)
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
