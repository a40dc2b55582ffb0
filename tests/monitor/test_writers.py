"""What each tool reads back of the files that its writer wrote."""

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import polars as pl
import pytest
import torch
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2 as wire

import rankscope
from rankscope.errors import FileError, MissingExtraError
from rankscope.monitor import Measurement
from rankscope.monitor.monitor import Writer
from rankscope.monitor.writers import JSONLines, MLflow, TensorBoard, Trackio, WandB, scalar_name, scalars
from tests.live.measurements import NAMES, SENTENCE, measurement, value
from tests.monitor.loops import tasks
from tests.raising import raises

STEPS = (0, 10, 20)


def written(writer: Any, steps: tuple[int, ...] = STEPS) -> None:
    for step in steps:
        writer(measurement(step))
    writer.close()
    writer.close()  # twice is once


def test_numbers_have_names_that_group_and_nulls_have_none() -> None:
    assert scalars(measurement(10)) == {name: value(name, 10) for name in NAMES}


@pytest.mark.parametrize(
    ("metric", "layer", "head", "name"),
    [
        ("paths_2", None, None, "paths/length_02"), ("paths_12", None, None, "paths/length_12"),
        ("paths_bias", None, None, "monitor/paths_bias"), ("2", None, None, "monitor/2"),
        ("loss", None, None, "monitor/loss"), ("paths_2", 3, None, "paths_2/layer_03"),
        ("entropy", 11, 4, "entropy/layer_11/head_04"),
    ],
)  # fmt: skip
def test_a_number_is_named_by_its_metric_and_place(metric: str, layer: int | None, head: int | None, name: str) -> None:
    assert scalar_name(metric, layer, head) == name


def test_the_number_of_a_layer_is_the_mean_over_its_heads() -> None:
    rows = pl.DataFrame({"metric": ["entropy"] * 3, "layer": [1, 1, 2], "head": [0, 1, 0], "value": [1.0, 4.0, 3.0]})
    assert scalars(Measurement(0, rows), heads=False) == {"entropy/layer_01": 2.5, "entropy/layer_02": 3.0}
    assert len(scalars(Measurement(0, rows))) == 3


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "measurements.jsonl"
    written(JSONLines(path))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [
        {"step": step, **{n: value(n, step) for n in NAMES}, "alarms": [SENTENCE] * (step == 20)} for step in STEPS
    ]


def test_json_lines_of_a_run_that_was_killed_and_went_back(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    written(JSONLines(path))
    with path.open("a") as file:
        file.write('{"step": 30, "monitor/lo')
    written(JSONLines(path), (10, 20, 30))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 10, 20, 30]


NOTES = ["Buy milk.\nCall Ishmael.", '{"step": 30, "loss": 2.0}\n{"step": 40}\n', '{"step": 30, "loss": 2.0}', "x"]


@pytest.mark.parametrize("notes", NOTES)
def test_lines_of_json_are_not_written_over_something_else(tmp_path: Path, notes: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(notes)
    with raises(FileError, subject=str(path)):
        JSONLines(path)
    assert path.read_text() == notes
    writer = JSONLines(tmp_path / "mine.jsonl")
    writer.path.write_text(notes)  # after the writer was made
    with raises(FileError, subject=str(writer.path)):
        writer.resume(0)
    assert writer.path.read_text() == notes


def test_lines_of_somebody_else_among_lines_of_json_stay(tmp_path: Path) -> None:
    path, own = tmp_path / "lines.jsonl", '{"step": 30, "loss": 2.0}\n'
    written(JSONLines(path))
    with path.open("a") as file:
        file.write(own)
    JSONLines(path).resume(-1)
    assert path.read_text() == own


def test_tensorboard(tmp_path: Path) -> None:
    written(TensorBoard(tmp_path))
    written(TensorBoard(tmp_path / "heads", heads=True))
    events, by_head = (EventAccumulator(str(folder)).Reload() for folder in (tmp_path, tmp_path / "heads"))
    tags = {name: name.replace("/head_01", "") for name in NAMES}  # the mean over the only head
    assert sorted(events.Tags()["scalars"]) == sorted(tags.values())
    for name, tag in tags.items():
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(s, value(name, s)) for s in STEPS]
    section = "head_mu by head/layer_03/head_01"
    assert sorted(by_head.Tags()["scalars"]) == sorted([*tags.values(), section])
    assert [e.value for e in by_head.Scalars(section)] == [value(NAMES[-1], s) for s in STEPS]
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("alarms/collapse"))
    (text,) = events.Tensors(tag)
    assert text.step == 20 and text.tensor_proto.string_val == [SENTENCE.encode()]


def test_tensorboard_of_a_run_that_went_back(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    written(writer)
    written(writer, (10, 20, 30))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("monitor/loss")] == [0, 10, 20, 30]


def records(folder: Path) -> list[Any]:
    """Of an offline run's file, once it is whole: wandb's process goes on writing after `finish`."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(300):
        found = list(parsed(path.read_bytes()))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def parsed(data: bytes) -> Iterator[Any]:
    """A log of LevelDB's kind, of blocks of 32 KiB, after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wire.Record.FromString(record)  # type: ignore[attr-defined]
            record = b""


def history(folder: Path) -> list[dict[str, Any]]:
    items = [record.history.item for record in records(folder) if record.HasField("history")]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items]


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[dict[str, Any]]:
    silent = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    yield {"mode": "offline", "project": "here", "dir": str(tmp_path), "settings": silent}
    wandb.teardown()


def test_wandb(tmp_path: Path, offline: dict[str, Any]) -> None:
    written(WandB(**offline))
    assert wandb.run is None  # ours, and finished
    rows = history(tmp_path)
    assert [row["monitor/step"] for row in rows] == list(STEPS)
    for row in rows:
        assert {name: row[name] for name in NAMES} == {name: value(name, row["monitor/step"]) for name in NAMES}
    axes = {r.metric.name: r.metric.step_metric for r in records(tmp_path) if r.HasField("metric")}
    assert {name: axes[name] for name in NAMES} == dict.fromkeys(NAMES, "monitor/step")
    (alert,) = (record.alert for record in records(tmp_path) if record.HasField("alert"))
    assert (alert.title, alert.text) == ("collapse", SENTENCE)


def test_wandb_goes_into_the_run_that_is_open_and_does_not_fight_its_steps(
    tmp_path: Path, offline: dict[str, Any]
) -> None:
    with wandb.init(**offline) as own:
        writer = WandB()
        for step in range(0, 21, 5):
            own.log({"mine": step}, step=step)
            if step % 10 == 0:
                writer(measurement(step))
        writer.close()
        assert wandb.run is own  # still open
    rows = history(tmp_path)
    assert [row["mine"] for row in rows if "mine" in row] == [0, 5, 10, 15, 20]
    assert [row["monitor/step"] for row in rows if "monitor/step" in row] == list(STEPS)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    yield (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri("")


def test_mlflow(store: str) -> None:
    written(MLflow(experiment="collapse", name="first", uri=store))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("collapse")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.metrics.keys() == set(NAMES)
    for name in NAMES:
        found = client.get_metric_history(run.info.run_id, name)
        assert [(each.step, each.value) for each in found] == [(s, value(name, s)) for s in STEPS]
    assert run.data.tags["alarm/collapse/layer_03/step_000020"] == SENTENCE


def test_mlflow_goes_into_the_run_that_is_active(store: str) -> None:
    mlflow.set_tracking_uri(store)
    with mlflow.start_run() as own:
        written(MLflow())
        run = MlflowClient().get_run(own.info.run_id)
        assert run.info.status == "RUNNING" and run.data.metrics.keys() == set(NAMES)


def test_mlflow_takes_more_numbers_than_it_takes_at_once(store: str) -> None:
    rows = measurement(0).rows.head(1).join(pl.DataFrame({"number": range(1200)}), how="cross")
    rows = rows.with_columns(layer=pl.col("number"), metric=pl.lit("mu")).drop("number")
    writer = MLflow(uri=store)
    writer(Measurement(0, rows))
    writer.close()
    (run,) = MlflowClient(store).search_runs(["0"])
    assert len(run.data.metrics) == 1200


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="its bounds on pillow exclude ours: pip install trackio elsewhere")
    written(Trackio("here", name="first"))
    (path,) = tmp_path.glob("here*.db")
    with sqlite3.connect(path) as base:
        rows = base.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == list(STEPS)
    assert json.loads(rows[1][1])["monitor/loss"] == value("monitor/loss", 10)


@pytest.mark.parametrize(
    ("writer", "package"),
    [(lambda: TensorBoard("x"), "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow"), (Trackio, "trackio")],
    ids=["TensorBoard", "WandB", "MLflow", "Trackio"],
)
def test_a_package_that_is_not_installed_is_named(
    writer: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself takes for "cannot be imported"
    with pytest.raises(MissingExtraError, match=rf"needs {package}.*: pip install 'rankscope\[{package}\]'$"):
        writer()


def test_a_monitor_writes_to_all_of_them_and_closes_them(tmp_path: Path) -> None:
    writers: list[Writer] = [JSONLines(tmp_path / "measurements.jsonl"), TensorBoard(tmp_path / "events")]
    with rankscope.Monitor(
        tasks.model(), ["relative_mu", "head_mu"], 2, tasks.probe(), run=tmp_path / "run", writers=writers
    ) as monitor:
        for _ in range(4):
            monitor.step(loss=torch.tensor(0.5))
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    table = rankscope.read(tmp_path / "run").tables["training"].drop_nulls("value")
    assert sum(len(line) - 2 for line in lines) == len(table)  # less step and alarms
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert "head_mu/layer_02" in events.Tags()["scalars"]
    for line in lines[1:]:
        assert line["monitor/loss"] == 0.5
