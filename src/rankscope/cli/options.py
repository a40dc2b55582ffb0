"""Options that several commands share, under one name and with one meaning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.cli import names
from rankscope.cli.complete import compared, one, several
from rankscope.cli.named import model_named, text_named

NETWORK, TEXT, RESULT = "Network", "Text", "Result"
"""Panels of the help, in the order a command thinks: what runs, on what, and what comes of it."""
HELP = {
    "model": "minilm (trained), a directory or hub id of a model, a size with random weights (bert-base, "
    "gpt2, ...), or a JSON file of an architecture.",
    "compared": "Models as in measure, model:variant as in minilm:san, folders of runs, RUN:CELL of sweeps.",
    "variant": "transformer, less a part (transformer-skip), or san with parts (san+skip).",
    "variants": "Comma-separated: transformer, transformer-skip, san, san+norm+mlp, ...",
    "mask": "In place of the model's own: causal, window:2, causal&window:4.",
    "layers": "Repeat the layers to this depth.",
    "remedy": "Against collapse, with its numbers: attnscale:w=0.5. Several, one after the other.",
    "init": "Of random weights: bert, xavier, kaiming, orthogonal, or one with /sqrt(L).",
    "seed": "Of random weights and their embedding of words.",
    "device": "Where networks run: cpu, cuda, cuda:1, mps.",
    "stream": "Read layers from the model's files one at a time: for models larger than memory.",
    "tokens": "Tokens of each excerpt at most.",
    "samples": "So many excerpts, from the first.",
    "text": "Your text: a file, a folder of .txt, .md, .jsonl, or - for stdin.",
    "split": "An excerpt is a paragraph, line or jsonl; auto: of stdin a line, else a paragraph.",
    "field": "Of each JSON line, what holds the text.",
    "metrics": "Comma-separated; the first is shown.",
    "arithmetic": "Comma-separated: deviation, float64, float32, bfloat16; or all.",
    "check": "Mark what a second pass, rounded otherwise, does not agree on.",
    "confirm": "Run it in doubled precision as well (32 digits, some thirty times the time).",
    "compile": "Compile deviation arithmetic: a minute or two, for many batches on a GPU.",
    "threshold": "Tokens are uniform when their residual is below this share of them.",
    "on": "ray: on a Ray cluster of this machine; ray:HOST:PORT: on one that is there.",
    "workers": "Processes that share the work.",
    "threads": "Of each cell.",
    "full": "The full sizes, or those that take minutes on two cores.",
    "steps": "Of --train: how long.",
    "gpus_per_cell": "GPUs of each cell, or a share of one; 0: on the CPU.",
    "output": "Write tables, figures, manifest and report there.",
    "json": "JSON on stdout, and nothing else.",
    "quiet": "Results alone: no progress, no hints.",
}


def option(panel: str, metavar: str, help: str, known: Sequence[str] = (), *flags: str, **more: Any) -> Any:
    """An option in a panel of the help. `help` is a sentence, or the name of one of `HELP`; a shell completes
    the `known` names: of NAMES several, joined by commas."""
    if known:
        more["autocompletion"] = several(known) if metavar == "NAMES" else one(known)
    return typer.Option(*flags, metavar=metavar, help=HELP.get(help, help), rich_help_panel=panel, **more)


INITS = (*names.INITS, *(f"{name}/sqrt(L)" for name in names.INITS))
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=HELP["model"], autocompletion=one(names.MODELS), callback=model_named
    ),
]
Compared = Annotated[list[str], typer.Argument(metavar="A", help=HELP["compared"], autocompletion=compared)]
Variant = Annotated[str, option(NETWORK, "NAME", "variant", names.VARIANTS)]
Variants = Annotated[str, option(NETWORK, "NAMES", "variants", names.VARIANTS)]
Mask = Annotated[str | None, option(NETWORK, "MASK", "mask", names.MASKS)]
Layers = Annotated[int | None, option(NETWORK, "N", "layers", min=1)]
Remedy = Annotated[
    list[str] | None, option(NETWORK, "SPEC", "remedy", names.REMEDIES, "--remedy", show_default="none")
]
Init = Annotated[str | None, option(NETWORK, "NAME", "init", INITS, show_default="bert")]
Seed = Annotated[int | None, option(NETWORK, "N", "seed", show_default="0")]
Device = Annotated[str, option(NETWORK, "NAME", "device", names.DEVICES)]
Full = Annotated[bool, option(NETWORK, " ", "full", (), "--full/--quick")]
Stream = Annotated[bool, option(NETWORK, " ", "stream", (), "--stream")]
On = Annotated[str | None, option(NETWORK, "WHERE", "on", ("ray",), show_default="this machine")]
Tokens = Annotated[int, option(TEXT, "N", "tokens", min=1)]
Samples = Annotated[int, option(TEXT, "N", "samples", min=1)]
Text = Annotated[
    str | None,
    option(TEXT, "PATH", "text", (), "--text", show_default="Moby Dick", callback=text_named),
]
Split = Annotated[str, option(TEXT, "NAME", "split", names.SPLITS)]
Field = Annotated[str, option(TEXT, "NAME", "field")]
Metrics = Annotated[str, option(RESULT, "NAMES", "metrics", names.METRICS)]
Arithmetic = Annotated[str, option(RESULT, "NAMES", "arithmetic", (*names.ARITHMETICS, "all"))]
Check = Annotated[bool, option(RESULT, " ", "check", (), "--check/--no-check")]
Confirm = Annotated[bool, option(RESULT, " ", "confirm", (), "--confirm")]
Compile = Annotated[bool, option(NETWORK, " ", "compile", (), "--compile")]
Threshold = Annotated[float, option(RESULT, "SHARE", "threshold")]
Output = Annotated[Path | None, option(RESULT, "FOLDER", "output", (), "-o", "--output")]
Folder = Annotated[Path, option(RESULT, "FOLDER", "output", (), "-o", "--output")]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: any that is free.")]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")]
Json = Annotated[bool, option(RESULT, " ", "json", (), "--json")]
Quiet = Annotated[bool, option(RESULT, " ", "quiet", (), "--quiet", "-q")]
DEFAULT_METRICS = "relative_residual,residual,relative_mu,mu"
