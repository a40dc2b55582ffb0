"""Writers that copy each measurement of a `Monitor` to another tool, beside the run folder.

`Monitor(writers=[...])` calls every writer, any function of a `Measurement`, with every one, after the run folder has
it and on the first process only. If it has a method `resume(step)`, the monitor calls that when a training goes back to
`step`, so that later steps can be dropped; if it has a method `close()`, when the monitor is closed. The writers below
open their file or run at the first measurement. All but `JSONLines` need a package of their own.

    from rankscope.monitor.writers import JSONLines, TensorBoard
    Monitor(model, probe=batch, writers=[JSONLines("mine.jsonl"), TensorBoard("events")])
"""

import json
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rankscope.errors import FileError
from rankscope.extras import need
from rankscope.files import append_whole, atomic
from rankscope.monitor.measurement import Measurement
from rankscope.trainings import PATHS

__all__ = ["JSONLines", "MLflow", "TensorBoard", "Trackio", "WandB"]

WANDB_STEP = "monitor/step"  # our axis in wandb, whose own axis counts calls of `log` by anybody
MLFLOW_BATCH = 1000  # the most metrics that MLflow takes in one call


class JSONLines:
    """Writes a line of JSON for each measurement: the step, every number by name, the alarms' sentences.

    Args:
        path: The file; folders on the way are made. One that this writer began is continued.

    Raises:
        FileError: The file begins with something else.

    >>> import tempfile, polars as pl
    >>> from rankscope.trainings.training import TRAINING
    >>> writer = JSONLines(Path(tempfile.mkdtemp()) / "measurements.jsonl")
    >>> rows = pl.DataFrame([{"step": 100, "metric": "loss", "value": 0.5}], schema=TRAINING)
    >>> writer(Measurement(100, rows))
    >>> writer.path.read_text()
    '{"step": 100, "monitor/loss": 0.5, "alarms": []}\\n'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._size: int | None = None  # bytes of complete lines; None before the first measurement
        self._earlier()

    def __call__(self, measurement: Measurement) -> None:
        """Append one line. Before the first one, drop the lines that an earlier run left of later steps."""
        if self._size is None:
            self.resume(measurement.step - 1)
        alarms = [alarm.sentence for alarm in measurement.alarms]
        line = {"step": measurement.step, **scalars(measurement), "alarms": alarms}
        self._size = append_whole(self.path, self._size or 0, json.dumps(line) + "\n")

    def resume(self, step: int) -> None:
        """Drop the measurements of steps after `step`, and the incomplete last line of a run that was killed. Lines
        that this writer did not write stay."""
        kept = b"".join(line for line in self._earlier() if (of := _step_of(line)) is None or of <= step)
        with atomic(self.path) as temporary:
            temporary.write_bytes(kept)
        self._size = len(kept)

    def _earlier(self) -> list[bytes]:
        """The complete lines of the file; raises if it is not this writer's, before anything in it is lost."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        if lines and _step_of(lines[0]) is None and not (len(lines) == 1 and _is_begun(lines[0])):
            sentence = f"{self.path} must be a new file, or one that JSONLines began; it holds something else"
            raise FileError(f"{sentence}: give another", subject=str(self.path))
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def close(self) -> None:
        """End the file; nothing is kept open between measurements."""
        self._size = None


class TensorBoard:
    """Writes event files: a scalar for each number, of heads the mean; alarms as text. A training that goes back purges
    later steps.

    Args:
        folder: Where the event files go; `tensorboard --logdir folder` shows them while they are written.
        heads: Whether to write the numbers of single heads as well, in a section of their own for each metric.
    """

    def __init__(self, folder: str | Path, heads: bool = False) -> None:
        self.folder, self.heads = Path(folder), heads
        self._writer: Any = None
        _imported("tensorboard")

    def __call__(self, measurement: Measurement) -> None:
        """Write the numbers and alarms of one measurement. The first opens an event file, which hides what an earlier
        run wrote from this step on."""
        if self._writer is None:
            self._open(measurement.step)
        numbers = scalars(measurement, heads=False)
        by_head = {name: value for name, value in scalars(measurement).items() if self.heads and "/head_" in name}
        numbers |= {name.replace("/", " by head/", 1): value for name, value in by_head.items()}
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, measurement.step)
        for alarm in measurement.alarms:
            self._writer.add_text(f"alarms/{alarm.rule}", alarm.sentence, measurement.step)
        self._writer.flush()

    def resume(self, step: int) -> None:
        """Go on in a new event file, which hides what was written of steps after `step`."""
        if self._writer is not None:
            self.close()
            self._open(step + 1)

    def close(self) -> None:
        """Close the event file, if one is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> None:
        tensorboard = _imported("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(self.folder), purge_step=step)


class _ToolRun:
    """The base of writers to a run of another tool; `_finish` ends a run that the writer began itself."""

    _run: Any = None
    _finish: Callable[[], object] | None = None

    def close(self) -> None:
        """Finish the run if this writer began it."""
        if self._finish is not None:
            self._finish()
        self._run = self._finish = None


class WandB(_ToolRun):
    """Logs to a run of Weights & Biases, over the axis `monitor/step`; alarms are its alerts. A run that this
    writer began is finished with the monitor.

    Args:
        run: The run to log to; by default the open one (`wandb.run`), or else a new one.
        **init: What `wandb.init` takes, for a new run.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self.given_run, self.init = run, init
        _imported("wandb")

    def __call__(self, measurement: Measurement) -> None:
        """Log the numbers of one measurement, and send an alert for each alarm."""
        wandb = _imported("wandb")
        if self._run is None:
            self._run = wandb.run if self.given_run is None else self.given_run
            if self._run is None:
                self._run = wandb.init(**self.init)
                self._finish = self._run.finish
            self._run.define_metric(WANDB_STEP, hidden=True)
            self._defined: set[str] = set()
        numbers = scalars(measurement)
        for name in numbers.keys() - self._defined:
            self._run.define_metric(name, step_metric=WANDB_STEP)
        self._defined |= numbers.keys()
        self._run.log({WANDB_STEP: measurement.step, **numbers})
        for alarm in measurement.alarms:
            self._run.alert(title=alarm.rule, text=alarm.sentence, level=wandb.AlertLevel.WARN)


class MLflow(_ToolRun):
    """Logs to a run of MLflow; alarms are its tags, such as `alarm/tokens collapse/layer_03/step_000100`. A
    run that this writer began is ended with the monitor.

    Args:
        run_id: The run to log to; by default the active one, or else a new one.
        experiment: The experiment of a new run.
        name: The name of a new run.
        uri: Where MLflow keeps runs; by default MLflow's own setting.
    """

    def __init__(
        self, run_id: str | None = None, *, experiment: str = "Default", name: str | None = None, uri: str | None = None
    ) -> None:
        self.given_id, self.experiment, self.name, self.uri = run_id, experiment, name, uri
        _imported("mlflow")

    def __call__(self, measurement: Measurement) -> None:
        """Log the numbers of one measurement, and set a tag for each alarm."""
        if self._run is None:
            self._open()
        metric = _imported("mlflow.entities").Metric
        now = int(time.time() * 1000)
        numbers = [metric(name, value, now, measurement.step) for name, value in scalars(measurement).items()]
        for start in range(0, len(numbers), MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=numbers[start : start + MLFLOW_BATCH])
        for alarm in measurement.alarms:
            where = [] if alarm.layer is None else [f"layer_{alarm.layer:02}"]
            where += [] if alarm.head is None else [f"head_{alarm.head:02}"]
            tag = "/".join(["alarm", alarm.rule, *where, f"step_{measurement.step:06}"])
            self._client.set_tag(self._run, tag, alarm.sentence)

    def _open(self) -> None:
        mlflow = _imported("mlflow")
        self._client: Any = mlflow.MlflowClient(self.uri)
        active = mlflow.active_run()
        if self.given_id is not None or active is not None:
            self._run = active.info.run_id if self.given_id is None else self.given_id
            return
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        self._run = str(self._client.create_run(experiment, run_name=self.name).info.run_id)
        self._finish = partial(self._client.set_terminated, self._run)


class Trackio(_ToolRun):
    """Logs to a run of Trackio; alarms are its alerts. A run that this writer began is finished with the monitor.

    Args:
        project: The project of a new run, if none is open.
        **init: What else `trackio.init` takes, for a new run.
    """

    def __init__(self, project: str = "rankscope", **init: Any) -> None:
        self.project, self.init = project, init
        _imported("trackio")

    def __call__(self, measurement: Measurement) -> None:
        """Log the numbers of one measurement, and send an alert for each alarm."""
        if self._run is None:
            self._run = _imported("trackio.context_vars").current_run.get()
        if self._run is None:
            self._run = _imported("trackio").init(self.project, **self.init)
            self._finish = _imported("trackio").finish
        self._run.log(scalars(measurement), step=measurement.step)
        for alarm in measurement.alarms:
            self._run.alert(title=alarm.rule, text=alarm.sentence, step=measurement.step)


def scalars(measurement: Measurement, heads: bool = True) -> dict[str, float]:
    """Every finite number of a measurement by a name whose first part is what pages group by.

    relative_mu/layer_03    head_mu/layer_03/head_02    paths/length_02    monitor/loss

    Args:
        measurement: The measurement.
        heads: Whether to give the number of each head; without, the mean over heads stands as `head_mu/layer_03`.
    """
    numbers: dict[str, list[float]] = {}
    for metric, layer, head, value in measurement.rows.select("metric", "layer", "head", "value").iter_rows():
        if value is not None:
            numbers.setdefault(scalar_name(metric, layer, head if heads else None), []).append(value)
    return {name: sum(values) / len(values) for name, values in numbers.items()}


def scalar_name(metric: str, layer: int | None, head: int | None) -> str:
    """The name of one number, padded with zeros so that names sort as layers do.

    >>> scalar_name("mu", 3, None), scalar_name("paths_2", None, None), scalar_name("loss", None, None)
    ('mu/layer_03', 'paths/length_02', 'monitor/loss')
    """
    length = metric.removeprefix(PATHS)
    if layer is None and length != metric and length.isdecimal():
        return f"{PATHS[:-1]}/length_{int(length):02}"
    if layer is None:  # not `train/`: loops write a `train/loss` of their own there
        return f"monitor/{metric}"
    return f"{metric}/layer_{layer:02}" + ("" if head is None else f"/head_{head:02}")


def _step_of(line: bytes) -> int | None:
    """The step of a line that `JSONLines` wrote; None of another."""
    try:
        content = json.loads(line)
        return int(content["step"]) if isinstance(content["alarms"], list) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _is_begun(line: bytes) -> bool:
    """True of the beginning of a line that `JSONLines` was killed in."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b'{"step": ') or b'{"step": '.startswith(line)
    return False


def _imported(module: str) -> Any:
    """An optional module; raises a sentence with the line that installs its package."""
    need("this writer", module.partition(".")[0])
    return import_module(module)
