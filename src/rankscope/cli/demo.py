"""`rankscope demo`: the main job on the embedded default model, and its report; or a training (`--train`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import options as opt
from rankscope.cli.output import open_store, require_report, with_manifest

if TYPE_CHECKING:
    import polars as pl

    from rankscope.nets import Transformer
    from rankscope.runs import Manifest
    from rankscope.runs.tables import SavedTable

VARIANTS = (
    "transformer",
    "transformer-attention_skip",
    "transformer-mlp",
    "transformer-norm",
    "transformer-skip",
    "san",
)
"""What a verdict needs to name a cause: the whole, each part taken out by itself, and attention alone."""
TRAIN = "Train a small GPT instead, whole and without skips, under the monitor."
DRAWN = ("transformer", "transformer-attention_skip", "transformer-mlp", "san")
"""Of which the cloud and the spectra are drawn."""


def demo(
    train: Annotated[bool, opt.option(opt.NETWORK, " ", TRAIN, (), "--train")] = False,
    steps: Annotated[int, opt.option(opt.NETWORK, "N", "steps", min=1)] = 700,
    output: Annotated[
        Path | None,
        opt.option(opt.RESULT, "FOLDER", "output", (), "-o", "--output", show_default="runs/demo or runs/demo-train"),
    ] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure MiniLM, a trained BERT, with and without its parts, take it apart, certify it: a report.

    With --train: train a small GPT, whole and without skips, under the monitor (about two minutes).
    """
    if train:
        from rankscope.cli.train_demo import train_demo

        return train_demo(output or Path("runs/demo-train"), steps, as_json, quiet)
    _measured(output or Path("runs/demo"), as_json, quiet)


def _measured(output: Path, as_json: bool, quiet: bool) -> None:
    from rankscope.cli.extra_tables import ReportTables
    from rankscope.cli.inputs import MeasureTask, bundled_text, text_fields, title_of
    from rankscope.cli.measure import manifest_fields, measure_variants, raise_if_stopped
    from rankscope.cli.show import say, show_run
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict, write_run_directory
    from rankscope.sources import load
    from rankscope.sources.checkpoint import MINILM

    require_report("the demo", MINILM, "transformers")
    store = open_store(output)
    assert store is not None
    if not (quiet or as_json):
        say(
            "MiniLM (all-MiniLM-L6-v2), a trained English BERT of 6 layers, reads 4 excerpts of Moby Dick, "
            "128 tokens each: whole, without its attention skips, its MLPs, its norms, without any skip, and "
            "attention alone (san). In deviation arithmetic, which has no floor.\n"
        )
    net = load("minilm")
    texts = bundled_text(samples=4, tokens=128)
    X, padding = net.encode(texts, 128)
    task = MeasureTask(list(DEFAULT_METRICS))
    drawn = ReportTables(net, DRAWN, X, padding, texts, 128)
    profile = measure_variants(net, X, padding, list(VARIANTS), task, quiet or as_json, drawn)
    profile = with_manifest(
        profile, **manifest_fields(net, "minilm"), **text_fields(opt.TextOptions(tokens=128), texts)
    )
    tables: dict[str, pl.DataFrame | SavedTable] = {}
    if profile.manifest.stopped is None:
        more, closure = _more(net, texts, profile.manifest, quiet or as_json)
        tables, profile = {**drawn.tables(), **more}, with_manifest(profile, closure=closure)
    report = write_run_directory(profile, store, title_of(net), tables, "demo")
    said = {"report": str(report)}
    printing = opt.PrintOptions(as_json, quiet)
    show_run(profile, "relative_residual", [verdict(profile)], report, printing, more=said)
    raise_if_stopped(profile, output)


def _more(
    net: "Transformer", texts: list[str], manifest: "Manifest", quiet: bool
) -> "tuple[dict[str, pl.DataFrame | SavedTable], float]":
    """What the report shows beside the curves, the cloud and the spectra: the sum over all paths, by length
    and by head; what is proved of the whole, and of attention alone; and how nearly the paths add up to the
    output."""
    from rankscope.cli.show import progress
    from rankscope.paths import decompose
    from rankscope.theory import certify

    known = {name: getattr(manifest, name) for name in ("model", "origin", "command")}
    with progress(quiet) as start:
        start("paths, certificates")
        d = decompose(net, *net.encode(texts, 64))
        lengths = d.by_length()
        tables: dict[str, pl.DataFrame | SavedTable] = {"lengths": lengths.table, "heads": d.by_head()}
        encoded = net.encode(texts[:2], 32)
        for variant in ("san", "transformer"):
            found = certify(net.variant(variant), *encoded, variant=variant)
            tables[f"certificates_{variant}"] = with_manifest(found, **known)
    return tables, lengths.closure
