"""`rankscope bounds`: what is proved of a network on an input, next to what is measured."""

import math
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.inputs import described, drawn_at_random, excerpts_of, listed, network
from rankscope.cli.output import opened, with_manifest, write_folder
from rankscope.errors import TheoremError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.theory import Certificates
    from rankscope.theory.views import BoundView

SCALE = "Multiply the tokens by it: the theorems are about small residuals."
THEOREMS = "Comma-separated, as the table has them."


def bounds(
    model: opt.Model = "minilm",
    variant: opt.Variant = "transformer",
    mask: opt.Mask = None,
    layers: opt.Layers = None,
    remedy: opt.Remedy = None,
    init: opt.Init = None,
    seed: opt.Seed = None,
    stream: opt.Stream = False,
    text: opt.Text = None,
    split: opt.Split = "auto",
    field: opt.Field = "text",
    samples: opt.Samples = 2,
    tokens: opt.Tokens = 32,
    scale: Annotated[float, opt.option(opt.TEXT, "FACTOR", SCALE)] = 1.0,
    theorems: Annotated[
        str | None, opt.option(opt.RESULT, "NAMES", THEOREMS, names.THEOREMS, show_default="all")
    ] = None,
    threshold: opt.Threshold = 1e-6,
    output: opt.Output = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Certify a network: every theorem with its hypotheses checked on this network and this text.

    A bound whose hypotheses fail is not shown, and the line says which. One that holds but says nothing (as
    large as the tokens, or zero) is called vacuous. All measured in deviation arithmetic.
    """
    from rankscope.cli.exits import Stopped
    from rankscope.cli.measure import about, kept
    from rankscope.cli.show import console, machine, say, say_where
    from rankscope.theory.catalogue import theorems_named
    from rankscope.theory.depth import depth_of

    named = None if theorems is None else listed("theorems", theorems)
    theorems_named(named)
    require_positive_threshold(threshold)
    if not (math.isfinite(scale) and scale > 0):
        raise TheoremError(f"--scale must be a number > 0; got {scale:g}")
    read = excerpts_of(text, split, field, samples, tokens)
    net = network(
        model, mask, layers, init, seed, stream=stream, remedies=remedy, quiet=quiet or as_json
    ).variant(variant)
    store = opened(output)
    X, padding = net.encode(read, tokens)
    found, done = certified(net, scale * X, padding, named, variant, quiet or as_json)
    found = with_manifest(
        found, **about(net, model), scale=scale, **described(text, split, field, read[:done], tokens)
    )
    depth = depth_of(found, threshold)
    if store is not None:
        drawn = any(quantity != "affine_rank" for quantity in found.table["quantity"].unique())
        figures = {"bounds": found.plot()} if drawn else {}
        write_folder(store, "bounds", found.manifest, {"certificates": found}, figures)
    if as_json:
        collapse = {name: getattr(depth, name).to_dicts() for name in ("measured", "guaranteed")}
        manifest = found.manifest.to_dict()
        machine({"manifest": manifest, "table": found.table.to_dicts(), "collapse": collapse})
    else:
        console().print(summary_table(found.views()))
        say(*drawn_at_random(found.manifest))
        if not found.table["met"].all():
            say("")
            console().print(reasons_table(found))
        wrong = " A measurement contradicts a theorem: please report this network."
        say("", f"{depth.view().said}{wrong if len(found.broken()) else ''}")
        if output is not None and not quiet:
            say("")
            say_where("Certificates and figures", output)
            say_where("Report", output / "report.html")
    if done < len(read):
        raise Stopped(f"after {done} of {len(read)} samples; {kept(output)}")


def certified(
    net: "Transformer", X: "Tensor", padding: "Tensor", theorems: list[str] | None, title: str, quiet: bool
) -> "tuple[Certificates, int]":
    """The certificates sample by sample, and of how many: after Ctrl-C of those that were finished."""
    import polars as pl

    from rankscope.cli.show import progress
    from rankscope.theory import Certificates, certify

    parts: list[Certificates] = []
    try:
        with progress(quiet) as start:
            bar = start(title)
            for sample in range(len(X)):
                bar(sample, len(X), f"{title}, sample {sample + 1} of {len(X)}")
                parts.append(certify(net, X[sample : sample + 1], padding[sample : sample + 1], theorems))
    except KeyboardInterrupt:
        if not parts:
            raise
    order = pl.Enum(parts[0].theorems)
    table = pl.concat(part.table.with_columns(sample=pl.lit(k, pl.Int64)) for k, part in enumerate(parts))
    table = table.sort(pl.col("theorem").cast(order), "sample", "layer")
    counts = [count for part in parts for count in part.manifest.networks[0].checks["tokens"]]
    first = parts[0].manifest.networks[0]
    checks = {**first.checks, "samples": len(parts), "tokens": counts}
    manifest = parts[0].manifest.adding(networks=(first.adding(variant=title, checks=checks),))
    return Certificates(table, manifest), len(parts)


def summary_table(bounds: "list[BoundView]") -> "Table":
    """Two lines per theorem whose hypotheses are met from layer 1 on: bound and measurement at the last layer
    at which it says something, and beneath them both by layer, on one scale."""
    from rich.markup import escape

    from rankscope.cli.show import console, sparklines, titled
    from rankscope.theory.views import QUANTITIES, quantity

    met = [each for each in bounds if each.met_to]
    named = [quantity(name) for name in QUANTITIES if name in {each.quantity for each in met}]
    legend = "   ".join(f"{each.short}: {each.symbol}" for each in named)
    said = "Slack in decades. Beneath: measured and bound by layer, on one scale."
    table = titled("bounds whose hypotheses are met", f"{legend}\n{said}" if legend else said)
    wide = console().width >= 72  # in little room numbers are left out, never cut
    table.add_column("theorem", no_wrap=True)
    if wide:
        table.add_column("layers", no_wrap=True)
    for heading in ("at", "", "measured", "", "bound", "slack"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in met:
        measured, bound = sparklines(*zip(*each.by_layer, strict=True))
        table.add_row(
            escape(each.theorem),
            *([each.layers] if wide else []),
            str(each.layer),
            escape(quantity(each.quantity).short),
            f"{each.measured}\n{measured}",
            each.sign,
            f"{each.proved}\n{bound}",
            each.slack,
        )
    return table


def reasons_table(found: "Certificates") -> "Table":
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    from rich.markup import escape
    from rich.table import Table

    from rankscope.theory.views import failed_hypotheses

    table = Table(title="hypotheses that fail", title_justify="left", box=None)
    table.add_column("hypothesis", ratio=3)
    for heading in ("found", "must be"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("so not", ratio=3, overflow="fold")
    for each in failed_hypotheses(found.table):
        table.add_row(*map(escape, (each.says, each.number, each.limit, ", ".join(each.theorems))))
    return table


def require_positive_threshold(threshold: float) -> None:
    """Refuse a threshold that is none, before anything is computed."""
    if not (math.isfinite(threshold) and threshold > 0):
        raise TheoremError(f"threshold must be a number > 0, as in 1e-6; got {threshold:g}")
