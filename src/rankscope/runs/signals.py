"""Numbers of a training over its steps, from wherever they were logged: what `spikes.py` looks at.

| source                                | what it is                                                                 |
|---------------------------------------|----------------------------------------------------------------------------|
| a run folder                          | what a `Monitor` or `rankscope checkpoints` wrote                          |
| a folder with TensorBoard's files     | every scalar, under its tag                                                |
| CSV, Parquet, JSON lines: a wide table| a column of steps, and one for each number (W&B's export, a trainer's log) |
| the same: a long table                | step · metric · value, and layer · head where there are some               |
| TensorBoard's CSV of one number       | Wall time · Step · Value, named by its file                                |
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from rankscope.errors import FileError
from rankscope.extras import need
from rankscope.runs.spikes import Signal, SpikeReport, find_spikes, order_of_events
from rankscope.runs.training import TrainingRun, read_training

STEP = ("step", "_step", "global_step", "global step", "iteration", "iter", "trainer/global_step")
LOSS = ("loss", "train/loss", "train_loss", "training_loss", "training loss", "train/ce_loss", "loss/train", "lm loss")
TIMES = {"wall time", "wall_time", "_timestamp", "timestamp", "relative time (process)", "_runtime", "epoch"}


def read_signals(sources: Sequence[str | Path]) -> list[Signal]:
    """Every number of a training, from one source or several of the module's table.

    Args:
        sources: Folders and files, each with numbers of the same training.

    Raises:
        FileError: A source is not there, or is nothing of the table.
        MissingExtraError: TensorBoard's own files are to be read, and it is not installed.
    """
    signals: dict[tuple[str, int | None, int | None], Signal] = {}
    for source in map(Path, sources):
        for signal in _read(source):
            key = (signal.name, signal.layer, signal.head)
            if key in signals:
                sentence = f"each number must come from one source; {signal.name} is in {source} and in another"
                raise FileError(sentence, subject=str(source))
            signals[key] = signal
    return list(signals.values())


def run_signals(training: TrainingRun) -> list[Signal]:
    """The numbers of a training run over its steps, one signal for each metric, layer and head.

    Of the loss, the largest since the last measurement counts, so that no spike is averaged away, and of largest logits
    the largest of all samples; a number that was not finite in some sample is none.
    """
    return _of_run(training.table)


def run_loss(training: TrainingRun) -> Signal | None:
    """The loss of a training run; None if it has none."""
    rows = training.table.filter(pl.col("layer").is_null())
    rows = rows.filter(pl.col("metric").str.to_lowercase().is_in(LOSS))
    return split_loss(_of_run(rows))[0] if rows.height else None


def run_events(training: TrainingRun) -> SpikeReport | None:
    """The loss spikes of a training run and what came before each; None if the run has no loss.

    Of 5,000 measurements, a run without a spike takes some hundredths of a second, one with spikes and 500 signals some
    seconds.
    """
    loss = run_loss(training)
    if loss is None:
        return None
    signals = split_loss(run_signals(training))[1] if find_spikes(loss) else []
    return order_of_events(loss, signals)


def split_loss(signals: Iterable[Signal], name: str | None = None) -> tuple[Signal, list[Signal]]:
    """The loss among signals, and the others.

    Args:
        signals: All of them.
        name: What the loss is called; if left out, the first of the usual names that is there.

    Raises:
        FileError: None is called so.
    """
    signals = list(signals)
    for wanted in LOSS if name is None else (name.lower(),):
        for signal in signals:
            if signal.name.lower() == wanted and signal.layer is None:
                return signal, [candidate for candidate in signals if candidate is not signal]
    names = ", ".join(sorted({signal.name for signal in signals if signal.layer is None})[:12]) or "none"
    sentence = f"the loss must be one of the numbers, {names}; got {name or 'none of the usual names'}: give --loss"
    raise FileError(sentence, subject="loss")


def _read(source: Path) -> list[Signal]:
    """The numbers of one source."""
    if source.is_dir():
        if any(source.rglob("events.out.tfevents*")):
            return _tensorboard(source)
        return run_signals(read_training(source))
    if not source.is_file():
        raise FileError(
            f"a run folder, or a table of numbers by step, must be at {source}; nothing is", subject=str(source)
        )
    return _table(_opened(source), source)


def _of_run(rows: pl.DataFrame) -> list[Signal]:
    """Signals of rows of the table `training`; `run_signals` says which of their numbers counts."""
    largest = pl.col("metric").str.to_lowercase().is_in(LOSS) | pl.col("metric").str.contains("^largest_logit(/|$)")
    value = pl.when(pl.col("broken") > 0).then(None).when(largest).then("most").otherwise("value")
    return _long(rows.select("step", "layer", "head", "metric", value.alias("value")))


def _tensorboard(folder: Path) -> list[Signal]:
    """Every scalar of a folder of TensorBoard, under its tag."""
    need("reading TensorBoard's files", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            tags.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return [_signal(tag, [*sorted(values)], [values[step] for step in sorted(values)]) for tag, values in tags.items()]


def _opened(path: Path) -> pl.DataFrame:
    """The table in a file, by the end of its name."""
    readers = {
        ".csv": lambda: pl.read_csv(path, infer_schema_length=None),
        ".tsv": lambda: pl.read_csv(path, separator="\t", infer_schema_length=None),
        ".parquet": lambda: pl.read_parquet(path),
        ".jsonl": lambda: pl.read_ndjson(path, infer_schema_length=None),
    }
    if path.suffix.lower() not in readers:
        kinds = ", ".join(readers)
        raise FileError(f"a table of numbers must be one of {kinds}; got {path.name}", subject=str(path))
    try:
        return readers[path.suffix.lower()]()
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        came = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(
            f"{path} must be a table of numbers by step; it cannot be read: {came}", subject=str(path)
        ) from error


def _table(table: pl.DataFrame, path: Path) -> list[Signal]:
    """The numbers of a table, wide or long."""
    names = {name.lower(): name for name in table.columns}
    step = next((names[name] for name in STEP if name in names), None)
    if step is None:
        raise FileError(f"{path} must have a column of steps ({', '.join(STEP[:3])}); it has none", subject=str(path))
    table = table.filter(pl.col(step).is_not_null()).with_columns(pl.col(step).cast(pl.Float64).cast(pl.Int64))
    if {"metric", "value"} <= names.keys():
        optional = [names.get(name) for name in ("layer", "head")]
        columns = [pl.lit(None, pl.Int64) if name is None else pl.col(name).cast(pl.Int64) for name in optional]
        chosen = [pl.col(step).alias("step"), columns[0].alias("layer"), columns[1].alias("head")]
        metric, value = pl.col(names["metric"]).alias("metric"), pl.col(names["value"]).cast(pl.Float64).alias("value")
        return _long(table.select(*chosen, metric, value))
    signals = []
    for name in table.columns:
        is_number = table[name].dtype.is_numeric() and name != step and name.lower() not in TIMES
        if is_number and not name.endswith(("__MIN", "__MAX")):
            rows = table.select(pl.col(step).alias("step"), pl.col(name).cast(pl.Float64).alias("value"))
            rows = rows.drop_nulls().group_by("step").agg(pl.col("value").mean()).sort("step")
            label = path.stem if name.lower() == "value" else name.rpartition(" - ")[2]  # W&B: "run name - number"
            if rows.height:
                signals.append(_signal(label, rows["step"].to_list(), rows["value"].to_list()))
    return signals


def _long(rows: pl.DataFrame) -> list[Signal]:
    """Signals of step · layer · head · metric · value; one that is null was not finite."""
    signals = []
    keys = ["metric", "layer", "head"]
    for (name, layer, head), mine in rows.group_by(keys, maintain_order=True):
        mine = mine.sort("step")
        values = mine["value"].fill_null(float("nan")).to_numpy()
        signals.append(Signal(str(name), mine["step"].to_numpy(), values, layer, head))
    return signals


def _signal(name: str, steps: Sequence[int], values: Sequence[float]) -> Signal:
    return Signal(name, np.array(steps), np.array(values, dtype=float))
