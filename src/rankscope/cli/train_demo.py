"""`rankscope demo --train`: a small GPT learns to write, whole and without its skips, under a monitor."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

RUNS = {"whole": 1.0, "no-skips": 0.0}
"""The folder of each run, and the weight of its skips."""


def train_demo(output: Path, steps: int, as_json: bool, quiet: bool) -> None:
    """Train both, a step of each in turn; then show what came of them."""
    import torch
    from rich.padding import Padding
    from rich.text import Text

    from rankscope.cards import counted
    from rankscope.cli.exits import Interruption
    from rankscope.cli.output import require_report
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.files import writable_folder
    from rankscope.lab import Recipe, Training
    from rankscope.lab.tasks import NextCharacter
    from rankscope.live.monitor import default_rules
    from rankscope.report import write_report
    from rankscope.runs import read

    require_report()
    writable_folder(output)
    if not (quiet or as_json):
        say(
            "A GPT of 6 layers, 64 wide, learns to write Moby Dick letter by letter: whole, and without its "
            f"skips, {steps} steps each, side by side. A monitor measures both every 20 steps.\n"
        )
    task, folders = NextCharacter(), {name: output / name for name in RUNS}
    whole, without = (
        iter(
            Training(
                task, task.architecture(6, 64, attention_skip=skip, mlp_skip=skip), Recipe(steps=steps),
                run=folders[name], alarms=lambda: default_rules(action=lambda _: None),
            )
        )
        for name, skip in RUNS.items()
    )  # fmt: skip
    done, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)  # threads of so small a network mostly wait for each other
    try:
        with progress(quiet or as_json) as start:
            bar = start("training")
            for step in whole:
                done = next(without, step)
                bar(done, steps)
            for done in without:  # of a run that is resumed, it may be behind
                bar(done, steps)
    except KeyboardInterrupt as stop:
        raise Interruption(f"after {done} of {steps} steps; the same command resumes from there") from stop
    finally:
        torch.set_num_threads(threads)
        whole.close()
        without.close()
    report = write_report([*folders.values()], output / "report.html")
    tables = {name: read(folder).table("training") for name, folder in folders.items()}
    alarms = {name: read(folder).table("alarms") for name, folder in folders.items()}
    if as_json:
        return machine(
            {
                "report": str(report),
                "runs": {
                    name: {"training": tables[name].to_dicts(), "alarms": alarms[name].to_dicts()} for name in RUNS
                },
            }
        )
    console().print(_summary(tables))
    for name in RUNS:
        sentences = alarms[name]["sentence"].to_list()
        say("", f"{name}: {counted(len(sentences), 'alarm')}")
        for sentence in sentences:
            console().print(Padding(Text(sentence), (0, 0, 0, 2)))
    if not quiet:
        say("")
        say_where("Report", report)


def _summary(tables: "dict[str, pl.DataFrame]") -> "Table":
    """A table of the loss, and of how far the tokens of each layer are apart, at the last measurement."""
    from rich.table import Table

    table = Table(title="At the last measurement", title_justify="left", box=None)
    table.add_column("")
    table.add_column("loss", justify="right")
    layers: list[Any] = sorted(_last(next(iter(tables.values())), "relative_mu"))
    for layer in layers:
        table.add_column(f"layer {layer}" if layer == layers[0] else str(layer), justify="right")
    for name, rows in tables.items():
        differ = _last(rows, "relative_mu")
        loss = _last(rows, "loss").get(None)
        shown = [_shown(differ.get(layer)) for layer in layers]
        table.add_row(name, "" if loss is None else f"{loss:.2f}", *shown)
    table.caption = "By layer: what tokens differ by, over their size."
    table.caption_justify = "left"
    return table


def _last(rows: "pl.DataFrame", metric: str) -> "dict[int | None, float]":
    import polars as pl

    found = rows.filter(metric=metric).filter(pl.col("step") == pl.col("step").max())
    return dict(zip(found["layer"].to_list(), found["value"].to_list(), strict=True))


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
