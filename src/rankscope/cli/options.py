"""Options that several commands share, under one name and with one meaning."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but results.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of everything drawn at random.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens per sample.")]
Samples = Annotated[int, typer.Option(min=1, help="How many excerpts of the bundled prose.")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder for the table, figures, manifest and report."),
]
