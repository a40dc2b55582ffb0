"""`rankscope sweep`: many networks and texts, each measured once, on this machine or on a Ray cluster."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import command_line
from rankscope.cli.output import require_report
from rankscope.cli.show import Interruption, complain, machine, progress, say, say_where, show_tables


@dataclass(frozen=True)
class WorkerOptions:
    """Options that say where cells run, and with what: the arguments of `rankscope.sweep`."""

    on: opt.On = None
    workers: Annotated[int | None, opt.option(opt.MACHINE, "N", "workers", min=1, show_default="one for each core")] = (
        None
    )
    threads: Annotated[int, opt.option(opt.MACHINE, "N", "threads", min=1)] = 1
    gpus_per_cell: Annotated[float, opt.option(opt.MACHINE, "N", "gpus_per_cell", min=0.0)] = 0.0
    stuck_after: opt.StuckAfter = opt.STUCK_AFTER


def sweep(
    spec: Annotated[Path, opt.argument("SPEC", "spec")],
    workers: WorkerOptions = WorkerOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Measure every cell of a specification: a grid, a list or a sample of networks and texts.

    Cells are kept as they end. The same command into the same folder resumes where it stopped; a changed
    specification computes what is new. A cell that fails is a row with its reason; if all fail, the exit code is 2.
    """
    from rankscope.engine import read_spec
    from rankscope.engine import sweep as run_sweep
    from rankscope.errors import SweepError
    from rankscope.figures import save
    from rankscope.report import write_report

    require_report()
    folder = results.output or Path("runs") / spec.stem
    total, done = 0, 0
    try:
        with progress(results.silent) as start:
            bar = start(f"Reading the cells of {spec}")  # a million of them take a while
            specification = read_spec(spec)
            total = len(specification.cells)
            bar(0, None, f"{total:,} cells: looking for those that are kept")

            def tell(cells_done: int, of: int) -> None:
                nonlocal done
                done = cells_done
                bar(done, of, f"{done:,} of {of:,} cells")

            result = run_sweep(
                specification,
                folder,
                **asdict(workers),
                progress=tell,
                say=lambda sentence: None if results.silent else complain(sentence),
                command=command_line(),
            )
    except KeyboardInterrupt as stop:
        if not total:
            raise
        raise Interruption(f"after {done:,} of {total:,} cells; the same command resumes from there") from stop
    if len(result.table):
        save(result.plot(), folder / "figure")
    report = write_report([folder], folder / "report.html")
    if results.as_json:
        machine({"run": str(folder), "cells": result.cells.to_dicts(), "failed": len(result.failed)})
    else:
        tables = [table for section in result.sections() for table in section.tables]
        show_tables(*(table for table in tables if not table.keys))
        say("", result.overview().sentence)
        if not results.quiet:
            say_where("Table", folder / "sweep.parquet")
            say_where("Report", report)
    if len(result.failed) == total:
        kept = f"{folder} has the reasons"
        raise SweepError(f"at least one of {total:,} cells must have numbers; all failed: {kept}", subject=str(spec))
