"""The commands and their one voice: a table for people, `--json` for machines, a sentence for mistakes."""

from typing import Annotated

import typer

from rankscope.cli.bounds import bounds
from rankscope.cli.checkpoints import checkpoints
from rankscope.cli.compare import compare
from rankscope.cli.demo import demo
from rankscope.cli.exits import Commands, unwrapped
from rankscope.cli.explore import explore
from rankscope.cli.follow import follow
from rankscope.cli.masks import masks
from rankscope.cli.measure import measure
from rankscope.cli.metrics import metrics
from rankscope.cli.models import models
from rankscope.cli.options import flattened
from rankscope.cli.paths import paths
from rankscope.cli.remedies import remedies
from rankscope.cli.report import report
from rankscope.cli.reproduce import reproduce
from rankscope.cli.sweep import sweep

app = typer.Typer(
    name="rankscope", cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)
for command in (
    demo, measure, compare, paths, bounds, sweep, checkpoints, follow, explore, reproduce, remedies, report,
    masks, metrics, models,
):  # fmt: skip
    app.command(help=unwrapped(command.__doc__))(flattened(command))


def _version(asked: bool) -> bool:
    if asked:
        from importlib.metadata import version

        typer.echo(f"rankscope {version('rankscope')}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar=" ", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How fast the tokens of a transformer become the same, and what holds them apart."""


def main() -> None:
    """Run the command; a mistake is one sentence on stderr and exit code 2."""
    app(prog_name="rankscope")
