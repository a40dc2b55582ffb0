"""Any stride of steps is measured and recorded; a folder with a run in it is continued; wrong arguments are refused."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rankscope
from rankscope import Monitor
from rankscope.errors import MonitorError
from rankscope.live.monitor.monitor import STRIDES, Schedule
from rankscope.live.writers import JSONLines
from tests.live.monitor.small import encoder, loss_of, tokens
from tests.raising import raises

METRICS = {"tokens": "mu", "attention": ["mu", "entropy"]}
"""Of training batches read through operators, and through `watch`."""


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).table("training")


def test_scalars_between_looks_are_in_the_state(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(loss=torch.tensor(1.0))
        state = monitor.state_dict()
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as again:
        again.load_state_dict(state)
        for _ in range(3):
            again.step(loss=5.0)
    assert table(tmp_path).filter(metric="loss")["value"].to_list() == [4.0]


def test_a_folder_with_a_run_in_it_asks_from_where(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(2)
        with raises(MonitorError, subject="step"):
            monitor.step(1)
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as again:
        with raises(MonitorError, subject="run"):
            again.step()
        with raises(MonitorError, subject="run"):
            again.measure_now()
        again.resume(2)
        again.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2]


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("probe", [None, tokens(99)], ids=["inline", "probe"])
@pytest.mark.parametrize(("stride", "every"), [(10, 10), (3, 1), (4, 10)])
def test_a_loop_may_count_by_any_stride(
    kind: str, probe: Tensor | None, stride: int, every: int, tmp_path: Path
) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given: dict[str, Any] = {"probe": probe, "optimizer": optimizer, "run": tmp_path}
    with Monitor(model, METRICS[kind], every, **given) as monitor:
        for step in range(stride, 10 * stride + 1, stride):
            optimizer.zero_grad()
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            monitor.step(step)
    due = [k for k in range(stride, 10 * stride + 1, stride) if k // every > (k - stride) // every]
    rows = table(tmp_path)
    assert rows.filter(metric="grad_mlp", layer=1)["step"].to_list() == due
    assert rows.filter(metric="grad_mlp")["value"].null_count() == 0
    states = rows.filter(metric="mu", layer=1)
    assert states["step"].to_list() == ([0, *due] if probe is not None else due)
    assert set(states["samples"]) == {4}  # of one step alone


def stepped(model: torch.nn.Module, monitor: Monitor, step: int) -> None:
    loss_of(model, tokens(step)).backward()
    monitor.step(step)


@pytest.mark.parametrize("kind", METRICS)
def test_training_batches_of_a_step_that_was_not_recorded_are_measured_at_the_next(kind: str, tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, METRICS[kind], 100, run=tmp_path) as monitor:
        for step in (1, 2, 150, 151, 152):  # a leap that nothing announced
            stepped(model, monitor, step)
    rows = table(tmp_path).filter(metric="mu", layer=1)
    assert rows["step"].to_list() == [151] and rows["samples"].to_list() == [4]


@pytest.mark.parametrize("kind", METRICS)
def test_measuring_now_off_schedule(kind: str, tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, METRICS[kind], 100, run=tmp_path / "inline") as monitor:
        for step in (1, 2):
            stepped(model, monitor, step)
        assert monitor.measure_now() is None and monitor.recording
        for step in (3, 4):
            stepped(model, monitor, step)
    assert table(tmp_path / "inline").filter(metric="mu", layer=1)["step"].to_list() == [3]
    with Monitor(model, METRICS[kind], 100, tokens(99), run=tmp_path / "probe") as monitor:
        stepped(model, monitor, 7)
        measurement = monitor.measure_now()
        assert measurement is not None and measurement.step == 7 and monitor.measure_now() is measurement
    assert table(tmp_path / "probe")["step"].unique().to_list() == [0, 7]


@pytest.mark.parametrize("back_to", [0, 4, 5])
def test_json_lines_are_those_of_the_run_after_going_back_in_one_process(back_to: int, tmp_path: Path) -> None:
    writer = JSONLines(tmp_path / "lines.jsonl")
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / "run", writers=[writer]) as monitor:
        for _ in range(7):
            monitor.step()
            if monitor.steps == 5:
                monitor.measure_now()
        monitor.resume(back_to)
        for _ in range(4):
            monitor.step()
    steps = [json.loads(line)["step"] for line in writer.path.read_text().splitlines()]
    assert steps == table(tmp_path / "run")["step"].unique().sort().to_list()
    assert len(steps) == len(set(steps)) and steps[0] == 0


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"model": "gpt2"}, "model"),
        ({"every": 0}, "every"),
        ({"every": 2.0}, "every"),
        ({"run": 3}, "run"),
        ({"step": -1}, "step"),
        ({"step": "3"}, "step"),
        ({"writers": ["tensorboard"]}, "writers"),
        ({"writers": "tensorboard"}, "writers"),
        ({"writers": [JSONLines]}, "writers"),
        ({"writers": JSONLines("lines.jsonl")}, "writers"),
        ({"alarms": [3]}, "alarms"),
        ({"alarms": 3}, "alarms"),
        ({"paths_every": 3}, "paths_every"),
    ],
)
def test_an_argument_of_a_wrong_type_is_one_sentence(options: dict[str, Any], subject: str, tmp_path: Path) -> None:
    given = {"model": encoder(), "metrics": "mu", "every": 2, "probe": tokens(1), "run": tmp_path, **options}
    with raises(MonitorError, subject=subject) as caught:
        Monitor(**given)
    assert len(str(caught.value).splitlines()) == 1


def test_a_step_to_resume_from_must_be_a_number(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", probe=tokens(1), run=tmp_path) as monitor:
        for step in (-1, 2.5, None):
            with raises(MonitorError, subject="step"):
                monitor.resume(step)  # type: ignore[arg-type]


def test_a_model_whose_only_child_is_called_module_is_measured_itself(tmp_path: Path) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = encoder()

        def forward(self, X: Tensor) -> Tensor:
            return self.module(2 * X)

    with Monitor(Doubled(), "mu", probe=tokens(1), run=tmp_path / "wrapped"):
        pass
    with Monitor(encoder(), "mu", probe=2 * tokens(1), run=tmp_path / "alone"):
        pass
    assert table(tmp_path / "wrapped").equals(table(tmp_path / "alone"))


@given(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_step_is_due_if_a_multiple_lies_between_it_and_the_last(every: int, strides: list[int]) -> None:
    schedule, last = Schedule(0), 0
    for stride in strides:
        recorded = schedule.may_cross(every)
        schedule.advance(last + stride)
        due = any(step % every == 0 for step in range(last + 1, last + stride + 1))
        assert schedule.crossed(every) is due
        if due and stride <= max([*schedule.strides][:-1], default=every):
            assert recorded
        last += stride
    assert schedule.step == sum(strides) and len(schedule.strides) <= STRIDES


@pytest.mark.parametrize(
    ("stride", "every", "due"),
    [(1, 10, [10, 20, 30, 40]), (10, 10, [10, 20, 30, 40]), (4, 10, [12, 20, 32, 40]), (20, 10, [20, 40])],
)
def test_every_due_step_of_a_steady_loop_is_recorded(stride: int, every: int, due: list[int]) -> None:
    schedule = Schedule(0)
    recorded, measured = [], []
    for step in range(stride, 41, stride):
        if schedule.may_cross(every):
            recorded.append(step)
        schedule.advance(step)
        if schedule.crossed(every):
            measured.append(step)
    assert measured == due and set(recorded) - {stride} <= set(due) <= set(recorded)


def test_a_counter_that_starts_on_a_multiple_is_due_there() -> None:
    assert Schedule(0).crossed(10) and Schedule(20).crossed(10) and not Schedule(21).crossed(10)


def test_steps_that_do_not_grow_are_refused() -> None:
    schedule = Schedule(3)
    with raises(MonitorError, subject="step"):
        schedule.advance(3)
    assert schedule.step == 3
