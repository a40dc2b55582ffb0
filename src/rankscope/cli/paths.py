"""`rankscope paths`: which lengths and heads carry a network's output."""

from typing import TYPE_CHECKING, Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import described, drawn_at_random, excerpts_of, network
from rankscope.cli.output import opened, write_folder

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
    mask: opt.Mask = None,
    layers: opt.Layers = None,
    remedy: opt.Remedy = None,
    init: opt.Init = None,
    seed: opt.Seed = None,
    device: opt.Device = "cpu",
    text: opt.Text = None,
    split: opt.Split = "auto",
    field: opt.Field = "text",
    samples: opt.Samples = 4,
    tokens: opt.Tokens = 64,
    top: Annotated[int, opt.option(opt.RESULT, "N", "List the N heaviest single paths.", min=0)] = 0,
    output: opt.Output = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Take a network apart into paths: one head, or none, in every layer. All of them, exactly.

    Attention, norms and activations are frozen as measured on the text; the terms of all paths then add up to
    the output, and are summed by length, layer and head.
    """
    from rankscope.cli.exits import Stopped
    from rankscope.cli.measure import about, kept
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.paths.views import carried
    from rankscope.runs import manifest_of

    read = excerpts_of(text, split, field, samples, tokens)
    net = network(model, mask, layers, init, seed, device, remedies=remedy, quiet=quiet or as_json).variant(
        variant
    )
    store = opened(output)
    d, found, heads, heaviest, stopped = taken_apart(net, read, tokens, top, quiet or as_json)
    arch = {"architecture": net.arch.to_dict(), "fingerprint": net.fingerprint}
    manifest = manifest_of(arch, str(net.device), variant, "float64", [], {"closure": found.closure}).adding(
        **about(net, model), **described(text, split, field, read, tokens), closure=found.closure
    )
    if store is not None:
        with progress(quiet or as_json) as start:
            start("single paths by length, figures")
            write(d, found, heads, store, manifest)
    if as_json:
        machine(
            {
                "manifest": manifest.to_dict(),
                "lengths": found.table.to_dicts(),
                "heads": None if heads is None else heads.to_dicts(),
                "top": None if heaviest is None else heaviest.__dict__,
            }
        )
    else:
        lengths = found.views()
        console().print(lengths_table(lengths))
        say(
            *drawn_at_random(manifest),
            carried(lengths),
            f"The parts add up to the output within {found.closure:.0e} of it.",
        )
        if heads is not None:
            say("")
            console().print(heads_table(heads))
        if heaviest is not None:
            say("", _proved(heaviest.proved, len(heaviest.paths), heaviest.explored))
            for path, (weight, mark) in zip(heaviest.paths, heaviest.said(), strict=True):
                heads_of = " ".join("·" if head is None else str(head) for head in path)
                say(f"  {weight:>10}  {heads_of}{f'  ({mark})' if mark else ''}")
        if output is not None and not quiet:
            say("")
            say_where("Tables and figures", output)
            say_where("Report", output / "report.html")
    if stopped:
        done = "lengths" if heads is None else "lengths and heads"
        raise Stopped(f"after {done}; {kept(output)}")


def taken_apart(
    net: "Transformer", read: list[str], tokens: int, top: int, quiet: bool
) -> "tuple[Decomposition, ByLength, pl.DataFrame | None, Heaviest | None, bool]":
    """The decomposition, its lengths, its heads, its heaviest paths, and whether Ctrl-C came before all of
    them were there."""
    from rankscope.cli.show import steps
    from rankscope.paths import decompose

    found = heads = heaviest = None
    weights = [1.0, 2.0, 2.0, *([60.0] if top else [])]  # as they are for a BERT-base
    try:
        with steps(quiet, weights) as step:
            step("the network, frozen")
            d = decompose(net, *net.encode(read, tokens))
            step("lengths")
            found = d.by_length()
            step("heads")
            heads = d.by_head()
            if top:
                heaviest = d.top(top, progress=step("heaviest single paths"))
    except KeyboardInterrupt:
        if found is None:
            raise
        return d, found, heads, None, True
    return d, found, heads, heaviest, False


def write(
    d: "Decomposition", found: "ByLength", heads: "pl.DataFrame | None", store: "Store", manifest: "Manifest"
) -> None:
    """Tables, figures and the report; of a run that was stopped before its heads, what there is."""
    from rankscope.figures.plot import plot
    from rankscope.paths.figures import heads_chart, single_paths_chart

    tables = {"lengths": found.table}
    figures = {"lengths": found.plot()}
    if heads is not None:
        tables |= {"layers": d.by_layer(), "heads": heads, "single_paths": d.residuals()}
        both = heads_chart(heads, "share").beside(heads_chart(heads))
        figures |= {"heads": plot(both), "single_paths": plot(single_paths_chart(tables["single_paths"]))}
    write_folder(store, "paths", manifest, tables, figures)


def lengths_table(lengths: "list[LengthView]") -> "Table":
    """A line for each length: how many paths, what they share, how uniform their sum is; and the shares and
    residuals of all lengths as curves."""
    from rich.table import Table

    from rankscope.cli.show import drawn, sparkline, thinned

    table = Table(title="paths by length, mean over samples", title_justify="left", box=None)
    for heading in lengths[0].cells:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in lengths:
        table.add_row(*each.cells.values())
    shares, residuals = [each.share for each in lengths], [each.log10_residual for each in lengths]
    table.caption = f"share {sparkline(thinned(shares))}   res / norm {sparkline(drawn(residuals))}"
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
    for place, part in enumerate((carrying, contracting)):
        if place:
            table.add_row()
        for row in part.iter_rows(named=True):
            numbers = [
                "–" if row[name] is None else f"{row[name]:{'+' if 'share' in name else ''}.3f}"  # noise
                for name in columns.values()
            ]
            table.add_row(str(row["layer"]), str(row["head"]), *numbers)
    return table


def _proved(proved: int, listed: int, looked: int) -> str:
    if proved == listed:
        return f"The {listed} heaviest single paths, proved after {looked} beginnings:"
    return (
        f"Heavy single paths; {proved} of {listed} are proved to be the heaviest after {looked} beginnings, "
        "the others are the heaviest met:"
    )
