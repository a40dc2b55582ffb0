"""`rankscope bounds`: what is proved of a network on an input, next to what is measured."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.inputs import manifest_fields, network, random_weights_lines, read_inputs, split_names, text_fields
from rankscope.cli.output import open_store, require_same_network, where_written, with_manifest, write_folder
from rankscope.cli.show import Interruption, machine, progress, say, say_report, show_tables

if TYPE_CHECKING:
    from rankscope.theory import Certificates


@dataclass(frozen=True)
class TheoremOptions:
    """Options that say which theorems are evaluated, on tokens of which size."""

    scale: Annotated[float, opt.option(opt.TEXT, "FACTOR", "scale")] = 1.0
    theorems: Annotated[str | None, opt.option(opt.RESULT, "NAMES", "theorems", names.THEOREMS, show_default="all")] = (
        None
    )
    threshold: opt.Threshold = 1e-6


def bounds(
    model: opt.Model = "minilm",
    options: opt.NetworkOptions = opt.NetworkOptions(),
    variant: opt.Variant = "transformer",
    stream: opt.Stream = False,
    text: opt.TextOptions = opt.TextOptions(samples=2, tokens=32),
    theory: TheoremOptions = TheoremOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Certify a network: every theorem with its hypotheses checked on this network and this text.

    A bound whose hypotheses fail is not shown, and the line says which hypothesis fails. One that holds but
    says nothing (as large as the tokens, or zero) is called vacuous. Everything is measured in deviation
    arithmetic.
    """
    from rankscope.theory import certify, theorems_named
    from rankscope.theory.depth import depth_of
    from rankscope.theory.figures import failing_table

    theorem_names = None if theory.theorems is None else split_names("theorems", theory.theorems)
    theorems_named(theorem_names)
    opt.require_positive(threshold=theory.threshold, scale=theory.scale)
    excerpts = read_inputs(text, model, quiet=results.silent)
    store = open_store(results.output)
    net = network(model, options, stream=stream, quiet=results.silent).variant(variant)
    require_same_network(store, "bounds", {variant: net}, manifest_fields(net, model))
    X, padding = net.encode(excerpts, text.tokens)
    parts: list[Certificates] = []
    try:
        with progress(results.silent) as start:
            bar = start(variant)
            for sample in range(len(X)):
                bar(sample, len(X), f"{variant}, sample {sample + 1} of {len(X)}")
                tokens, empty = theory.scale * X[sample : sample + 1], padding[sample : sample + 1]
                parts.append(certify(net, tokens, empty, theorem_names, variant=variant))
    except KeyboardInterrupt:
        if not parts:
            raise
    fields = {**manifest_fields(net, model), "scale": theory.scale, **text_fields(text, excerpts[: len(parts)])}
    certificates = with_manifest(joined(parts), **fields)
    depth = depth_of(certificates, theory.threshold)
    if store is not None:
        has_figure = any(quantity != "affine_rank" for quantity in certificates.table["quantity"].unique())
        figures = {"bounds": certificates.plot()} if has_figure else {}
        write_folder(store, "bounds", certificates, figures)
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
        say("", *random_weights_lines(certificates.manifest))
        wrong = " A measurement contradicts a theorem: please report this network."
        say(f"{depth.said}{wrong if len(certificates.broken()) else ''}")
        say_report(results.report, results, "Certificates and figures")
    if len(parts) < len(excerpts):
        raise Interruption(f"after {len(parts)} of {len(excerpts)} samples; {where_written(results.output)}")


def joined(parts: "list[Certificates]") -> "Certificates":
    """The certificates of several samples as one table, from those of each sample."""
    import polars as pl

    from rankscope.theory import Certificates

    table = pl.concat(part.table.with_columns(sample=pl.lit(k, pl.Int64)) for k, part in enumerate(parts))
    table = table.sort(pl.col("theorem").cast(pl.Enum(parts[0].theorems)), "sample", "layer")
    first = parts[0].manifest.networks[0]
    counts = [count for part in parts for count in part.manifest.networks[0].checks["tokens"]]
    checks = {**first.checks, "samples": len(parts), "tokens": counts}
    return Certificates(table, parts[0].manifest.adding(networks=(first.adding(checks=checks),)))
