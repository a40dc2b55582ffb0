"""Options that several commands share, under one name and with one meaning."""

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli import names
from rankscope.cli.complete import compared, one, several

NETWORK, TEXT, RESULT = "Network", "Text", "Result"
"""Panels of the help, in the order a command thinks: what runs, on what, and what comes of it."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="minilm (trained), a directory or hub id of a model, a size with random weights "
        "(bert-base, gpt2, ...), or a JSON file of an architecture.",
        autocompletion=one(names.MODELS),
    ),
]
Compared = Annotated[
    list[str],
    typer.Argument(
        metavar="A",
        help="Models as in measure, model:variant as in minilm:san, or folders of runs.",
        autocompletion=compared,
    ),
]
Variant = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="transformer, less a part (transformer-skip), or san with parts (san+skip).",
        rich_help_panel=NETWORK,
        autocompletion=one(names.VARIANTS),
    ),
]
Variants = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated: transformer, transformer-skip, san, san+norm+mlp, ...",
        rich_help_panel=NETWORK,
        autocompletion=several(names.VARIANTS),
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        metavar="MASK",
        help="In place of the model's own: causal, window:2, causal&window:4.",
        rich_help_panel=NETWORK,
        autocompletion=one(names.MASKS),
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Repeat the layers to this depth.", rich_help_panel=NETWORK),
]
Init = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of random weights: bert, xavier, kaiming, orthogonal, or one with /sqrt(L).",
        show_default="bert",
        rich_help_panel=NETWORK,
        autocompletion=one([*names.INITS, *(f"{name}/sqrt(L)" for name in names.INITS)]),
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of random weights and their embedding of words.",
        show_default="0",
        rich_help_panel=NETWORK,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where networks run: cpu, cuda, cuda:1, mps.",
        rich_help_panel=NETWORK,
        autocompletion=one(names.DEVICES),
    ),
]
Tokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Tokens of each excerpt at most.", rich_help_panel=TEXT)
]
Samples = Annotated[
    int, typer.Option(metavar="N", min=1, help="So many excerpts, from the first.", rich_help_panel=TEXT)
]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="PATH",
        help="Your text: a file, a folder of .txt, .md, .jsonl, or - for stdin.",
        show_default="Moby Dick",
        rich_help_panel=TEXT,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="An excerpt is a paragraph, line or jsonl; auto: of stdin a line, else a paragraph.",
        rich_help_panel=TEXT,
        autocompletion=one(names.SPLITS),
    ),
]
Field = Annotated[
    str, typer.Option(metavar="NAME", help="Of each JSON line, what holds the text.", rich_help_panel=TEXT)
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated; the first is shown.",
        rich_help_panel=RESULT,
        autocompletion=several(names.METRICS),
    ),
]
Arithmetic = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated: deviation, float64, float32, bfloat16; or all.",
        rich_help_panel=RESULT,
        autocompletion=several([*names.ARITHMETICS, "all"]),
    ),
]
Threshold = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Tokens are uniform when their residual is below this share of them.",
        rich_help_panel=RESULT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Write tables, figures, manifest and report there.",
        rich_help_panel=RESULT,
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Write tables, figures, manifest and report there.",
        rich_help_panel=RESULT,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", metavar=" ", help="JSON on stdout, and nothing else.", rich_help_panel=RESULT),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", metavar=" ", help="Results alone: no progress, no hints.", rich_help_panel=RESULT
    ),
]
DEFAULT_METRICS = "relative_residual,residual,relative_mu,mu"
