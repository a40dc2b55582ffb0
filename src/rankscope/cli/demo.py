"""`rankscope demo`: the main job on the embedded default model, and its report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli.options import Json, Quiet

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer

VARIANTS = (
    "transformer",
    "transformer-attention_skip",
    "transformer-mlp",
    "transformer-norm",
    "transformer-skip",
    "san",
)
"""What a verdict needs to name a cause: the whole, each part taken out by itself, and attention alone."""
DRAWN = ("transformer", "transformer-attention_skip", "transformer-mlp", "san")
"""Of which the cloud and the spectra are drawn."""


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the tables, figures, manifest and report.")
    ] = Path("runs/demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure MiniLM, a trained BERT, with and without its parts; take it apart; certify it; write a "
    "report."""
    from rankscope.cli.measure import about, measured, passages, title_of, write_run
    from rankscope.cli.pictures import pictures
    from rankscope.cli.show import console, machine, profile_table, say, say_report
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict
    from rankscope.sources import load

    if not (quiet or as_json):
        say(
            "MiniLM (all-MiniLM-L6-v2), a trained English BERT of 6 layers, reads 4 excerpts of Moby Dick, "
            "128 tokens each: whole, without its attention skips, its MLPs, its norms, without any skip, and "
            "attention alone (san). In deviation arithmetic, which has no floor.\n"
        )
    net = load("minilm")
    texts = passages(samples=4, tokens=128)
    X, padding = net.encode(texts, 128)
    variants, metrics = list(VARIANTS), list(DEFAULT_METRICS)
    profile = measured(net, X, padding, variants, metrics, ["deviation"], quiet or as_json)
    profile.manifest.update(about(net, "minilm"))
    tables = pictures(net, DRAWN, X, padding, texts, 128)
    found, closure = _paths(net, X[:, :64], padding[:, :64])
    profile.manifest["closure"] = closure
    _certify(net, X[:2, :32], padding[:2, :32], output, profile.manifest)
    report = write_run(profile, output, title_of(net), {**tables, **found})
    if as_json:
        machine({"manifest": profile.manifest, "table": profile.table.to_dicts(), "report": str(report)})
        return
    console().print(profile_table(profile, "relative_residual"))
    say("", verdict(profile), "")
    say_report(report)


def _paths(net: "Transformer", X: "Tensor", padding: "Tensor") -> "tuple[dict[str, pl.DataFrame], float]":
    """The exact sum over all paths, by length and by head, and how nearly it is the output."""
    from rankscope.paths import decompose

    d = decompose(net, X, padding)
    lengths = d.by_length()
    return {"lengths": lengths.table, "heads": d.by_head()}, lengths.closure


def _certify(
    net: "Transformer", X: "Tensor", padding: "Tensor", folder: Path, manifest: dict[str, Any]
) -> None:
    """What is proved of the whole, and of attention alone: a file for each."""
    from rankscope.nets import named_variant
    from rankscope.theory import certify

    for variant in ("san", "transformer"):
        found = certify(named_variant(net, variant), X, padding)
        known = {name: manifest[name] for name in ("model", "origin", "command")}
        found.manifest.update(known, variant=variant)
        found.save(folder / f"certificates_{variant}.parquet")
