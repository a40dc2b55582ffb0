"""`rankscope bounds`: what is proved of a network on an input, next to what is measured."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli.options import Init, Json, Model, Output, Quiet, Samples, Seed, Tokens

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.theory import Certificates, CollapseDepth


def bounds(
    model: Model = "minilm",
    variant: Annotated[
        str, typer.Option(help="transformer, san, san+skip, san+norm+skip, ...")
    ] = "transformer",
    theorems: Annotated[
        str | None, typer.Option(help="Comma-separated names, as the table has them; left out: all.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Tokens are uniform when the residual is below this share of them.")
    ] = 1e-6,
    mask: Annotated[str | None, typer.Option(help="A mask in place of the model's own.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Repeat the layers to this depth.")] = None,
    scale: Annotated[
        float, typer.Option(help="Multiply the tokens by it: the theorems are about small residuals.")
    ] = 1.0,
    init: Init = "bert",
    tokens: Tokens = 32,
    samples: Samples = 2,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Certify a network: every theorem with its hypotheses checked on this network and this text.

    A bound whose hypotheses fail is not shown, and the line says which. One that holds but says nothing (as
    large as the tokens, or zero) is called vacuous. All measured in deviation arithmetic.
    """
    from rankscope.cli.measure import about, listed, prose
    from rankscope.cli.show import console, machine, progress, say, say_report
    from rankscope.nets import named_variant
    from rankscope.sources import named_network
    from rankscope.theory import certify
    from rankscope.theory.depth import depth_of

    net = named_variant(named_network(model, seed, init), variant)
    if mask is not None or layers is not None:
        net = net.variant(mask=mask, layers=layers)
    X, padding = prose(net, samples, tokens)
    with progress(quiet or as_json) as start:
        bar = start(f"{variant}, samples")
        named = None if theorems is None else listed("theorems", theorems)
        found = certify(net, scale * X, padding, named, progress=bar)
    found.manifest.update(**about(net, model), variant=variant, tokens=tokens, samples=samples, scale=scale)
    depth = depth_of(found, threshold)
    if output is not None:
        write(found, output)
    if as_json:
        machine(
            {
                "manifest": found.manifest,
                "table": found.table.to_dicts(),
                "collapse": {
                    "measured": depth.measured.to_dicts(),
                    "guaranteed": depth.guaranteed.to_dicts(),
                },
            }
        )
        return
    console().print(summary_table(found))
    if not found.table["met"].all():
        say("")
        console().print(reasons_table(found))
    say("", verdict(found, depth))
    if output is not None and not quiet:
        say("", f"Certificates and figures: {output}")
        say_report(output / "report.html")


def write(found: "Certificates", folder: Path) -> None:
    """The table in Parquet, the figure, the manifest and the report."""
    import json

    from rankscope.figures import save
    from rankscope.files import write_text
    from rankscope.report import write_report

    found.save(folder / "certificates.parquet")
    if any(quantity != "affine_rank" for quantity in found.table["quantity"].unique()):
        save(found.plot(), folder / "bounds")
    write_text(folder / "manifest.json", json.dumps(found.manifest, indent=1, ensure_ascii=False) + "\n")
    write_report([folder], folder / "report.html")


def summary_table(found: "Certificates") -> "Table":
    """A line per theorem whose hypotheses are met from layer 1 on: bound and measurement at the last layer at
    which it says something."""
    import polars as pl
    from rich.table import Table

    table = Table(title="bounds whose hypotheses are met", title_justify="left", box=None)
    table.add_column("theorem", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    for heading in ("at", "", "measured", "", "bound", "slack"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.summary().filter(pl.col("met_to") > 0).iter_rows(named=True):
        says = row["says_at"] is not None
        table.add_row(
            row["theorem"],
            f"1–{row['met_to']}",
            str(row["says_at"] or row["met_to"]),
            SYMBOLS[row["quantity"]],
            _number(row["quantity"], row["log10_measured"]),
            "≤" if row["kind"] == "upper" else "≥",
            _number(row["quantity"], row["log10_bound"]) if says else "vacuous",
            f"{row['slack']:.3g}" if says else "",
        )
    table.caption = "res: ‖X−1xᵀ‖₁,∞   µ: ‖X−1xᵀ‖F   D: largest distance   rank: affine. Slack in decades."
    table.caption_justify = "left"
    return table


def reasons_table(found: "Certificates") -> "Table":
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    from rich.table import Table

    table = Table(title="hypotheses that fail", title_justify="left", box=None)
    table.add_column("hypothesis", ratio=3)
    for heading in ("found", "must be"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("so not", ratio=3, overflow="fold")
    failing: dict[tuple[str, str], dict[str, float]] = {}
    for theorem, hypotheses in found.table.select("theorem", "hypotheses").iter_rows():
        for each in hypotheses:
            if not each["met"]:
                numbers = failing.setdefault((each["says"], each["limit"]), {})
                numbers.setdefault(theorem, each["number"])
    for (says, limit), numbers in failing.items():
        table.add_row(says, f"{next(iter(numbers.values())):.4g}", limit, ", ".join(numbers))
    return table


def verdict(found: "Certificates", depth: "CollapseDepth") -> str:
    """What was measured of uniformity, and what is proved, in a sentence or two."""
    import polars as pl

    layers = [layer for layer in depth.measured["layer"].to_list() if layer is not None]
    share = f"{depth.threshold:g} of the tokens' size"
    samples, last = len(depth.measured), found.table["layer"].to_numpy().max()
    if len(layers) < samples:
        apart = f"in {samples - len(layers)} of {samples} samples tokens stay further apart than {share}"
        said = f"Measured: {apart} through layer {last}."
    else:
        said = f"Measured: tokens are uniform to {share} by layer {max(layers)}."
    by = depth.guaranteed.group_by("theorem", "kind", maintain_order=True).agg(
        pl.col("layer").max().alias("last"), pl.col("layer").min().alias("first"),
        pl.col("layer").is_null().any().alias("open"),
    )  # fmt: skip
    by = by.filter(~pl.col("open"), pl.col("theorem") != "exact-factors")  # that one is the measurement
    upper, lower = by.filter(kind="upper").sort("last"), by.filter(kind="lower").sort("first")
    if len(upper):
        said += f" Proved by layer {upper['last'][0]} ({upper['theorem'][0]})."
    if len(lower):
        said += f" Collapse to {share} is excluded up to layer {lower['first'][-1]} ({lower['theorem'][-1]})."
    if not len(upper) and not len(lower):
        said += " No theorem proves or excludes it."
    if len(found.broken()):
        said += " A measurement contradicts a theorem: please report this network."
    return said


SYMBOLS = {"residual": "res", "mu": "µ", "diameter": "D", "affine_rank": "rank"}


def _number(quantity: str, log10: float | None) -> str:
    """A size at any scale; a rank as a whole number."""
    from rankscope.figures import power

    if log10 is None or math.isnan(log10):
        return "–"
    return str(round(10**log10)) if quantity == "affine_rank" else power(log10)
