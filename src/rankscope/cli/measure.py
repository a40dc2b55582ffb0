"""`rankscope measure`: how uniform a network's tokens become, variant by variant."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli.options import (
    Batch,
    Field,
    Init,
    Json,
    Limit,
    Model,
    Output,
    Quiet,
    Samples,
    Seed,
    Split,
    Text,
    Tokens,
)

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Profile, Summary


def measure(
    model: Model = "minilm",
    variants: Annotated[
        str, typer.Option(help="Comma-separated: transformer, san, san+skip, san+norm+skip, san+mlp, ...")
    ] = "san,san+mlp,san+skip,transformer",
    metrics: Annotated[
        str, typer.Option(help="Comma-separated names; the first is drawn.")
    ] = "relative_residual,residual,relative_mu,mu",
    arithmetic: Annotated[
        str, typer.Option(help="deviation, float64, float32, bfloat16; several, comma-separated; or all.")
    ] = "deviation",
    mask: Annotated[str | None, typer.Option(help="A mask in place of the model's own.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Repeat the layers to this depth.")] = None,
    init: Init = "bert",
    tokens: Tokens = 128,
    samples: Samples = 4,
    text: Text = None,
    split: Split = "auto",
    field: Field = "text",
    limit: Limit = None,
    batch: Batch = 16,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how uniform the tokens become with depth, for a network and its variants.

    A loaded model reads excerpts of Moby Dick with its own tokenizer and embedding; a network with random
    weights, under a random embedding of words.

    With [bold]--text[/bold] it is your text, of any size: means, deviations and quantiles over its excerpts,
    one a line, a paragraph or a JSON line. With [bold]-o[/bold] an interrupted run goes on where it stopped.
    """
    from rankscope.cli.pictures import pictures
    from rankscope.cli.show import console, machine, profile_table, say, say_report
    from rankscope.profiles import ARITHMETICS
    from rankscope.sources import named_network

    net = named_network(model, seed, init)
    if mask is not None or layers is not None:
        net = net.variant(mask=mask, layers=layers)
    names, numbers = listed("variants", variants), listed("metrics", metrics)
    arithmetics = listed("arithmetic", arithmetic)
    arithmetics = list(ARITHMETICS) if "all" in arithmetics else arithmetics
    if text is not None:
        from rankscope.cli.corpus import Corpus, measure_text

        corpus = Corpus(text, split, field, limit, batch, tokens)
        measure_text(net, corpus, names, numbers, arithmetics, output, about(net, model), as_json, quiet)
        return
    X, padding = prose(net, samples, tokens)
    profile = measured(net, X, padding, names, numbers, arithmetics, quiet or as_json)
    profile.manifest.update(about(net, model))
    written = None
    if output is not None:
        tables = pictures(net, names, X, padding, passages(samples, tokens), tokens)
        written = write_run(profile, output, title_of(net), tables)
    if as_json:
        machine({"manifest": profile.manifest, "table": profile.table.to_dicts()})
        return
    console().print(profile_table(profile, numbers[0]))
    for line in fallbacks(profile):
        say(line)
    if written and not quiet:
        say_report(written)


def command() -> str:
    """The command line, as it was typed."""
    return shlex.join(["rankscope", *sys.argv[1:]])


def about(net: "Transformer", model: str) -> dict[str, Any]:
    """For the manifest: what was asked for, and what it was."""
    origin = {} if net.origin is None else net.origin.described()
    drawn: dict[str, Any] = {key: origin[key] for key in ("seed", "init") if key in origin}
    return {"model": model, **drawn, "origin": origin, "command": command()}


def title_of(net: "Transformer") -> str:
    """The heading of a run."""
    origin = {} if net.origin is None else net.origin.described()
    return f"{Path(origin.get('name', 'network')).name}, {origin.get('weights', 'given')} weights"


def prose(net: "Transformer", samples: int, tokens: int) -> tuple["Tensor", "Tensor"]:
    """Excerpts of the bundled text as tokens for this network."""
    return net.encode(passages(samples, tokens), tokens)


def passages(samples: int, tokens: int) -> list[str]:
    """So many excerpts of the bundled text, each of at least so many tokens."""
    from rankscope.errors import TokensError
    from rankscope.sources import bundled_excerpts

    excerpts = bundled_excerpts(tokens)
    if len(excerpts) < samples:
        raise TokensError(
            f"the bundled prose must have {samples} excerpts of {tokens} tokens; it has {len(excerpts)}: "
            "ask for fewer samples or tokens"
        )
    return excerpts[:samples]


def measured(
    net: "Transformer",
    X: "Tensor",
    padding: "Tensor",
    variants: list[str],
    metrics: list[str],
    arithmetics: list[str],
    quiet: bool,
) -> "Profile":
    """Every variant in every arithmetic, with progress on stderr."""
    from rankscope.cli.show import progress
    from rankscope.nets import named_variant
    from rankscope.profiles import Profile
    from rankscope.profiles import measure as measure_network

    nets = {name: named_variant(net, name) for name in variants}
    profiles = []
    with progress(quiet) as start:
        for name, variant in nets.items():
            for arithmetic in arithmetics:
                bar = start(f"{name}, {arithmetic}")
                found = measure_network(variant, X, padding, metrics, arithmetic, variant=name, progress=bar)
                # What fell back to float64 may have been asked for as well.
                if found.arithmetics == [arithmetic] or found.arithmetics[0] not in arithmetics:
                    profiles.append(found)
    return Profile.join(profiles)


def fallbacks(profile: "Profile | Summary") -> list[str]:
    """A line for each network that ran in another arithmetic than was asked for."""
    return [
        f"{network['variant']} ran in {network['arithmetic']}: {network['checks']['arithmetic_asked']} "
        f"arithmetic has no rule for kernel {network['architecture']['kernel']}."
        for network in profile.manifest["networks"]
        if network["checks"]["arithmetic_asked"] != network["arithmetic"]
    ]


def write_run(
    profile: "Profile | Summary",
    folder: Path,
    title: str,
    tables: "dict[str, pl.DataFrame] | None" = None,
) -> Path:
    """The run directory: tables, manifest, figures and report. Answers with the report's path."""
    from rankscope.report import write_run_directory

    return write_run_directory(profile, folder, title, tables)


def listed(option: str, text: str) -> list[str]:
    """The names of a comma-separated option, each once."""
    from rankscope.errors import RankscopeError

    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise RankscopeError(f"--{option} must name at least one; got {text!r}")
    return parts
