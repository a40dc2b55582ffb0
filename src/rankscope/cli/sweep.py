"""`rankscope sweep`: many networks and texts, each measured once, on this machine or on a Ray cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import options as opt

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from rankscope.engine import Sweep

SHOWN = 8
"""Cells at either end of the table, and failures."""


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file: which cells, and what of each.")],
    on: opt.On = None,
    workers: Annotated[
        int | None, opt.option(opt.NETWORK, "N", "workers", min=1, show_default="one for each core")
    ] = None,
    threads: Annotated[int, opt.option(opt.NETWORK, "N", "threads", min=1)] = 1,
    gpus_per_cell: Annotated[float, opt.option(opt.NETWORK, "N", "gpus_per_cell", min=0.0)] = 0.0,
    output: opt.Output = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure every cell of a specification: a grid, a list or a sample of networks and texts.

    Cells are kept as they end. The same command into the same folder goes on where it stopped; a changed
    specification computes what is new. A cell that fails is a row with its reason.
    """
    from rankscope.cli.exits import Stopped, complain
    from rankscope.cli.measure import command
    from rankscope.cli.output import require_report
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.engine import read_spec
    from rankscope.engine import sweep as swept

    found = read_spec(spec)
    require_report()
    folder = Path("runs") / spec.stem if output is None else output
    counted = [0, len(found.cells)]
    try:
        with progress(quiet or as_json) as start:
            bar = start(f"{len(found.cells):,} cells")

            def tell(done: int, of: int) -> None:
                counted[0] = done
                bar(done, of, f"{done:,} of {of:,} cells")

            result = swept(
                found,
                folder,
                on=on,
                workers=workers,
                threads=threads,
                gpus_per_cell=gpus_per_cell,
                progress=tell,
                say=lambda sentence: None if quiet or as_json else complain(sentence),
                command=command(),
            )
    except KeyboardInterrupt as stop:
        raise Stopped(
            f"after {counted[0]:,} of {counted[1]:,} cells; the same command goes on from there"
        ) from stop
    report = written(result)
    if as_json:
        machine({"run": str(folder), "cells": result.cells.to_dicts(), "failed": len(result.failed)})
        return
    console().print(shown(result))
    if len(result.failed):
        for row in result.failed.head(SHOWN).iter_rows(named=True):
            say(f"Cell {row['cell']} failed: {row['reason']}")
        if len(result.failed) > SHOWN:
            say(f"And {len(result.failed) - SHOWN} more: rankscope.read({str(folder)!r}).table('cells').")
    if not quiet:
        say_where("Table", folder / "sweep.parquet")
        say_where("Report", report)


def written(result: "Sweep") -> Path:
    """The figure and the report, beside the tables."""
    from rankscope.figures.matplotlib import save
    from rankscope.report import write_report

    if len(result.table):
        save(result.plot(), result.run / "figure")
    return write_report([result.run], result.run / "report.html")


def shown(result: "Sweep") -> "Table":
    """The first metric at the last layer of each cell, least first: all of them, or both ends."""
    from rankscope.cli.show import titled

    rows, name = last_layers(result)
    varied = [each for each in result.spec.varied if each in rows.columns]
    table = titled(name, f"At the last layer, the mean over samples; {len(rows)} cells, the least first.")
    for each in (*varied, "log10", name):
        table.add_column(each, justify="right")
    ends = rows.rows(named=True)
    gap = len(ends) > 2 * SHOWN
    for place, row in enumerate(ends):
        if gap and place == SHOWN:
            table.add_row(*["…"] * (len(varied) + 2))
        if not gap or place < SHOWN or place >= len(ends) - SHOWN:
            table.add_row(
                *[_word(row[each]) for each in varied], f"{row['log10']:.3g}", f"{row['value']:.4g}"
            )
    return table


def last_layers(result: "Sweep") -> tuple["pl.DataFrame", str]:
    """(a row for each cell: factors, value and log10 of the first metric at its last layer; the metric)."""
    import polars as pl

    name = result.spec.options.metrics[0]
    rows = result.table.filter(metric=name)
    rows = rows.filter(pl.col("layer") == pl.col("layer").max().over("cell"))
    factors = [each for each in result.spec.factors if each != "cell"]
    means = rows.group_by("cell", maintain_order=True).agg(
        *(pl.col(each).first() for each in factors), pl.col("value").mean(), pl.col("log10").mean()
    )
    return means.sort("log10", "cell"), name


def _word(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
