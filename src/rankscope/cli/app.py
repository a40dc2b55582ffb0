"""The commands and their one voice: a table for people, `--json` for machines, a sentence for mistakes."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from rankscope.cli.bounds import bounds
from rankscope.cli.demo import demo
from rankscope.cli.explore import explore
from rankscope.cli.masks import masks
from rankscope.cli.measure import measure
from rankscope.cli.models import models
from rankscope.cli.paths import paths
from rankscope.cli.report import report
from rankscope.cli.reproduce import reproduce
from rankscope.errors import RankscopeError

app = typer.Typer(
    name="rankscope",
    help="How fast the tokens of a transformer become the same, and what holds them apart.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(measure)
app.command()(paths)
app.command()(bounds)
app.command()(explore)
app.command()(reproduce)
app.command()(report)
app.command()(masks)
app.command()(models)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"rankscope {version('rankscope')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How fast the tokens of a transformer become the same, and what holds them apart."""


def main() -> None:
    """Run the command; a mistake is one sentence on stderr and exit code 2."""
    try:
        app()
    except RankscopeError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"rankscope: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
