"""`rankscope report`: run directories as one page."""

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.options import Json


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders that measure, paths, bounds, reproduce or demo wrote.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Make one page of run directories, a chapter for each: figures to handle, tables, manifest.

    The file stands alone: it can be opened, sent and kept without anything beside it.
    """
    from rankscope.cli.show import machine, say_report
    from rankscope.report import write_report

    written = write_report(runs, output)
    if as_json:
        machine({"report": str(written)})
    else:
        say_report(written)
