"""Numbers of a training over its steps, from wherever they were logged: what `spikes.py` looks at.

| source                                | what it is                                                                 |
|---------------------------------------|----------------------------------------------------------------------------|
| a run folder                          | what a `Monitor` or `rankscope checkpoints` wrote                          |
| a folder with TensorBoard's files     | every scalar, under its tag; of several folders below it, under FOLDER/TAG |
| CSV, Parquet, JSON lines: a wide table| a column of steps, and one for each number (W&B's export, a trainer's log) |
| the same: a long table                | step · metric · value, and layer · head where there are some               |
| TensorBoard's CSV of one number       | Wall time · Step · Value, named by its file                                |

Steps are whole numbers, and rows without one are passed over. Of several values at one step the last one counts, as of
a training that went back to a checkpoint. Words for a number (NaN, Infinity, -inf) are numbers; words for none (None,
null, NA) are none.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from rankscope.errors import FileError, require
from rankscope.extras import need
from rankscope.trainings.spikes import Signal, Spikes, find_spikes, order_of_events
from rankscope.trainings.training import TrainingTables, read_tables

STEP = ("step", "_step", "global_step", "global step", "iteration", "iter", "trainer/global_step",
        "train/global_step")  # fmt: skip
LOSS = ("loss", "train/loss", "train_loss", "training_loss", "training loss", "train/ce_loss", "loss/train", "lm loss")
TIMES = {"wall time", "wall_time", "_timestamp", "timestamp", "relative time (process)", "_runtime", "epoch"}
NONE = ("", "none", "null", "na", "n/a", "<na>")  # Words of a table that stand for no number
MOST_STEP = 2.0**53  # Above it, a float does not count every whole number


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
            twice = f"{signal.name} is in {source} and in another, or there twice"
            require(key not in signals, f"each number must come from one source; {twice}", FileError, str(source))
            signals[key] = signal
    return list(signals.values())


def run_signals(training: TrainingTables) -> list[Signal]:
    """The numbers of a training run over its steps, one signal for each metric, layer and head.

    Of the loss, the largest since the last measurement counts, so that no spike is averaged away, and of largest logits
    the largest of all samples; a number that was not finite in some sample is none.
    """
    return _of_run(training.table)


def run_loss(training: TrainingTables) -> Signal | None:
    """The loss of a training run; None if it has none."""
    rows = training.table.filter(pl.col("layer").is_null())
    rows = rows.filter(pl.col("metric").str.to_lowercase().is_in(LOSS))
    return split_loss(_of_run(rows))[0] if rows.height else None


def run_events(training: TrainingTables) -> Spikes | None:
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
        return run_signals(read_tables(source, TrainingTables))
    sentence = f"a run folder, or a table of numbers by step, must be at {source}; nothing is"
    require(source.is_file(), sentence, FileError, str(source))
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

    signals = []
    event_folders = sorted({path.parent for path in folder.rglob("events.out.tfevents*")})
    for event_folder in event_folders:
        events = EventAccumulator(str(event_folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        below = len(event_folders) > 1 and event_folder != folder
        inside = f"{event_folder.relative_to(folder).as_posix()}/" if below else ""
        for tag in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(tag)}
            steps = sorted(values)
            numbers = np.array([values[step] for step in steps], dtype=float)
            signals.append(Signal(f"{inside}{tag}", np.array(steps), numbers))
    return signals


def _opened(path: Path) -> pl.DataFrame:
    """The table in a file, by the end of its name."""
    readers = {
        ".csv": lambda: pl.read_csv(path, infer_schema=False, glob=False),
        ".tsv": lambda: pl.read_csv(path, separator="\t", infer_schema=False, glob=False),
        ".parquet": lambda: pl.read_parquet(path, glob=False),
        ".jsonl": lambda: _json_lines(path),
    }
    sentence = f"a table of numbers must be one of {', '.join(readers)}; got {path.name}"
    require(path.suffix.lower() in readers, sentence, FileError, str(path))
    try:
        return readers[path.suffix.lower()]()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        sentence = f"{path} must be a table of numbers by step; it cannot be read: {reason}"
        raise FileError(sentence, subject=str(path)) from error


def _table(table: pl.DataFrame, path: Path) -> list[Signal]:
    """The numbers of a table, wide or long."""
    names = {name.lower(): name for name in table.columns}
    step = next((names[name] for name in STEP if name in names), None)
    if step is None:
        raise FileError(f"{path} must have a column of steps ({', '.join(STEP[:3])}); it has none", subject=str(path))
    steps = _whole(table, step, path)
    if {"metric", "value"} <= names.keys():
        wholes = [_whole(table, names[name], path) for name in ("layer", "head") if name in names]
        values = _numbers(table, names["value"], path)
        if values is None:
            raise FileError(f"{path} must have numbers in its column {names['value']}; it has none", subject=str(path))
        metrics = table[names["metric"]].cast(pl.String).alias("metric")
        rows = pl.DataFrame([steps.alias("step"), metrics, values.alias("value"), *wholes])
        rows = rows.with_columns(pl.lit(None, pl.Int64).alias(name) for name in ("layer", "head") if name not in names)
        rows = rows.rename({series.name: series.name.lower() for series in wholes})
        return _long(rows.drop_nulls(["step", "metric"]))
    signals = []
    for name in table.columns:
        if name == step or name.lower() in TIMES or name.endswith(("__MIN", "__MAX")):
            continue
        if (values := _numbers(table, name, path)) is not None:
            label = path.stem if name.lower() == "value" else name.rpartition(" - ")[2]  # W&B: "run name - number"
            rows = pl.DataFrame({"step": steps, "value": values, "metric": [label] * len(steps)}).drop_nulls()
            signals += _long(rows.with_columns(layer=pl.lit(None, pl.Int64), head=pl.lit(None, pl.Int64)))
    return signals


def _json_lines(path: Path) -> pl.DataFrame:
    """The objects of a file of JSON lines as a table of texts; half a last line is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, object]] = []
    for line_number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = {} if line_number == len(lines) else None
        if not isinstance(row, dict):
            raise ValueError(f"line {line_number} is no JSON object: remove it")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    texts = {name: [None if row.get(name) is None else str(row[name]) for row in rows] for name in names}
    return pl.DataFrame(texts, schema=dict.fromkeys(names, pl.String))


def _numbers(table: pl.DataFrame, name: str, path: Path) -> pl.Series | None:
    """A column as numbers, null where there is none; None of a column of something else, such as names.

    Raises:
        FileError: Most of its entries are numbers and some are words.
    """
    column = table[name]
    if column.dtype.is_numeric():
        return column.cast(pl.Float64)
    if column.dtype != pl.String:
        return None
    words = column.str.strip_chars()
    numbers = words.cast(pl.Float64, strict=False)
    wrong = words.filter(numbers.is_null() & ~words.str.to_lowercase().is_in(NONE))  # one that is null is not wrong
    count = len(numbers) - numbers.null_count()
    if not count or len(wrong) > count:
        return None
    if len(wrong):
        advice = "mend it, or take the column out"
        sentence = f"{path} must have numbers in its column {name}; got {wrong[0][:40]!r}: {advice}"
        raise FileError(sentence, subject=str(path))
    return numbers


def _whole(table: pl.DataFrame, name: str, path: Path) -> pl.Series:
    """A column of whole numbers, null where there is none (a NaN is none, too)."""
    numbers = _numbers(table, name, path)
    known = table[name].drop_nulls() if numbers is None else numbers.fill_nan(None)
    wrong = known if numbers is None else known.filter((known != known.round()) | (known.abs() >= MOST_STEP))
    if len(wrong):
        advice = ": give one that counts steps, not epochs" if name.lower() in STEP else ""
        sentence = f"{path} must have whole numbers in its column {name}; got {str(wrong[0])[:40]}{advice}"
        raise FileError(sentence, subject=str(path))
    return pl.Series(name, [None] * len(table), pl.Int64) if numbers is None else known.cast(pl.Int64)


def _long(rows: pl.DataFrame) -> list[Signal]:
    """Signals of step · layer · head · metric · value; one that is null was not finite."""
    signals = []
    keys = ["metric", "layer", "head"]
    for (name, layer, head), mine in rows.group_by(keys, maintain_order=True):
        mine = mine.unique("step", keep="last").sort("step")
        values = mine["value"].fill_null(float("nan")).to_numpy()
        signals.append(Signal(str(name), mine["step"].to_numpy(), values, layer, head))
    return signals
