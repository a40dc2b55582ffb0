"""`rankscope report`: run directories as one page."""

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli import options as opt


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders that measure, paths, bounds, checkpoints, a Monitor, ... wrote."),
    ],
    output: Annotated[Path, opt.option(opt.RESULT, "PAGE", "The page to write.", (), "-o", "--output")] = Path(
        "report.html"
    ),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Make one page of run folders, a chapter for each: interactive figures, tables, manifest.

    The file stands alone: it can be opened, sent and kept without anything beside it.
    """
    from rankscope.cli.show import machine, say_where
    from rankscope.report import write_report

    written = write_report(runs, output)
    if printing.as_json:
        machine({"report": str(written)})
    elif not printing.quiet:
        say_where("Report", written)
