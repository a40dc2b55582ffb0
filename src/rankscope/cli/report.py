"""`rankscope report`: runs on one page."""

from pathlib import Path
from typing import Annotated

from rankscope.cli import options as opt
from rankscope.cli.show import machine, say_where


def report(
    runs: Annotated[list[Path], opt.argument("RUN", "runs")],
    output: Annotated[Path, opt.option(opt.RESULT, "PAGE", "page", (), "-o", "--output")] = Path("report.html"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Make one page of run folders, a chapter for each: interactive figures, tables, manifest.

    The file stands alone: it can be opened, sent and kept without anything beside it.
    """
    from rankscope.files import writable_folder
    from rankscope.report import write_report

    writable_folder(output.parent)
    written = write_report(runs, output)
    if printing.as_json:
        machine({"report": str(written)})
    elif not printing.quiet:
        say_where("Report", written)
