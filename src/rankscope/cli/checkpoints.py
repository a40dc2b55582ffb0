"""`rankscope checkpoints`: a training that nobody watched, measured from the checkpoints it left."""

import json
import re
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rankscope.cli import inputs
from rankscope.cli import options as opt
from rankscope.cli.follow import described, shown
from rankscope.cli.output import require_report
from rankscope.cli.show import Interruption, console, machine, say, say_report, steps
from rankscope.errors import FileError, MissingExtraError, RankscopeError, require
from rankscope.extras import counted, need
from rankscope.shipped import MORE_SNAPSHOTS, shipped_model, shipped_models

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.cli.show import Tell
    from rankscope.monitor import Measurement, RunWriter
    from rankscope.nets import Transformer
    from rankscope.trainings import TrainingRun

RULE = "checkpoint"  # The rule of the alarm for a checkpoint that could not be measured
LOGGED = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
"""What a Trainer logs, and the name of each in the table."""


class CheckpointRow(NamedTuple):
    """A folder or a file of weights, and the training step at which they were saved."""

    step: int
    folder: Path


@dataclass(frozen=True)
class CheckpointOptions:
    """Options that say how checkpoints are loaded, and what is measured of them."""

    tokenizer: Annotated[str | None, opt.option(opt.NETWORK, "PATH", "tokenizer", show_default="theirs, or DIR's")] = (
        None
    )
    config: Annotated[Path | None, opt.option(opt.NETWORK, "FOLDER", "weight_config")] = None
    device: opt.Device = "cpu"
    metrics: opt.Metrics = opt.DEFAULT_METRICS


def checkpoints(
    directory: Annotated[Path, opt.argument("DIR", "checkpoints")],
    options: CheckpointOptions = CheckpointOptions(),
    text: opt.TextOptions = opt.TextOptions(),
    output: Annotated[Path | None, opt.output_option("runs/DIR")] = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Measure the checkpoints of a training that nobody watched, as a Monitor would have.

    Hugging Face's [bold]checkpoint-N[/bold] folders, or files [bold].ckpt[/bold] and [bold].pt[/bold] of Lightning,
    nanoGPT and plain loops (with --config), are measured in the order of their steps, all on the same text; losses
    and learning rates are those that a Hugging Face trainer has logged. A checkpoint that cannot be loaded is
    reported, and the others are measured. The same command into the same folder measures only new checkpoints.
    """
    from rankscope.monitor import RunWriter
    from rankscope.report import write_report
    from rankscope.runs import Network, begun, key_of
    from rankscope.trainings import read_training

    metrics = inputs.MeasureTask.parse(options.metrics).metrics
    saved = checkpoints_in(directory)
    require_report("a report of checkpoints", "transformers")
    excerpts = inputs.read_inputs(text, str(directory), quiet=printing.silent)
    shipped = shipped_model(str(directory))
    name = shipped or directory.resolve().name
    output = Path("runs") / name if output is None else output
    more: dict[str, Any] = {} if options.config is None else {"config": str(options.config.resolve())}
    key = key_of(
        directory=shipped or str(directory.resolve()), metrics=metrics, tokens=text.max_length, samples=len(excerpts),
        excerpts=excerpts if isinstance(excerpts, list) else "images", tokenizer=options.tokenizer,
        **more,
    )  # fmt: skip
    manifest = begun(options.device).adding(
        key=key, command=inputs.command_line(), title=name, model=str(directory),
        networks=(Network(variant="transformer", arithmetic="deviation", metrics=tuple(metrics)),),
        **inputs.text_fields(text, excerpts),
    )  # fmt: skip
    require_same_work(output, key)
    with closing(RunWriter(output, manifest)) as run_writer:
        left = [checkpoint for checkpoint in saved if checkpoint.step not in measured_steps(run_writer)]
        if not printing.silent:
            done = len(saved) - len(left)
            say(f"{counted(len(saved), 'checkpoint')} in {directory}{f' ({done} measured before)' if done else ''}.")
        try:
            with steps(printing.silent, [1.0] * len(left)) as step:
                for checkpoint in left:
                    tell = step(checkpoint.folder.name)
                    write_measurement(
                        run_writer, measure_checkpoint(checkpoint, options, excerpts, text.max_length, tell)
                    )
        except KeyboardInterrupt as stop:
            done = len(measured_steps(run_writer))
            raise Interruption(
                f"after {done} of {len(saved)} checkpoints; the same command resumes from there"
            ) from stop
    result = read_training(output)
    if not result.steps:
        sentence = f"{directory} must hold a checkpoint that can be measured; none of {len(saved)} can"
        raise FileError(f"{sentence}: {result.alarms['sentence'][0]}", subject=str(directory))
    differ = metric_disagreement(result)
    if printing.as_json:
        return machine({**described(result, result.metrics[:1]), "disagreement": differ or None})
    console().print(shown(result, result.metrics[:1], printing.quiet))
    if differ:
        say("", differ)
    say_report(write_report([output], output / "report.html"), printing)


def metric_disagreement(run: "TrainingRun") -> str:
    """A sentence on two metrics that rank two checkpoints differently at the last layer; empty if none do."""
    from rankscope.profiles import disagreement

    grids = [grid for grid in map(run.grid, run.metrics) if grid.layers]
    return disagreement(
        {
            grid.metric: {f"checkpoint-{step}": log for step, log in grid.logs(max(grid.layers)).items()}
            for grid in grids
        }
    )


def checkpoints_in(directory: Path) -> list[CheckpointRow]:
    """The `checkpoint-N` folders of a training or of a shipped model in the order of N, or else a training's files of
    weights in the order of their steps; a folder without any is refused."""
    subject = str(directory)
    model = shipped_model(subject)
    if model is not None and "/" not in subject:
        snapshots = shipped_models()[model]
        if len(snapshots) == 1:
            need(f"a look at {model} along its training", MORE_SNAPSHOTS)
        return [CheckpointRow(step, folder) for step, folder in snapshots.items()]
    sentence = f"a folder of checkpoints must be a directory; there is none at {directory}"
    require(directory.is_dir(), sentence, FileError, subject)
    matches = {path: re.fullmatch(r"checkpoint-(\d{1,15})", path.name) for path in directory.iterdir()}
    saved = sorted(CheckpointRow(int(match[1]), path) for path, match in matches.items() if match and path.is_dir())
    saved = saved or weight_files_in(directory)
    sentence = (
        f"{directory} must hold folders named checkpoint-N, or files .ckpt or .pt; it holds none: give a trainer's "
        "output_dir"
    )
    require(saved, sentence, FileError, subject)
    for (step, folder), (following, _) in pairwise(saved):
        sentence = f"{directory} must hold one checkpoint of a step; {folder.name} has two"
        require(step != following, sentence, FileError, subject)
    return saved


def weight_files_in(directory: Path) -> list[CheckpointRow]:
    """The files of weights in a folder by their steps; one that only repeats the step of another, as Lightning's
    `last.ckpt`, is left out."""
    from rankscope.sources import ENDINGS, training_step

    rows: dict[int, Path] = {}
    paths = [path for path in directory.iterdir() if path.suffix in ENDINGS and path.is_file()]
    for path in sorted(paths, key=lambda path: (not re.search(r"\d", path.stem), path.name)):
        if (step := training_step(path)) is None:
            expected = "the name of a file of weights must have its step, as step=200.ckpt"
            raise FileError(f"{expected}; {path.name} has none, inside or in its name: rename it", subject=str(path))
        if step not in rows:
            rows[step] = path
        elif re.search(r"\d", path.stem):
            raise FileError(
                f"{directory} must hold one checkpoint of a step; {rows[step].name} and {path.name} are of step {step}",
                subject=str(directory),
            )
    return sorted(CheckpointRow(step, path) for step, path in rows.items())


def require_same_work(output: Path, key: dict[str, Any]) -> None:
    """Refuse to resume in a folder that holds other work."""
    from rankscope.runs import difference, read
    from rankscope.trainings import TRAINING_TABLE

    entry = read(output).entries.get(TRAINING_TABLE) if output.is_dir() else None
    if entry is None:
        return
    if entry.manifest.key is None:
        raise FileError(f"{output} holds a training that a Monitor has watched: give another", subject="output")
    if differing := difference(entry.manifest.key, key):
        raise FileError(
            f"{output} holds checkpoints that were measured otherwise, in {differing}: give another", subject="output"
        )


def measure_checkpoint(
    checkpoint: CheckpointRow, options: CheckpointOptions, texts: "list[str] | Tensor", tokens: int, tell: "Tell"
) -> "Measurement":
    """The measurement that a Monitor would have made at that step; if it fails, an alarm with the reason."""
    import polars as pl

    from rankscope.monitor import Alarm, Measurement
    from rankscope.profiles import measure
    from rankscope.trainings import TRAINING

    step = checkpoint.step
    try:
        net = checkpoint_network(checkpoint.folder, options.tokenizer, options.config).to(device=options.device)
        X, padding = net.encode(texts, tokens)
        profile = measure(net, X, padding, inputs.split_names("metrics", options.metrics), progress=tell)
    except MissingExtraError:
        raise  # no checkpoint can be loaded
    except (RankscopeError, OSError, RuntimeError, ValueError) as error:
        sentence = f"{checkpoint.folder.name} cannot be measured: {' '.join(str(error).split())}"
        alarm = Alarm(step, step, RULE, None, None, "warn", sentence)
        return Measurement(step, pl.DataFrame(schema=TRAINING), (alarm,))
    return Measurement(step, pl.concat([rows_of(step, profile.table), logged_rows(checkpoint)]))


def checkpoint_network(folder: Path, tokenizer: str | None, config: Path | None) -> "Transformer":
    """The network of a checkpoint, with the tokenizer asked for, its own, or that of the folder it lies in; of a file,
    that of the folder with its config."""
    if folder.is_file():
        from rankscope.sources import write_folder

        beside = [str(near) for near in (config, folder.parent) if near is not None and inputs.has_tokenizer(near)]
        with TemporaryDirectory(prefix="rankscope-") as written:
            as_folder = Path(written) / folder.name  # errors of `load` name the folder
            write_folder(folder, config, as_folder)
            return checkpoint_network(as_folder, tokenizer or next(iter(beside), None), None)
    from rankscope.sources import CheckpointLocation, load, locate
    from rankscope.sources.checkpoint import tokenizer as read_tokenizer

    if tokenizer is None and inputs.has_tokenizer(folder.parent) and not inputs.has_tokenizer(folder):
        tokenizer = str(folder.parent)
    if not tokenizer:
        inputs.require_tokenizer(str(folder), "give one with --tokenizer")
        return load(str(folder))
    # A folder that holds a tokenizer needs no weights.
    is_folder = Path(tokenizer).is_dir()
    location = CheckpointLocation(tokenizer, tokenizer, {}) if is_folder else locate(tokenizer, {})
    return load(str(folder), tokenizer=read_tokenizer(location))


def rows_of(step: int, profile: "pl.DataFrame") -> "pl.DataFrame":
    """The rows of a profile as a measurement has them: mean, deviation, minimum and maximum over samples."""
    import polars as pl

    from rankscope.trainings import TRAINING

    finite = pl.col("value").is_finite()
    good = pl.col("value").filter(finite)
    return (
        profile.group_by("layer", "head", "metric", maintain_order=True)
        .agg(
            good.mean(),
            pl.col("floor").filter(finite).mean(),
            spread=good.std(ddof=0),
            least=good.min(),
            most=good.max(),
            samples=good.len(),
            broken=(~finite).sum(),
        )
        .with_columns(step=pl.lit(step))
        .select(pl.col(name).cast(kind) for name, kind in TRAINING.items())
    )


def logged_rows(checkpoint: CheckpointRow) -> "pl.DataFrame":
    """Rows of the loss and learning rate that the trainer logged last, up to the checkpoint's step."""
    import polars as pl

    from rankscope.trainings import TRAINING

    values: dict[str, float] = {}
    # There may be no such file, or another trainer may have written it.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        state = json.loads((checkpoint.folder / "trainer_state.json").read_text(encoding="utf-8"))
        lines = [line for line in state["log_history"] if isinstance(line, dict) and type(line.get("step")) is int]
        for line in sorted(lines, key=lambda line: line["step"]):
            if line["step"] <= checkpoint.step:
                for name in (name for name in LOGGED if name in line):
                    with suppress(ArithmeticError, ValueError, TypeError):  # what was logged is no number
                        values[LOGGED[name]] = float(line[name])
    same = {"step": checkpoint.step, "spread": 0.0, "floor": 0.0, "samples": 1}
    rows = [
        {**same, "metric": name, **dict.fromkeys(("value", "least", "most"), x if isfinite(x) else None),
         "broken": int(not isfinite(x))}
        for name, x in values.items()
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=TRAINING)


def measured_steps(run_writer: "RunWriter") -> set[int]:
    """The steps whose checkpoints have numbers."""
    return set(run_writer.store.run.table("training")["step"].to_list())


def write_measurement(run_writer: "RunWriter", measurement: "Measurement") -> None:
    """Write a measurement at the place of its step.

    Tables grow by steps: rows of later steps are taken off and appended again, and rows of an earlier attempt
    at this step are dropped.
    """
    import polars as pl

    from rankscope.monitor import alarm_rows

    for journal, name, new in (
        (run_writer.alarms, "alarms", alarm_rows(measurement.alarms)),
        (run_writer.measurements, "training", measurement.rows),
    ):
        later = run_writer.store.run.table(name).filter(pl.col("step") > measurement.step)
        journal.cut(measurement.step - 1)
        for rows in (new, *(later.partition_by("step", maintain_order=True) if len(later) else [])):
            if len(rows):
                journal.append(int(rows["step"][0]), rows)
