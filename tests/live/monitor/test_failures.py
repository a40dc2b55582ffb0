"""Once a measurement has succeeded no error reaches the training: it is an alarm that waits while the disk is full."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

import rankscope
from rankscope import Monitor
from rankscope.errors import FileError, MonitorError, TrainingWarning
from rankscope.live.monitor import Alarm, Measurement
from rankscope.live.monitor.failures import UNMEASURED, Failures
from rankscope.live.writers import JSONLines
from tests.full_disk import full_disk
from tests.live.monitor.small import encoder, tokens
from tests.raising import raises


def test_a_failure_is_one_alarm_while_it_lasts() -> None:
    steps = [0]
    failures = Failures(lambda: steps[-1])

    def at(step: int, fails: bool = True) -> None:
        steps.append(step)
        with failures.contained("it fails"):
            if fails:
                raise ValueError("no\nmore")

    with pytest.raises(ValueError, match="no"):
        at(0)
    assert not failures.take()
    failures.measured = True
    at(0, fails=False)
    with pytest.warns(TrainingWarning) as warned:
        at(1)
        at(2)
    assert len(warned) == 1 and [(alarm.step, alarm.since) for alarm in failures.take()] == [(1, 0)]
    assert failures.sentences == {"it fails": "Step 2: it fails since step 0: ValueError: no. The training goes on."}
    at(3, fails=False)
    assert not failures.sentences
    with pytest.warns(TrainingWarning):
        at(4)
    assert [(alarm.step, alarm.since) for alarm in failures.take()] == [(4, 3)] and not failures.take()


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).table("training")


class Ailing(torch.nn.Module):
    """A model that cannot be called while it is ill."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.ill = encoder(), False

    def forward(self, X: Tensor) -> Tensor:
        if self.ill:
            raise ValueError("no memory is left")
        return self.encoder(X)


def alarms(run: Path) -> list[dict[str, Any]]:
    return rankscope.read(run).table("alarms").to_dicts()


def test_a_measurement_that_fails_later_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    model = Ailing()
    with Monitor(model, "mu", 10, tokens(99), run=tmp_path, alarms=()) as monitor:
        monitor.step(10, loss=1.0)
        model.ill = True
        with pytest.warns(TrainingWarning) as warned:
            monitor.step(20, loss=2.0)
            monitor.step(30, loss=3.0)
            assert monitor.measure_now() is None
        assert len(warned) == 1 and len(monitor.notes) == 1
        model.ill = False
        monitor.step(40, loss=4.0)
        assert not monitor.notes
        model.ill = True
        with pytest.warns(TrainingWarning):
            monitor.step(50)
    rows = table(tmp_path)
    assert rows["step"].unique().sort().to_list() == [0, 10, 40]
    assert rows.filter(metric="loss")["value"].to_list() == [1.0, 4.0]
    said = [(row["rule"], row["step"], row["since"]) for row in alarms(tmp_path)]
    assert said == [(UNMEASURED, 20, 10), (UNMEASURED, 50, 40)]


def test_a_step_that_cannot_be_counted_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path) as monitor:
        monitor.step(2)
        with pytest.warns(TrainingWarning):
            monitor.step(1)
        monitor.step(4)
        with pytest.warns(TrainingWarning):
            monitor.step(6, loss="low")
        monitor.step(8)
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2, 4, 8]


class Fickle:
    """A writer and a rule that fails at these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, list[int]()

    def __call__(self, measurement: Measurement) -> None:
        self.on_measurement(measurement.rows, measurement.step)

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        if step in self.steps:
            raise ConnectionError("the server is away")
        self.seen.append(step)
        return []


@pytest.mark.parametrize("place", ["writers", "alarms"])
def test_a_writer_or_a_rule_that_fails_takes_nothing_else_with_it(place: str, tmp_path: Path) -> None:
    before, fickle, after = Fickle(), Fickle(2, 4), Fickle()
    options: dict[str, Any] = {"alarms": (), place: [before, fickle, after]}
    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, **options)
    with monitor, pytest.warns(TrainingWarning) as warned:
        for _ in range(8):
            monitor.step()
    assert len(warned) == 1
    assert before.seen == after.seen == [0, 2, 4, 6, 8] and fickle.seen == [0, 6, 8]
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2, 4, 6, 8]
    assert [(row["rule"], row["since"]) for row in alarms(tmp_path)] == [(UNMEASURED, 0)]


class High:
    """A rule that raises one alarm, at step 4."""

    name = "high"

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        return [Alarm(step, step, "high", None, None, "call", "High.")] if step == 4 else []


def test_alarms_of_the_step_at_which_a_rule_fails_are_written(tmp_path: Path) -> None:
    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=[Fickle(4), High()])
    with monitor, pytest.warns(TrainingWarning):
        monitor.step(4)
    assert [(row["step"], row["rule"]) for row in alarms(tmp_path)] == [(4, UNMEASURED), (4, "high")]


def test_a_writer_that_fails_when_it_is_closed_is_an_alarm(tmp_path: Path) -> None:
    class Unclosed(Fickle):
        def close(self) -> None:
            raise ConnectionError("the server is away")

    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=(), writers=[Unclosed()])
    monitor.step()
    with pytest.warns(TrainingWarning):
        monitor.close()
    assert [row["rule"] for row in alarms(tmp_path)] == [UNMEASURED]


def test_a_monitor_that_was_closed_writes_no_more(tmp_path: Path) -> None:
    first = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=())
    first.close()
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=(), step=1) as second:
        second.step(2, loss=1.0)
        with pytest.warns(TrainingWarning) as warned:
            first.step(4, loss=2.0)
            first.step(6, loss=2.0)
        second.step(4, loss=3.0)
    assert len(warned) == 1 and not alarms(tmp_path)
    assert table(tmp_path).filter(metric="loss")["value"].to_list() == [1.0, 3.0]


def test_a_writer_that_fails_from_the_start_is_raised_and_the_folder_is_free(tmp_path: Path) -> None:
    model = encoder()
    with pytest.raises(ConnectionError):
        Monitor(model, "mu", 2, tokens(99), run=tmp_path, writers=[Fickle(0)])
    with Monitor(model, "mu", 2, tokens(99), run=tmp_path) as monitor:
        monitor.resume(0)
    assert table(tmp_path)["step"].unique().to_list() == [0]


def test_a_disk_that_is_full_from_the_start_is_one_sentence_and_the_folder_is_free(tmp_path: Path) -> None:
    for room in (0, 50, 1000):
        with raises(FileError) as caught, full_disk(room):
            Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / str(room))
        assert len(str(caught.value).splitlines()) == 1
        with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / str(room)) as monitor:
            monitor.step(2)
        assert table(tmp_path / str(room))["step"].unique().sort().to_list() == [0, 2]


def test_a_disk_that_is_full_for_a_moment_loses_that_moment_alone(tmp_path: Path) -> None:
    writer, reported = JSONLines(tmp_path / "lines.jsonl"), list[str]()
    writers: list[Any] = [writer, lambda measurement: reported.extend(alarm.rule for alarm in measurement.alarms)]
    with Monitor(encoder(), "mu", 1, tokens(99), run=tmp_path / "run", writers=writers, alarms=[High()]) as monitor:
        for step in range(1, 9):
            if step in (4, 5):
                room = min(path.stat().st_size for path in (writer.path, tmp_path / "run/training/journal.jsonl"))
                with full_disk(room + 20), pytest.warns(TrainingWarning) if step == 4 else full_disk(room + 20):
                    monitor.step()
            else:
                monitor.step()
        following = rankscope.read(tmp_path / "run").table("training")["step"].unique().sort().to_list()
    assert following == [0, 1, 2, 3, 6, 7, 8] == table(tmp_path / "run")["step"].unique().sort().to_list()
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == following
    said = [(row["rule"], row["since"]) for row in alarms(tmp_path / "run")]
    assert said == [("high", 4), (UNMEASURED, 3), (UNMEASURED, 3)]  # of the rule, the folder and the file
    assert reported == ["high"]


def test_the_functions_of_alarms_are_the_users_own(tmp_path: Path) -> None:
    class Interrupting(High):
        def action(self, alarm: Alarm) -> None:
            raise InterruptedError

    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=[Interrupting()]) as monitor:
        monitor.step(2)
        with pytest.raises(InterruptedError):
            monitor.step(4)


def test_a_probe_is_tried_when_a_run_is_resumed_not_in_mid_training(tmp_path: Path) -> None:
    model = Ailing()
    with Monitor(model, "mu", 10, tokens(99), run=tmp_path) as monitor:
        monitor.step(10)
    model.ill = True
    with raises(MonitorError, subject="probe"):
        Monitor(model, "mu", 10, tokens(99), run=tmp_path, step=10)
