"""`rankscope spikes`: the loss spikes of a training, and which signals moved before them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import command_line
from rankscope.cli.show import machine, say, say_where, show_tables


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
    from rankscope.errors import FileError, require
    from rankscope.files import atomic, writable_folder
    from rankscope.runs import begun
    from rankscope.runs import read as read_run
    from rankscope.trainings import TRAINING_TABLE, order_of_events, read_signals
    from rankscope.trainings.signals import split_loss

    opt.require_positive(deviations=deviations)
    folder, names = results.output, ("spikes.csv", "events.csv")
    written = (*names, "spikes.parquet", "spike_events.parquet")
    for path in () if folder is None else (folder / name for name in written):
        sentence = f"{path} is read here and would be written over: give -o another folder"
        read = {source.resolve() for source in sources}
        require(path.resolve() not in read, sentence, FileError, str(path))
    of_loss, signals = split_loss(read_signals(sources), loss)
    report = order_of_events(of_loss, signals, window=window, deviations=deviations)
    if folder is not None:
        writable_folder(folder)
        if TRAINING_TABLE not in read_run(folder).names:  # a training stays one, and may go on: it gets the CSV alone
            replace(report, manifest=begun("cpu").adding(command=command_line())).save(folder)
        for name, rows in zip(names, report.tables.values(), strict=True):
            with atomic(folder / name) as temporary:
                rows.write_csv(temporary)
    if results.as_json:
        told = {"score": report.score, "spikes": [spike._asdict() for spike in report.spikes]}
        return machine({**told, "events": report.events.to_dicts(), "sentences": report.sentences})
    say(*report.sentences)
    for shown in (table for section in report.sections() for table in section.tables):
        say("")
        show_tables(shown)
    if folder is not None:
        say_where("Spikes and events", folder)
