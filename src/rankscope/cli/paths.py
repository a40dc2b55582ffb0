"""`rankscope paths`: which lengths and heads carry a network's output."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli.options import Init, Json, Model, Output, Quiet, Samples, Seed, Tokens

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from rankscope.paths import ByLength, Decomposition


def paths(
    model: Model = "minilm",
    variant: Annotated[
        str, typer.Option(help="transformer, san, san+skip, san+norm+skip, ...")
    ] = "transformer",
    init: Init = "bert",
    top: Annotated[int, typer.Option(min=0, help="So many of the heaviest single paths.")] = 0,
    tokens: Tokens = 64,
    samples: Samples = 4,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take a network apart into paths: one head, or none, in every layer. All of them, exactly.

    Attention, norms and activations are frozen as measured on excerpts of Moby Dick; the terms of all paths
    then add up to the output, and are summed by length, layer and head.
    """
    from rankscope.cli.measure import about, prose
    from rankscope.cli.show import console, machine, say, say_report
    from rankscope.nets import named_variant
    from rankscope.paths import decompose
    from rankscope.sources import named_network

    net = named_variant(named_network(model, seed, init), variant)
    d = decompose(net, *prose(net, samples, tokens))
    found = d.by_length()
    heads = d.by_head()
    heaviest = d.top(top) if top else None
    manifest = {**about(net, model), "variant": variant, "tokens": tokens, "samples": samples,
                "architecture": net.arch.to_dict(), "closure": found.closure}  # fmt: skip
    if output is not None:
        write(d, found, heads, output, manifest)
    if as_json:
        listed = None if heaviest is None else heaviest.__dict__
        machine(
            {
                "manifest": manifest,
                "lengths": found.table.to_dicts(),
                "heads": heads.to_dicts(),
                "top": listed,
            }
        )
        return
    console().print(lengths_table(found))
    say(f"The parts add up to the output within {found.closure:.0e} of it.", "")
    console().print(heads_table(heads))
    if heaviest is not None:
        say("", _proved(heaviest.proved, len(heaviest.paths), heaviest.looked_at))
        for path, weight in zip(heaviest.paths, heaviest.weights, strict=True):
            say(f"  {weight:10.4g}  {' '.join('·' if head is None else str(head) for head in path)}")
    if output is not None and not quiet:
        say("", f"Tables and figures: {output}")
        say_report(output / "report.html")


def write(
    d: "Decomposition", found: "ByLength", heads: "pl.DataFrame", folder: Path, manifest: dict[str, Any]
) -> None:
    """Tables in Parquet, figures, the manifest and the report."""
    import json

    from rankscope.figures import save
    from rankscope.files import write_text
    from rankscope.paths.plot import plot_heads, plot_single
    from rankscope.report import write_report, write_tables

    tables = {"lengths": found.table, "layers": d.by_layer(), "heads": heads, "single_paths": d.residuals()}
    write_tables(folder, tables, manifest)
    save(found.plot(), folder / "lengths")
    save(plot_heads(heads), folder / "heads")
    save(plot_single(tables["single_paths"]), folder / "single_paths")
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    write_report([folder], folder / "report.html")


def lengths_table(found: "ByLength") -> "Table":
    """A line for each length: how many paths, what they share, how uniform their sum is."""
    import polars as pl
    from rich.table import Table

    from rankscope.figures import power

    table = Table(title="paths by length, mean over samples", title_justify="left", box=None)
    for heading in ("length", "paths", "share", "from biases", "norm", "res / norm"):
        table.add_column(heading, justify="right", no_wrap=True)
    means = found.table.group_by("length", "start", maintain_order=True).agg(
        pl.col("share", "norm").mean(),
        pl.col("relative_residual").log10().mean(),
        pl.col("below_floor").all(),
    )
    for length, count in enumerate(found.counts):
        own, bias = (
            means.filter(length=length, start=start).row(0, named=True) for start in ("embedding", "bias")
        )
        exists = own["norm"] > 0
        residual = power(own["relative_residual"]) if exists else "–"
        table.add_row(
            str(length),
            f"{count:,}" if count < 10**12 else f"{count:.2e}",
            f"{own['share']:+.3f}" if exists else "–",
            f"{bias['share']:+.3f}" if bias["norm"] > 0 else "",
            power_of(own["norm"]) if exists else "–",
            f"{residual} ○" if exists and own["below_floor"] else residual,
        )
    return table


def heads_table(heads: "pl.DataFrame") -> "Table":
    """The heads through which most of the output passes, and those that average most."""
    import polars as pl
    from rich.table import Table

    means = heads.group_by("layer", "head").agg(
        pl.col("share", "residual_share", "contraction", "averaging", "dobrushin").mean()
    )
    table = Table(title="heads, mean over samples", title_justify="left", box=None)
    for heading in ("layer", "head", "share", "of residual", "contraction", "averaging", "dobrushin"):
        table.add_column(heading, justify="right", no_wrap=True)
    carrying = means.sort(pl.col("share").abs(), descending=True).head(5)
    contracting = means.filter(pl.col("averaging").is_finite()).sort("averaging").head(3)
    for number, part in enumerate((carrying, contracting)):
        if number:
            table.add_section()
        for row in part.iter_rows(named=True):
            shares = [f"{row[name]:+.3f}" for name in ("share", "residual_share")]
            factors = [f"{row[name]:.3f}" for name in ("contraction", "averaging", "dobrushin")]
            shown = ["–" if "nan" in number else number for number in (*shares, *factors)]  # noise
            table.add_row(str(row["layer"]), str(row["head"]), *shown)
    table.caption = "Above: those that carry most of the output. Below: those that average most."
    table.caption_justify = "left"
    return table


def power_of(value: float) -> str:
    """A number in little room, at any scale."""
    import math

    from rankscope.figures import power

    return power(math.log10(value)) if value > 0 else "0"


def _proved(proved: int, listed: int, looked: int) -> str:
    if proved == listed:
        return f"The {listed} heaviest single paths, proved after {looked} beginnings:"
    return (
        f"Heavy single paths; {proved} of {listed} are proved to be the heaviest after {looked} beginnings, "
        "the others are the heaviest met:"
    )
