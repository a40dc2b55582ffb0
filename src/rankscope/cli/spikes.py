"""`rankscope spikes`: the loss spikes of a training, and which signals moved before them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import command_line
from rankscope.cli.show import console, machine, say, say_where, titled

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.trainings import Spikes

SHOWN = 12  # Signals that are shown before each spike


def spikes(
    sources: Annotated[list[Path], opt.argument("RUN", "Run folders, TensorBoard's folders, or tables by step.")],
    loss: Annotated[
        str | None, opt.option(opt.RESULT, "NAME", "What the loss is called there.", show_default="the usual names")
    ] = None,
    window: Annotated[
        int | None, opt.option(opt.RESULT, "N", "Values of the rolling mean.", min=20, show_default="1000, or a tenth")
    ] = None,
    deviations: Annotated[float, opt.option(opt.RESULT, "X", "Standard deviations that make a spike.")] = 7.0,
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Find the loss spikes of a training, and say which signals left their usual range before each.

    RUN is what a [bold]Monitor[/bold] wrote, a folder of TensorBoard, or a table by step (CSV, Parquet, JSON lines),
    as W&B exports it. How often a signal does the same when nothing follows is its chance.
    """
    from rankscope.trainings import order_of_events, read_signals
    from rankscope.trainings.signals import split_loss

    opt.require_positive(deviations=deviations)
    if results.output is not None:
        _keep_sources(sources, results.output)
    of_loss, signals = split_loss(read_signals(sources), loss)
    report = order_of_events(of_loss, signals, window=window, deviations=deviations)
    if results.output is not None:
        _write(results.output, report)
    if results.as_json:
        told = {"score": report.score, "spikes": [spike._asdict() for spike in report.spikes]}
        return machine({**told, "events": report.events.to_dicts(), "sentences": report.sentences})
    say(*report.sentences)
    for index, spike in enumerate(report.spikes):
        table = _table(report, index)
        if table.row_count:
            say("")
            console().print(f"Before step {spike.first}", style="bold")
            console().print(table)
    if results.output is not None:
        say_where("Spikes and events", results.output)


def _table(report: "Spikes", index: int) -> "Table":
    """Signals that left their band before a spike, the earliest first."""
    import polars as pl

    events = report.events.filter(pl.col("spike") == index)
    caption = f"{events.height - SHOWN} more: --json has all" if events.height > SHOWN else ""
    words, numbers = ["signal", "layer", ""], ["step", "lead", "distance", "chance", "adjusted"]
    table = titled("what left its band, the earliest first", caption, words, numbers)
    for row in events.head(SHOWN).iter_rows(named=True):
        layer = "" if row["layer"] is None else str(row["layer"]) + ("" if row["head"] is None else f".{row['head']}")
        way = "up" if row["direction"] > 0 else "down"
        table.add_row(
            row["signal"], layer, way, str(row["step"]), str(row["lead"]), f"{row['distance']:.1f}",
            f"{row['chance']:.2g}", f"{row['adjusted']:.2g}",
        )  # fmt: skip
    return table


def _keep_sources(sources: list[Path], folder: Path) -> None:
    """Refuse a folder in which a table that is read here would be written over."""
    from rankscope.errors import FileError

    read = {source.resolve() for source in sources}
    for path in (folder / name for name in ("spikes.csv", "events.csv", "spikes.parquet", "spike_events.parquet")):
        if path.resolve() in read:
            raise FileError(f"{path} is read here and would be written over: give -o another folder", subject=str(path))


def _write(folder: Path, report: "Spikes") -> None:
    """Save the spikes and the events, which `rankscope.read` gives back, and both as CSV. A folder that holds a
    training stays one, which `rankscope.read` gives back and which may go on: it gets the CSV alone."""
    from rankscope.files import atomic, writable_folder
    from rankscope.runs import begun, read
    from rankscope.trainings import TRAINING_TABLE

    writable_folder(folder)
    if TRAINING_TABLE not in read(folder).names:
        replace(report, manifest=begun("cpu").adding(command=command_line())).save(folder)
    for name, table in zip(("spikes", "events"), report.tables.values(), strict=True):
        with atomic(folder / f"{name}.csv") as temporary:
            table.write_csv(temporary)
