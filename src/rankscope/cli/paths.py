"""`rankscope paths`: which lengths and heads carry a network's output. `rankscope bounds`: what is proved of a network
on an input, next to what is measured."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rankscope.cli import inputs
from rankscope.cli import options as opt
from rankscope.cli.output import open_store, require_same_network, where_written, with_manifest, write_figures
from rankscope.cli.show import Interruption, machine, progress, say, say_report, show_tables, steps

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.paths import ByLength, Decomposition, Heaviest
    from rankscope.runs import Manifest, Store
    from rankscope.theory import Certificates


def paths(
    model: opt.Model = "minilm",
    options: opt.NetworkOptions = opt.NetworkOptions(),
    variant: opt.Variant = "transformer",
    device: opt.Device = "cpu",
    text: opt.TextOptions = opt.TextOptions(max_length=64),
    top: Annotated[int, opt.option(opt.RESULT, "N", "List the N heaviest single paths.", min=0)] = 0,
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Take a network apart into paths: one head, or none, in every layer. All of them, exactly.

    Attention, norms and activations are frozen as measured on the text; the terms of all paths then add up to
    the output, and are summed by length, layer and head.
    """
    from rankscope.runs import manifest_of

    excerpts = inputs.read_inputs(text, model, quiet=results.silent)
    store = open_store(results.output)
    net = inputs.network(model, options, device, quiet=results.silent).variant(variant)
    require_same_network(store, "paths", {variant: net}, inputs.manifest_fields(net, model))
    sums = sum_paths(net, excerpts, text.max_length, top, results.silent)
    closure = sums.by_length.closure
    arch = {"architecture": net.arch.to_dict(), "fingerprint": net.fingerprint}
    manifest = manifest_of(arch, str(net.device), variant, "float64", [], {"closure": closure}).adding(
        **inputs.manifest_fields(net, model), **inputs.text_fields(text, excerpts), closure=closure
    )
    if store is not None:
        with progress(results.silent) as start:
            start("single paths by length, figures")
            write_paths(sums, store, manifest)
    if results.as_json:
        machine(
            {
                "manifest": manifest.to_dict(),
                "lengths": sums.by_length.table.to_dicts(),
                "heads": None if sums.heads is None else sums.heads.to_dicts(),
                "top": None if sums.heaviest is None else sums.heaviest.__dict__,
            }
        )
    else:
        show_paths(sums, manifest)
        say_report(results.report, results, "Tables and figures")
    if sums.stopped:
        done = "lengths" if sums.heads is None else "lengths and heads"
        raise Interruption(f"after {done}; {where_written(results.output)}")


class PathSums(NamedTuple):
    """The sums over a network's paths; after Ctrl-C, those that were finished."""

    decomposition: "Decomposition"
    by_length: "ByLength"
    heads: "pl.DataFrame | None" = None
    heaviest: "Heaviest | None" = None
    stopped: bool = False


def sum_paths(net: "Transformer", excerpts: "list[str] | Tensor", tokens: int, top: int, quiet: bool) -> PathSums:
    """Sum the paths of a network by length and by head, and find the `top` heaviest single ones."""
    from rankscope.paths import decompose

    sums = None
    expected = [1.0, 2.0, 2.0, *([60.0] if top else [])]  # shares of the time, as for a BERT-base
    try:
        with steps(quiet, expected) as step:
            step("the network, frozen")
            decomposition = decompose(net, *net.encode(excerpts, tokens))
            step("lengths")
            sums = PathSums(decomposition, decomposition.by_length())
            step("heads")
            sums = sums._replace(heads=decomposition.by_head())
            if top:
                sums = sums._replace(heaviest=decomposition.top(top, progress=step("heaviest single paths")))
    except KeyboardInterrupt:
        if sums is None:
            raise
        return sums._replace(stopped=True)
    return sums


def write_paths(sums: PathSums, store: "Store", manifest: "Manifest") -> None:
    """Write tables, figures and the report; if Ctrl-C came before the heads, only the lengths."""
    from rankscope.figures import plot
    from rankscope.paths import heads_chart, single_paths_chart

    figures = {"lengths": sums.by_length.plot()}
    if sums.heads is None:
        store.write("paths", manifest, {"lengths": sums.by_length.table})
        return write_figures(store, figures)
    single = sums.decomposition.residuals()
    both = heads_chart(sums.heads, "share").beside(heads_chart(sums.heads))
    figures |= {"heads": plot(both), "single_paths": plot(single_paths_chart(single))}
    replace(sums.decomposition, given=manifest).write(store, "paths", {"single_paths": single})
    write_figures(store, figures)


def show_paths(sums: PathSums, manifest: "Manifest") -> None:
    """Print the tables of lengths and heads, what is carried by which lengths, and the heaviest single paths."""
    from rankscope.paths import carried, heads_table

    lengths = sums.by_length.overview().tables[0]
    show_tables(replace(lengths, title="Paths by length"), *([] if sums.heads is None else [heads_table(sums.heads)]))
    say("", *inputs.random_weights_lines(manifest), carried(sums.by_length.views()))
    if heaviest := sums.heaviest:
        listed, explored = len(heaviest.paths), f"after {heaviest.explored} beginnings"
        title = f"The {listed} heaviest single paths (a head, or · for the skip, in each layer), proved {explored}:"
        if heaviest.proved < listed:
            title = (
                f"Heavy single paths; {heaviest.proved} of {listed} are proved to be the heaviest {explored}, "
                "the others are the heaviest met:"
            )
        say("", title)
        for path, (weight, mark) in zip(heaviest.paths, heaviest.weight_notes(), strict=True):
            heads = " ".join("·" if head is None else str(head) for head in path)
            say(f"  {weight:>10}  {heads}{f'  ({mark})' if mark else ''}")


@dataclass(frozen=True)
class TheoremOptions:
    """Options that say which theorems are evaluated, on tokens of which size."""

    scale: Annotated[float, opt.option(opt.TEXT, "FACTOR", "scale")] = 1.0
    theorems: Annotated[str | None, opt.option(opt.RESULT, "NAMES", "theorems", opt.THEOREMS, show_default="all")] = (
        None
    )
    threshold: opt.Threshold = 1e-6


def bounds(
    model: opt.Model = "minilm",
    options: opt.NetworkOptions = opt.NetworkOptions(),
    variant: opt.Variant = "transformer",
    device: opt.Device = "cpu",
    stream: opt.Stream = False,
    text: opt.TextOptions = opt.TextOptions(samples=2, max_length=32),
    theory: TheoremOptions = TheoremOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Certify a network: every theorem with its hypotheses checked on this network and this text.

    A bound whose hypotheses fail is not shown, and the line says which hypothesis fails. One that holds but
    says nothing (as large as the tokens, or zero) is called vacuous. Everything is measured in deviation
    arithmetic.
    """
    from rankscope.theory import depth_of, failing_table, theorems_named

    theorem_names = None if theory.theorems is None else inputs.split_names("theorems", theory.theorems)
    theorems_named(theorem_names)
    opt.require_positive(threshold=theory.threshold, scale=theory.scale)
    excerpts = inputs.read_inputs(text, model, quiet=results.silent)
    store = open_store(results.output)
    net = inputs.network(model, options, device, stream, results.silent).variant(variant)
    require_same_network(store, "bounds", {variant: net}, inputs.manifest_fields(net, model))
    X, padding = net.encode(excerpts, text.max_length)
    certificates = certify_samples(net, theory.scale * X, padding, theorem_names, variant, results.silent)
    done = certificates.samples
    read = inputs.text_fields(text, excerpts[:done])
    certificates = with_manifest(certificates, **inputs.manifest_fields(net, model), scale=theory.scale, **read)
    depth = depth_of(certificates, theory.threshold)
    if store is not None:
        has_figure = any(quantity != "affine_rank" for quantity in certificates.table["quantity"].unique())
        figures = {"bounds": certificates.plot()} if has_figure else {}
        certificates.write(store, "bounds")
        write_figures(store, figures)
    if results.as_json:
        collapse = {name: getattr(depth, name).to_dicts() for name in ("measured", "guaranteed")}
        manifest = certificates.manifest.to_dict()
        machine({"manifest": manifest, "table": certificates.table.to_dicts(), "collapse": collapse})
    else:
        (bounded,) = certificates.overview().tables
        failing = failing_table(certificates.table, variant)
        note = bounded.note.replace(
            "Figure: the first sample", "By layer: measured, beneath it the bound, on one scale"
        )
        bounded = replace(bounded, title="Bounds whose hypotheses are met", note=note)
        show_tables(bounded, *([failing] if failing.rows else []))
        say("", *inputs.random_weights_lines(certificates.manifest))
        wrong = " A measurement contradicts a theorem: please report this network."
        say(f"{depth.said}{wrong if len(certificates.broken()) else ''}")
        say_report(results.report, results, "Certificates and figures")
    if done < len(excerpts):
        raise Interruption(f"after {done} of {len(excerpts)} samples; {where_written(results.output)}")


def certify_samples(
    net: "Transformer", X: "Tensor", padding: "Tensor", theorem_names: list[str] | None, variant: str, quiet: bool
) -> "Certificates":
    """The certificates of all samples as one table; after Ctrl-C, of those that were finished."""
    import polars as pl

    from rankscope.theory import Certificates, certify

    parts: list[Certificates] = []
    try:
        with progress(quiet) as start:
            bar = start(variant)
            for sample in range(len(X)):
                bar(sample, len(X), f"{variant}, sample {sample + 1} of {len(X)}")
                alone = slice(sample, sample + 1)
                parts.append(certify(net, X[alone], padding[alone], theorem_names, variant=variant))
    except KeyboardInterrupt:
        if not parts:
            raise
    table = pl.concat(part.table.with_columns(sample=pl.lit(k, pl.Int64)) for k, part in enumerate(parts))
    table = table.sort(pl.col("theorem").cast(pl.Enum(parts[0].theorems)), "sample", "layer")
    first = parts[0].manifest.networks[0]
    counts = [count for part in parts for count in part.manifest.networks[0].checks["tokens"]]
    checks = {**first.checks, "samples": len(parts), "tokens": counts}
    return Certificates(table, parts[0].manifest.adding(networks=(first.adding(checks=checks),)))
