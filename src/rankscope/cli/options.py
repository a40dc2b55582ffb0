"""Options that several commands share, under one name and with one meaning."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="minilm (trained), a directory or hub id of a model, a usual size with random weights "
        "(bert-base, gpt2, ...), or a JSON file of an architecture."
    ),
]
Init = Annotated[
    str, typer.Option(help="Of random weights: bert, xavier, kaiming, orthogonal, or one with /sqrt(L).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but results.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of everything drawn at random.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens per sample.")]
Samples = Annotated[int, typer.Option(min=1, help="How many excerpts of the bundled prose.")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder for the table, figures, manifest and report."),
]
Text = Annotated[
    str | None,
    typer.Option("--text", help="Your text: a file, a folder of .txt, .md, .jsonl, or - for stdin."),
]
Split = Annotated[
    str,
    typer.Option(help="What an excerpt is: paragraph, line or jsonl; auto: lines of stdin, else paragraphs."),
]
Field = Annotated[str, typer.Option(help="The field of each JSON line that holds the text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Excerpts at most.")]
Batch = Annotated[int, typer.Option(min=1, help="Excerpts run together.")]
