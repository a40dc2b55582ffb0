"""`rankscope paths`: which lengths and heads carry a network's output."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

from rankscope.cli import options as opt
from rankscope.cli.inputs import network, random_weights_lines, read_excerpts, text_fields
from rankscope.cli.output import open_store, write_folder

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from rankscope.nets import Transformer
    from rankscope.paths import ByLength, Decomposition, Heaviest
    from rankscope.paths.views import LengthView
    from rankscope.runs import Manifest, Store


def paths(
    model: opt.Model = "minilm",
    variant: opt.Variant = "transformer",
    network_options: opt.NetworkOptions = opt.NetworkOptions(),
    device: opt.Device = "cpu",
    text: opt.TextOptions = opt.TextOptions(tokens=64),
    top: Annotated[int, opt.option(opt.RESULT, "N", "List the N heaviest single paths.", min=0)] = 0,
    output: opt.Output = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Take a network apart into paths: one head, or none, in every layer. All of them, exactly.

    Attention, norms and activations are frozen as measured on the text; the terms of all paths then add up to
    the output, and are summed by length, layer and head.
    """
    from rankscope.cli.exits import Interruption
    from rankscope.cli.measure import manifest_fields, where_written
    from rankscope.cli.show import console, machine, progress, say, say_written
    from rankscope.paths.views import carried
    from rankscope.runs import manifest_of

    excerpts = read_excerpts(text)
    net = network(model, network_options, device, quiet=printing.silent).variant(variant)
    store = open_store(output)
    sums = sum_paths(net, excerpts, text.tokens, top, printing.silent)
    by_length, heads, heaviest = sums.by_length, sums.heads, sums.heaviest
    arch = {"architecture": net.arch.to_dict(), "fingerprint": net.fingerprint}
    checks = {"closure": by_length.closure}
    manifest = manifest_of(arch, str(net.device), variant, "float64", [], checks).adding(
        **manifest_fields(net, model), **text_fields(text, excerpts), closure=by_length.closure
    )
    if store is not None:
        with progress(printing.silent) as start:
            start("single paths by length, figures")
            write_paths(sums, store, manifest)
    if printing.as_json:
        machine(
            {
                "manifest": manifest.to_dict(),
                "lengths": by_length.table.to_dicts(),
                "heads": None if heads is None else heads.to_dicts(),
                "top": None if heaviest is None else heaviest.__dict__,
            }
        )
    else:
        lengths = by_length.views()
        console().print(lengths_table(lengths))
        say(
            *random_weights_lines(manifest),
            carried(lengths),
            f"The parts add up to the output within {by_length.closure:.0e} of it.",
        )
        if heads is not None:
            say("")
            console().print(heads_table(heads))
        if heaviest is not None:
            say("", _heaviest_title(heaviest.proved, len(heaviest.paths), heaviest.explored))
            for path, (weight, mark) in zip(heaviest.paths, heaviest.weight_notes(), strict=True):
                heads_of = " ".join("·" if head is None else str(head) for head in path)
                say(f"  {weight:>10}  {heads_of}{f'  ({mark})' if mark else ''}")
        if not printing.quiet:
            say_written("Tables and figures", output)
    if sums.stopped:
        done = "lengths" if heads is None else "lengths and heads"
        raise Interruption(f"after {done}; {where_written(output)}")


class PathSums(NamedTuple):
    """The sums over a network's paths; after Ctrl-C, those that were finished."""

    decomposition: "Decomposition"
    by_length: "ByLength"
    heads: "pl.DataFrame | None" = None
    heaviest: "Heaviest | None" = None
    stopped: bool = False


def sum_paths(net: "Transformer", excerpts: list[str], tokens: int, top: int, quiet: bool) -> PathSums:
    """Sum the paths of a network by length and by head, and find the `top` heaviest single ones."""
    from rankscope.cli.show import steps
    from rankscope.paths import decompose

    by_length = heads = heaviest = None
    expected = [1.0, 2.0, 2.0, *([60.0] if top else [])]  # shares of the time, as for a BERT-base
    try:
        with steps(quiet, expected) as step:
            step("the network, frozen")
            decomposition = decompose(net, *net.encode(excerpts, tokens))
            step("lengths")
            by_length = decomposition.by_length()
            step("heads")
            heads = decomposition.by_head()
            if top:
                heaviest = decomposition.top(top, progress=step("heaviest single paths"))
    except KeyboardInterrupt:
        if by_length is None:
            raise
        return PathSums(decomposition, by_length, heads, stopped=True)
    return PathSums(decomposition, by_length, heads, heaviest)


def write_paths(sums: PathSums, store: "Store", manifest: "Manifest") -> None:
    """Write tables, figures and the report; if Ctrl-C came before the heads, only the lengths."""
    from rankscope.figures.plot import plot
    from rankscope.paths.figures import heads_chart, single_paths_chart

    tables = {"lengths": sums.by_length.table}
    figures = {"lengths": sums.by_length.plot()}
    if sums.heads is not None:
        single = sums.decomposition.residuals()
        tables |= {"layers": sums.decomposition.by_layer(), "heads": sums.heads, "single_paths": single}
        both = heads_chart(sums.heads, "share").beside(heads_chart(sums.heads))
        figures |= {"heads": plot(both), "single_paths": plot(single_paths_chart(single))}
    write_folder(store, "paths", manifest, tables, figures)


def lengths_table(lengths: "list[LengthView]") -> "Table":
    """A line for each length: number of paths, their share, how uniform their sum is; beneath, as curves."""
    from rich.table import Table

    from rankscope.cli.show import scaled_for_sparkline, sparkline, thinned

    table = Table(title="paths by length, mean over samples", title_justify="left", box=None)
    for heading in lengths[0].cells:
        table.add_column(heading, justify="right", no_wrap=True)
    for length in lengths:
        table.add_row(*length.cells.values())
    shares, residuals = [length.share for length in lengths], [length.log10_residual for length in lengths]
    table.caption = f"share {sparkline(thinned(shares))}   res / norm {sparkline(scaled_for_sparkline(residuals))}"
    table.caption_justify = "left"
    return table


def heads_table(heads: "pl.DataFrame") -> "Table":
    """The heads through which most of the output passes, and those that average most."""
    import polars as pl

    from rankscope.cli.show import console, titled
    from rankscope.paths.views import head_means

    means = head_means(heads)
    below = "Above: those that carry most of the output. Below: those that average most."
    table = titled("heads, mean over samples", below)
    columns = {"share": "share", "of residual": "residual_share", "contraction": "contraction",
               "averaging": "averaging", "dobrushin": "dobrushin"}  # fmt: skip
    if console().width < 72:
        del columns["contraction"]  # in little room numbers are left out, never cut
    for heading in ("layer", "head", *columns):
        table.add_column(heading, justify="right", no_wrap=True)
    carrying = means.sort(pl.col("share").abs(), descending=True, nulls_last=True).head(5)
    contracting = means.filter(pl.col("averaging").is_finite()).sort("averaging").head(3)
    for rows in (carrying, contracting):
        if rows is contracting:
            table.add_row()
        for row in rows.iter_rows(named=True):
            numbers = [
                "–" if row[name] is None else f"{row[name]:{'+' if 'share' in name else ''}.3f}"  # noise
                for name in columns.values()
            ]
            table.add_row(str(row["layer"]), str(row["head"]), *numbers)
    return table


def _heaviest_title(proved: int, listed: int, looked: int) -> str:
    if proved == listed:
        return f"The {listed} heaviest single paths, proved after {looked} beginnings:"
    return (
        f"Heavy single paths; {proved} of {listed} are proved to be the heaviest after {looked} beginnings, "
        "the others are the heaviest met:"
    )
