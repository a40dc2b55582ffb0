"""`rankscope measure`: how uniform a network's tokens become, variant by variant."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import options as opt
from rankscope.cli.inputs import described, excerpts_of, listed, network, title_of
from rankscope.cli.inputs import stream as open_text
from rankscope.cli.output import opened, with_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.cli.extra_tables import Pictures
    from rankscope.nets import Transformer
    from rankscope.profiles import Profile

LONG = 10.0
"""Seconds that are worth a word before they begin."""


def measure(
    model: opt.Model = "minilm",
    variants: opt.Variants = "san,san+mlp,san+skip,transformer",
    mask: opt.Mask = None,
    layers: opt.Layers = None,
    remedy: opt.Remedy = None,
    init: opt.Init = None,
    seed: opt.Seed = None,
    device: opt.Device = "cpu",
    stream: opt.Stream = False,
    on: opt.On = None,
    text: opt.Text = None,
    split: opt.Split = "auto",
    field: opt.Field = "text",
    samples: Annotated[
        int | None, opt.option(opt.TEXT, "N", "samples", min=1, show_default="4, or all of --text")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, hidden=True, help="Same as --samples.")] = None,
    tokens: opt.Tokens = 128,
    batch: Annotated[int, opt.option(opt.TEXT, "N", "Excerpts run together.", min=1)] = 16,
    metrics: opt.Metrics = opt.DEFAULT_METRICS,
    arithmetic: opt.Arithmetic = "deviation",
    check: opt.Check = True,
    confirm: opt.Confirm = False,
    compile: opt.Compile = False,
    output: opt.Output = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure how uniform the tokens become with depth, for a network and its variants.

    A loaded model reads excerpts of Moby Dick with its own tokenizer and embedding; a network with random
    weights, under a random embedding of words.

    With [bold]--text[/bold] it is your text, of any size: means, standard deviations and
    quantiles over its excerpts, one a line, a paragraph or a JSON line. With [bold]-o[/bold] an
    interrupted run goes on where it stopped; with [bold]--on ray[/bold] a cluster measures it.
    """
    from rankscope.cli.extra_tables import Pictures
    from rankscope.cli.show import show_run
    from rankscope.errors import MetricError
    from rankscope.profiles.verdict import agreement
    from rankscope.report import verdict, write_run_directory

    names, numbers, arithmetics = checked(variants, metrics, arithmetic)
    samples = limit if samples is None else samples
    if text is not None and confirm:
        raise MetricError(
            "--confirm goes with a few excerpts, not with a text of any length; received --text as well: "
            "leave one of them out"
        )
    if text is None and on is not None:
        raise MetricError(f"--on goes with a text of any length; got --on {on} without --text: give one")
    # What is to be read is looked at first: a model takes longer to load than a path to be misspelt.
    read = excerpts_of(None, split, field, samples or 4, tokens) if text is None else []
    if text is not None:
        open_text(text, split, field, tokens)
    net = network(model, mask, layers, init, seed, device, stream, remedies=remedy, quiet=quiet or as_json)
    if text is not None:
        from rankscope.cli.corpus import Corpus, measure_text

        corpus = Corpus(text, split, field, samples, batch, tokens, compile)
        store = opened(output)
        measure_text(net, corpus, names, numbers, arithmetics, store, about(net, model), as_json, quiet, on)
        return
    store = opened(output)
    X, padding = net.encode(read, tokens)
    drawn = None if output is None else Pictures(net, names, X, padding, read, tokens)
    checks = {"check": check, "confirm": confirm, "compile": compile}
    profile = measured(net, X, padding, names, numbers, arithmetics, quiet or as_json, drawn, checks)
    profile = with_manifest(profile, **about(net, model), **described(None, split, field, read, tokens))
    written = None
    if store is not None:
        tables = {} if drawn is None or profile.manifest.stopped is not None else drawn.tables()
        written = write_run_directory(profile, store, title_of(net), tables)
    said = [verdict(profile), *agreement(profile.table, confirm)]
    show_run(profile, numbers[0], said, written, as_json, quiet)
    end_if_stopped(profile, output)


def checked(variants: str, metrics: str, arithmetic: str) -> tuple[list[str], list[str], list[str]]:
    """The names in these options: metrics and arithmetics are known before a model is loaded for them."""
    from rankscope.errors import MetricError, one_of
    from rankscope.metrics import metric
    from rankscope.profiles import ARITHMETICS

    names, numbers = listed("variants", variants), listed("metrics", metrics)
    arithmetics = listed("arithmetic", arithmetic)
    for number in numbers:
        metric(number)
    for each in arithmetics:
        if each not in (*ARITHMETICS, "all"):
            raise MetricError(one_of("arithmetic", each, [*ARITHMETICS, "all"]))
    return names, numbers, list(ARITHMETICS) if "all" in arithmetics else arithmetics


def command() -> str:
    """The command line, as it was typed."""
    return shlex.join(["rankscope", *sys.argv[1:]])


def about(net: "Transformer", model: str) -> dict[str, Any]:
    """For the manifest: what was asked for, and what it was."""
    origin = {} if net.origin is None else net.origin.described()
    drawn: dict[str, Any] = {key: origin[key] for key in ("seed", "init") if key in origin}
    return {"model": model, **drawn, "origin": origin, "command": command()}


def measured(
    net: "Transformer",
    X: "Tensor",
    padding: "Tensor",
    variants: list[str],
    metrics: list[str],
    arithmetics: list[str],
    quiet: bool,
    drawn: "Pictures | None" = None,
    checks: dict[str, Any] | None = None,
) -> "Profile":
    """Every variant in every arithmetic, with progress on stderr. After Ctrl-C those that were finished, and
    the manifest says so. `drawn` reads along, in the same pass where there is one in deviation arithmetic;
    `checks` are the options of `measure` that say how it is checked."""

    jobs = {name: (net.variant(name), X, padding) for name in variants}
    profile = together(jobs, metrics, arithmetics, quiet, drawn=drawn, checks=checks)
    if drawn is not None and "deviation" not in arithmetics and profile.manifest.stopped is None:
        drawn.read_alone(quiet)
    return profile


def together(
    jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]",
    metrics: list[str],
    arithmetics: list[str],
    quiet: bool,
    beside: "list[Profile] | None" = None,
    drawn: "Pictures | None" = None,
    checks: dict[str, Any] | None = None,
) -> "Profile":
    """Networks by name on their tokens, and profiles that are there already, as one profile."""
    from rankscope.cli.exits import complain
    from rankscope.cli.show import steps
    from rankscope.profiles import Profile, measure_together
    from rankscope.profiles.pass_cost import in_words
    from rankscope.runs import EarlyStop

    profiles = list(beside or [])
    asked = [(some, arithmetic) for some in _sharing(jobs) for arithmetic in arithmetics]
    finished: list[str] = []

    expected = [sum(_seconds(*jobs[name][:2], each, checks or {}) for name in some) for some, each in asked]
    if sum(expected) > LONG and not quiet:
        complain(f"this will take {in_words(sum(expected))} by estimate")
    try:
        with steps(quiet, expected) as step:
            for some, arithmetic in asked:
                tell = step(f"{' and '.join(some)}, {arithmetic}")
                drawing = drawn is not None and arithmetic == "deviation"
                readers = {name: drawn.readers(name) for name in some} if drawn and drawing else {}
                networks = {name: jobs[name] for name in some}
                for name, found in zip(
                    some,
                    measure_together(
                        networks, metrics, arithmetic, progress=tell, readers=readers, **(checks or {})
                    ),
                    strict=True,
                ):
                    # What fell back to float64 may have been asked for as well.
                    if found.arithmetics == [arithmetic] or found.arithmetics[0] not in arithmetics:
                        profiles.append(found)
                    finished.append(f"{name} in {arithmetic}" if len(arithmetics) > 1 else name)
    except KeyboardInterrupt:
        if not profiles:
            raise
        stopped = EarlyStop(finished=tuple(finished), asked=len(jobs) * len(arithmetics))
        return with_manifest(Profile.join(profiles), stopped=stopped)
    return Profile.join(profiles)


def end_if_stopped(profile: "Profile", output: Path | None) -> None:
    """After Ctrl-C, when what was finished has been shown and written: say what that is, and end."""
    from rankscope.cli.exits import Stopped

    stopped = profile.manifest.stopped
    if stopped is None:
        return
    finished = ", ".join(stopped.finished) or "none"
    raise Stopped(f"after {len(stopped.finished)} of {stopped.asked} ({finished}); {kept(output)}")


def kept(output: Path | None) -> str:
    """Where the part that was done lies."""
    return "nothing is written without -o" if output is None else f"these are written to {output}"


def _seconds(net: "Transformer", X: "Tensor", arithmetic: str, checks: dict[str, Any]) -> float:
    """What a pass will take, by estimate."""
    from rankscope.profiles import ARITHMETICS
    from rankscope.profiles.pass_cost import seconds

    kind = "float"
    if arithmetic == "deviation":
        kind = "confirm" if checks.get("confirm") else "checked" if checks.get("check", True) else arithmetic
    return seconds(net.arch, X.shape[0], X.shape[1], kind, ARITHMETICS[arithmetic], net.device)


def _sharing(jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]") -> list[list[str]]:
    """Which go side by side: networks whose layers are read from the same files; others one by one."""
    from rankscope.nets.streamed_layers import StreamedLayers

    groups: dict[object, list[str]] = {}
    for name, (net, _, _) in jobs.items():
        layers = net.weights.layers
        groups.setdefault(id(layers.source) if isinstance(layers, StreamedLayers) else name, []).append(name)
    return list(groups.values())
