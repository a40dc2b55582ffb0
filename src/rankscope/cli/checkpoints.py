"""`rankscope checkpoints`: a training that nobody watched, measured from the checkpoints it left."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rankscope.cli import options as opt
from rankscope.cli.inputs import described, excerpts_of
from rankscope.errors import FileError, MissingExtraError, RankscopeError

if TYPE_CHECKING:
    import polars as pl

    from rankscope.live.monitor import Measurement
    from rankscope.live.monitor.measurement import RunWriter
    from rankscope.runs.training import TrainingRun

RULE = "checkpoint"
"""Under which the alarms say that one could not be measured."""
LOGGED = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
"""What a Trainer logs, and what the table calls it."""


class Checkpoint(NamedTuple):
    """A folder of weights, and the step at which they were."""

    step: int
    folder: Path


def checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with checkpoint-N folders.")],
    tokenizer: Annotated[
        str | None,
        opt.option(opt.TEXT, "PATH", "Where checkpoints have none.", show_default="theirs, or DIR's"),
    ] = None,
    device: opt.Device = "cpu",
    text: opt.Text = None,
    split: opt.Split = "auto",
    field: opt.Field = "text",
    samples: opt.Samples = 4,
    tokens: opt.Tokens = 128,
    metrics: opt.Metrics = opt.DEFAULT_METRICS,
    output: Annotated[
        Path | None, opt.option(opt.RESULT, "FOLDER", "output", (), "-o", "--output", show_default="runs/DIR")
    ] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure the checkpoints of a training that nobody watched, as a Monitor would have.

    Hugging Face's [bold]checkpoint-N[/bold] folders are measured in the order of their steps, all on the same
    text; losses and learning rates are those that the trainer has logged. One that cannot be loaded is said,
    and the others are measured. The same command into the same folder measures only what came since.
    """
    from rankscope.cli.exits import Stopped
    from rankscope.cli.follow import described as told
    from rankscope.cli.follow import shown
    from rankscope.cli.measure import checked, command
    from rankscope.cli.output import require_report
    from rankscope.cli.show import console, machine, say, say_where, steps
    from rankscope.live.monitor.measurement import RunWriter
    from rankscope.report import write_report
    from rankscope.runs import Network
    from rankscope.runs.key import key_of
    from rankscope.runs.manifest import begun
    from rankscope.runs.training import read_training

    _, numbers, _ = checked("transformer", metrics, "deviation")
    found = checkpoints_in(directory)
    require_report("a report of checkpoints", "transformers")
    read = excerpts_of(text, split, field, samples, tokens)
    output = Path("runs") / directory.resolve().name if output is None else output
    key = key_of(
        directory=str(directory.resolve()), metrics=numbers, tokens=tokens, samples=len(read),
        excerpts=read, tokenizer=tokenizer,
    )  # fmt: skip
    manifest = begun(device).adding(
        key=key, command=command(), title=directory.resolve().name, model=str(directory),
        networks=(Network(variant="transformer", arithmetic="deviation", metrics=tuple(numbers)),),
        **described(text, split, field, read, tokens),
    )  # fmt: skip
    refuse_other(output, key)
    run_writer = RunWriter(output, manifest)
    try:
        left = [each for each in found if each.step not in measured(run_writer)]
        if not (quiet or as_json):
            done = len(found) - len(left)
            before = f" ({done} measured before)" if done else ""
            say(f"{len(found)} checkpoints in {directory}{before}.")
        try:
            with steps(quiet or as_json, [1.0] * len(left)) as step:
                for each in left:
                    tell = step(each.folder.name)
                    measurement = measurement_of(
                        each, directory, tokenizer, device, read, tokens, numbers, tell
                    )
                    write(run_writer, measurement)
        except KeyboardInterrupt as stop:
            number = len(measured(run_writer))
            raise Stopped(
                f"after {number} of {len(found)} checkpoints; the same command goes on from there"
            ) from stop
    finally:
        run_writer.close()
    result = read_training(output)
    if as_json:
        machine({**told(result, result.metrics[:1]), "disagreement": differently(result) or None})
        return
    console().print(shown(result, result.metrics[:1], quiet))
    differ = differently(result)
    if differ:
        say("", differ)
    written = write_report([output], output / "report.html")
    if not quiet:
        say("")
        say_where("Report", written)


def differently(found: "TrainingRun") -> str:
    """At the last layer: two metrics that rank two checkpoints differently."""
    from rankscope.profiles.verdict import disagreement

    grids = [grid for grid in map(found.grid, found.metrics) if grid.layers]
    return disagreement({
        grid.metric: {f"checkpoint-{step}": log for step, log in grid.logs(max(grid.layers)).items()}
        for grid in grids
    })  # fmt: skip


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """The `checkpoint-N` folders, in the order of N; a sentence where there is none."""
    if not directory.is_dir():
        raise FileError(f"checkpoints are read from the folder of a training; there is none at {directory}")
    named = {path: re.fullmatch(r"checkpoint-(\d{1,15})", path.name) for path in directory.iterdir()}
    found = [Checkpoint(int(name[1]), path) for path, name in named.items() if name and path.is_dir()]
    if not found:
        raise FileError(
            f"{directory} must hold folders named checkpoint-N, as transformers' Trainer writes them; it "
            "holds none: give the trainer's output_dir"
        )
    steps = [each.step for each in found]
    twice = next((each for each in sorted(found) if steps.count(each.step) > 1), None)
    if twice is not None:
        raise FileError(f"{directory} must hold one checkpoint of a step; {twice.folder.name} has another")
    return sorted(found)


def refuse_other(output: Path, key: dict[str, Any]) -> None:
    """A folder that holds other work is not gone on with."""
    from rankscope.runs import read
    from rankscope.runs.key import difference
    from rankscope.runs.training import TRAINING_TABLE

    entry = read(output).entries.get(TRAINING_TABLE) if output.is_dir() else None
    if entry is None:
        return
    if entry.manifest.key is None:
        raise FileError(f"{output} holds a training run that a Monitor has watched: give another folder")
    other = difference(entry.manifest.key, key)
    if other:
        raise FileError(f"{output} holds checkpoints that were measured otherwise, in {other}: give another "
                        "folder with -o, or the same options")  # fmt: skip


def measurement_of(
    each: Checkpoint,
    directory: Path,
    tokenizer: str | None,
    device: str,
    texts: list[str],
    tokens: int,
    metrics: list[str],
    tell: Any,
) -> "Measurement":
    """What a Monitor would have seen at that step, or a sentence on why it cannot be seen."""
    import polars as pl

    from rankscope.live.monitor import Alarm, Measurement
    from rankscope.live.monitor.measurement import TRAINING
    from rankscope.profiles import measure

    try:
        net = loaded(each, directory, tokenizer).to(device=device)
        X, padding = net.encode(texts, tokens)
        profile = measure(net, X, padding, metrics, progress=tell)
    except MissingExtraError:
        raise  # none of them can be loaded
    except (RankscopeError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        said = f"{each.folder.name} cannot be measured: {why}"
        alarm = Alarm(each.step, each.step, RULE, None, None, "warn", said)
        return Measurement(each.step, pl.DataFrame(schema=TRAINING), (alarm,))
    rows = pl.concat([rows_of(each.step, profile.table), logged(each)])
    return Measurement(each.step, rows)


def loaded(each: Checkpoint, directory: Path, tokenizer: str | None) -> Any:
    """The network of a checkpoint; its tokenizer is its own, or the one asked for, or that of the folder."""
    from rankscope.sources import load
    from rankscope.sources.checkpoint import CheckpointLocation, locate
    from rankscope.sources.checkpoint import tokenizer as read_tokenizer

    own = any(each.folder.glob("tokenizer*")) or any(each.folder.glob("vocab*"))
    above = any(directory.glob("tokenizer*")) or any(directory.glob("vocab*"))
    other = tokenizer or (str(directory) if above and not own else None)
    if other is None:
        return load(str(each.folder))
    where = (
        CheckpointLocation(other, other, {}) if Path(other).is_dir() else locate(other, {})
    )  # it needs no weights
    return load(str(each.folder), tokenizer=read_tokenizer(where))


def rows_of(step: int, profile: "pl.DataFrame") -> "pl.DataFrame":
    """The rows of a profile as a measurement has them: over samples the mean, deviation and ends."""
    import polars as pl

    from rankscope.live.monitor.measurement import TRAINING

    good = pl.col("value").filter(pl.col("value").is_finite())
    return (
        profile.group_by("layer", "head", "metric", maintain_order=True)
        .agg(
            good.mean(), good.std(ddof=0).alias("spread"),
            good.min().alias("least"), good.max().alias("most"),
            pl.col("floor").filter(pl.col("value").is_finite()).mean(), good.len().alias("samples"),
            (~pl.col("value").is_finite()).sum().alias("broken"),
        )
        .with_columns(pl.lit(step).alias("step"))
        .select(pl.col(name).cast(kind) for name, kind in TRAINING.items())
    )  # fmt: skip


def logged(each: Checkpoint) -> "pl.DataFrame":
    """The loss and learning rate that the trainer has logged last, up to that step."""
    import polars as pl

    from rankscope.live.monitor.measurement import TRAINING

    try:
        history = json.loads((each.folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        found: dict[str, float] = {}
        for line in sorted(history, key=lambda line: line["step"]):
            if line["step"] <= each.step:
                found |= {LOGGED[name]: float(line[name]) for name in LOGGED if name in line}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = {}  # another trainer's, or none
    rows = [
        {"step": each.step, "metric": name, "value": value, "spread": 0.0, "least": value, "most": value,
         "floor": 0.0, "samples": 1, "broken": 0}
        for name, value in found.items()
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=TRAINING)


def measured(run_writer: "RunWriter") -> set[int]:
    """The steps that have numbers."""
    return set(run_writer.store.run.table("training")["step"].to_list())


def write(run_writer: "RunWriter", measurement: "Measurement") -> None:
    """Put a measurement in its place. Tables grow by steps: rows of later steps are taken off and put back,
    and what an earlier try said of this step is forgotten."""
    import polars as pl

    from rankscope.live.monitor.measurement import alarm_rows

    for journal, name, new in (
        (run_writer.alarms, "alarms", alarm_rows(measurement.alarms)),
        (run_writer.measurements, "training", measurement.rows),
    ):
        later = run_writer.store.run.table(name).filter(pl.col("step") > measurement.step)
        journal.cut(measurement.step - 1)
        for rows in (new, *_by_step(later)):
            if len(rows):
                journal.append(int(rows["step"][0]), rows)


def _by_step(rows: "pl.DataFrame") -> "Sequence[pl.DataFrame]":
    return rows.partition_by("step", maintain_order=True) if len(rows) else []
