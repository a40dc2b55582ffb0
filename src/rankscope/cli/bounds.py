"""`rankscope bounds`: what is proved of a network on an input, next to what is measured."""

import math
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.inputs import network, random_weights_lines, read_excerpts, split_names, text_fields
from rankscope.cli.output import open_store, with_manifest, write_folder
from rankscope.errors import TheoremError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.theory import Certificates
    from rankscope.theory.views import BoundView

SCALE = "Multiply the tokens by this factor: the theorems are about small residuals."
THEOREMS = "Comma-separated names of theorems, as the table has them."


def bounds(
    model: opt.Model = "minilm",
    variant: opt.Variant = "transformer",
    network_options: opt.NetworkOptions = opt.NetworkOptions(),
    stream: opt.Stream = False,
    text: opt.TextOptions = opt.TextOptions(samples=2, tokens=32),
    scale: Annotated[float, opt.option(opt.TEXT, "FACTOR", SCALE)] = 1.0,
    theorems: Annotated[
        str | None, opt.option(opt.RESULT, "NAMES", THEOREMS, names.THEOREMS, show_default="all")
    ] = None,
    threshold: opt.Threshold = 1e-6,
    output: opt.Output = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Certify a network: every theorem with its hypotheses checked on this network and this text.

    A bound whose hypotheses fail is not shown, and the line says which hypothesis fails. One that holds but
    says nothing (as large as the tokens, or zero) is called vacuous. Everything is measured in deviation
    arithmetic.
    """
    from rankscope.cli.exits import Interruption
    from rankscope.cli.measure import manifest_fields, where_written
    from rankscope.cli.show import console, machine, say, say_written
    from rankscope.theory.catalogue import theorems_named
    from rankscope.theory.depth import depth_of

    theorem_names = None if theorems is None else split_names("theorems", theorems)
    theorems_named(theorem_names)
    require_positive_threshold(threshold)
    if not (math.isfinite(scale) and scale > 0):
        raise TheoremError(f"--scale must be a number > 0; got {scale:g}", subject="scale")
    excerpts = read_excerpts(text)
    net = network(model, network_options, stream=stream, quiet=printing.silent).variant(variant)
    store = open_store(output)
    X, padding = net.encode(excerpts, text.tokens)
    certificates, done = certify_samples(net, scale * X, padding, theorem_names, variant, printing.silent)
    fields = {**manifest_fields(net, model), "scale": scale, **text_fields(text, excerpts[:done])}
    certificates = with_manifest(certificates, **fields)
    depth = depth_of(certificates, threshold)
    if store is not None:
        drawn = any(quantity != "affine_rank" for quantity in certificates.table["quantity"].unique())
        figures = {"bounds": certificates.plot()} if drawn else {}
        write_folder(store, "bounds", certificates.manifest, {"certificates": certificates}, figures)
    if printing.as_json:
        collapse = {name: getattr(depth, name).to_dicts() for name in ("measured", "guaranteed")}
        manifest = certificates.manifest.to_dict()
        machine({"manifest": manifest, "table": certificates.table.to_dicts(), "collapse": collapse})
    else:
        console().print(summary_table(certificates.views()))
        say(*random_weights_lines(certificates.manifest))
        if not certificates.table["met"].all():
            say("")
            console().print(reasons_table(certificates))
        wrong = " A measurement contradicts a theorem: please report this network."
        say("", f"{depth.view().said}{wrong if len(certificates.broken()) else ''}")
        if not printing.quiet:
            say_written("Certificates and figures", output)
    if done < len(excerpts):
        raise Interruption(f"after {done} of {len(excerpts)} samples; {where_written(output)}")


def certify_samples(
    net: "Transformer", X: "Tensor", padding: "Tensor", theorems: list[str] | None, title: str, quiet: bool
) -> "tuple[Certificates, int]":
    """Certify sample by sample; after Ctrl-C, the certificates of the samples that were finished.

    Args:
        net: The network.
        X: Its tokens.
        padding: Where `X` is padding.
        theorems: Names of theorems; all if None.
        title: The name of the variant.
        quiet: Show no progress.

    Returns:
        The certificates, and of how many samples they are.
    """
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
    """Two lines for each theorem whose hypotheses are met from layer 1 on.

    The first has bound and measurement at the last layer at which the theorem says something, the second both
    by layer, on one scale.
    """
    from rich.markup import escape

    from rankscope.cli.show import console, sparklines, titled
    from rankscope.theory.views import QUANTITIES, quantity

    met = [bound for bound in bounds if bound.met_to]
    quantities = [quantity(name) for name in QUANTITIES if name in {bound.quantity for bound in met}]
    legend = "   ".join(f"{shown.short}: {shown.symbol}" for shown in quantities)
    note = "Slack in decades. Beneath: measured and bound by layer, on one scale."
    table = titled("bounds whose hypotheses are met", f"{legend}\n{note}" if legend else note)
    wide = console().width >= 72  # in little room numbers are left out, never cut
    table.add_column("theorem", no_wrap=True)
    if wide:
        table.add_column("layers", no_wrap=True)
    for heading in ("at", "", "measured", "", "bound", "slack"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bound in met:
        measured_line, bound_line = sparklines(*zip(*bound.by_layer, strict=True))
        table.add_row(
            escape(bound.theorem),
            *([bound.layers] if wide else []),
            str(bound.layer),
            escape(quantity(bound.quantity).short),
            f"{bound.measured}\n{measured_line}",
            bound.sign,
            f"{bound.proved}\n{bound_line}",
            bound.slack,
        )
    return table


def reasons_table(certificates: "Certificates") -> "Table":
    """A line for each hypothesis that fails: its value, its limit, and the theorems that need it."""
    from rich.markup import escape
    from rich.table import Table

    from rankscope.theory.views import failed_hypotheses

    table = Table(title="hypotheses that fail", title_justify="left", box=None)
    table.add_column("hypothesis", ratio=3)
    for heading in ("found", "must be"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("so not", ratio=3, overflow="fold")
    for failed in failed_hypotheses(certificates.table):
        table.add_row(*map(escape, (failed.says, failed.number, failed.limit, ", ".join(failed.theorems))))
    return table


def require_positive_threshold(threshold: float) -> None:
    """Refuse a threshold that is not a positive number, before anything is computed."""
    if not (math.isfinite(threshold) and threshold > 0):
        raise TheoremError(f"threshold must be a number > 0, as in 1e-6; got {threshold:g}", subject="threshold")
