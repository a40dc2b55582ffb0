"""`rankscope demo`: the main job on the embedded default model, and its report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.cli.options import Folder, Json, Quiet

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


def demo(output: Folder = Path("runs/demo"), as_json: Json = False, quiet: Quiet = False) -> None:
    """Measure MiniLM, a trained BERT, with and without its parts, take it apart, certify it: a report."""
    from rankscope.cli.asked import bundled, described, title_of
    from rankscope.cli.measure import about, end_if_stopped, measured, write_run
    from rankscope.cli.pictures import Pictures
    from rankscope.cli.show import console, curves_table, machine, say, say_report
    from rankscope.files import writable_folder
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict
    from rankscope.sources import load

    writable_folder(output)
    if not (quiet or as_json):
        say(
            "MiniLM (all-MiniLM-L6-v2), a trained English BERT of 6 layers, reads 4 excerpts of Moby Dick, "
            "128 tokens each: whole, without its attention skips, its MLPs, its norms, without any skip, and "
            "attention alone (san). In deviation arithmetic, which has no floor.\n"
        )
    net = load("minilm")
    texts = bundled(samples=4, tokens=128)
    X, padding = net.encode(texts, 128)
    variants, metrics = list(VARIANTS), list(DEFAULT_METRICS)
    drawn = Pictures(net, DRAWN, X, padding, texts, 128)
    profile = measured(net, X, padding, variants, metrics, ["deviation"], quiet or as_json, drawn)
    profile.manifest.update(**about(net, "minilm"), **described(None, "auto", "text", texts, 128))
    tables = {}
    if "stopped" not in profile.manifest:
        tables = {**drawn.tables(), **_more(net, texts, output, profile.manifest, quiet or as_json)}
    report = write_run(profile, output, title_of(net), tables)
    if as_json:
        machine({"manifest": profile.manifest, "table": profile.table.to_dicts(), "report": str(report)})
    else:
        console().print(curves_table(profile.views("relative_residual")))
        say("", verdict(profile))
        if not quiet:
            say("")
            say_report(report)
    end_if_stopped(profile, output)


def _more(
    net: "Transformer", texts: list[str], folder: Path, manifest: dict[str, Any], quiet: bool
) -> "dict[str, pl.DataFrame]":
    """What the report shows beside the curves, the cloud and the spectra: paths, and certificates."""
    from rankscope.cli.show import progress

    with progress(quiet) as start:
        start("paths, certificates")
        tables, closure = _paths(net, *net.encode(texts, 64))
        manifest["closure"] = closure
        _certify(net, *net.encode(texts[:2], 32), folder, manifest)
    return tables


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
        found = certify(named_variant(net, variant), X, padding, variant=variant)
        known = {name: manifest[name] for name in ("model", "origin", "command")}
        found.manifest.update(known, variant=variant)
        found.save(folder / f"certificates_{variant}.parquet")
