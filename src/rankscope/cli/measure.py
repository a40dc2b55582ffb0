"""`rankscope measure`: how uniform a network's tokens become, variant by variant.

The functions below the command are shared with `compare`, `demo` and others: they measure networks with
progress on stderr, and keep what was finished when Ctrl-C comes.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.cli import options as opt
from rankscope.cli.inputs import (
    MeasureTask,
    network,
    read_excerpts,
    split_names,
    stream_excerpts,
    text_fields,
    title_of,
)  # fmt: skip
from rankscope.cli.output import open_store, with_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.cli.extra_tables import ReportTables
    from rankscope.nets import Transformer
    from rankscope.profiles import Profile

ANNOUNCED_SECONDS = 10.0
"""Seconds from which on a measurement is announced with its expected time."""


def measure(
    model: opt.Model = "minilm",
    variants: opt.Variants = "san,san+mlp,san+skip,transformer",
    network_options: opt.NetworkOptions = opt.NetworkOptions(),
    device: opt.Device = "cpu",
    stream: opt.Stream = False,
    on: opt.On = None,
    text: opt.CorpusOptions = opt.CorpusOptions(),
    metrics: opt.Metrics = opt.DEFAULT_METRICS,
    arithmetic: opt.Arithmetic = "deviation",
    check: opt.Check = True,
    confirm: opt.Confirm = False,
    compile: opt.Compile = False,
    output: opt.Output = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Measure how uniform the tokens become with depth, for a network and its variants.

    A loaded model reads excerpts of Moby Dick with its own tokenizer and embedding; a network with random
    weights reads them with a random embedding of words.

    With [bold]--text[/bold] it reads your text, of any size, and gives means, standard deviations and
    quantiles over its excerpts: lines, paragraphs or JSON lines. With [bold]-o[/bold] the same command
    resumes an interrupted run; with [bold]--on ray[/bold] a cluster measures it.
    """
    from rankscope.cli.extra_tables import ReportTables
    from rankscope.cli.show import show_run
    from rankscope.errors import MetricError
    from rankscope.profiles.verdict import agreement
    from rankscope.report import verdict, write_run_directory

    task = MeasureTask.parse(metrics, arithmetic, checks={"check": check, "confirm": confirm, "compile": compile})
    variant_names = split_names("variants", variants)
    if text.text is not None and confirm:
        raise MetricError(
            "--confirm goes with a few excerpts, not with a text of any length; received --text as well: "
            "leave one of them out",
            subject="confirm",
        )
    if text.text is None and on is not None:
        raise MetricError(f"--on goes with a text of any length; got --on {on} without --text: give one", subject="on")
    # The text is looked at first: a model takes longer to load than a path to be misspelt.
    if text.text is None:
        excerpts = read_excerpts(text)
    else:
        stream_excerpts(text)
    net = network(model, network_options, device, stream, printing.silent)
    store = open_store(output)
    fields = manifest_fields(net, model)
    if text.text is not None:
        from rankscope.cli.corpus import measure_text

        return measure_text(net, text, variant_names, task, store, fields, printing, on)
    X, padding = net.encode(excerpts, text.tokens)
    tables = None if store is None else ReportTables(net, variant_names, X, padding, excerpts, text.tokens)
    profile = measure_variants(net, X, padding, variant_names, task, printing.silent, tables)
    profile = with_manifest(profile, **fields, **text_fields(text, excerpts))
    written = None
    if store is not None and tables is not None:
        extra = {} if profile.manifest.stopped is not None else tables.tables()
        written = write_run_directory(profile, store, title_of(net), extra)
    sentences = [verdict(profile), *agreement(profile.table, confirm)]
    show_run(profile, task.metrics[0], sentences, written, printing)
    raise_if_stopped(profile, output)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["rankscope", *sys.argv[1:]])


def manifest_fields(net: "Transformer", model: str) -> dict[str, Any]:
    """Fields of the manifest that say which model was asked for, and where its weights came from."""
    origin = {} if net.origin is None else net.origin.described()
    drawn: dict[str, Any] = {key: origin[key] for key in ("seed", "init") if key in origin}
    return {"model": model, **drawn, "origin": origin, "command": command_line()}


def measure_variants(
    net: "Transformer",
    X: "Tensor",
    padding: "Tensor",
    variants: list[str],
    task: MeasureTask,
    quiet: bool,
    tables: "ReportTables | None" = None,
) -> "Profile":
    """Measure variants of a network in every arithmetic of the task, with progress on stderr.

    After Ctrl-C it gives the variants that were finished, and the manifest says so.

    Args:
        net: The network.
        X: Its tokens.
        padding: Where `X` is padding.
        variants: Names of the variants.
        task: What is measured.
        quiet: Show no progress.
        tables: Reads along, in the same pass if there is one in deviation arithmetic.
    """
    jobs = {name: (net.variant(name), X, padding) for name in variants}
    profile = measure_all(jobs, task, quiet, tables=tables)
    if tables is not None and "deviation" not in task.arithmetics and profile.manifest.stopped is None:
        tables.read_alone(quiet)
    return profile


def measure_all(
    jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]",
    task: MeasureTask,
    quiet: bool,
    saved: "list[Profile] | None" = None,
    tables: "ReportTables | None" = None,
) -> "Profile":
    """Measure networks, each with its tokens and padding, and join them with profiles that were saved."""
    from rankscope.cli.exits import complain
    from rankscope.cli.show import steps
    from rankscope.profiles import Profile, measure_together
    from rankscope.profiles.pass_cost import in_words
    from rankscope.runs import EarlyStop

    profiles = list(saved or [])
    passes = [(group, arithmetic) for group in _groups(jobs) for arithmetic in task.arithmetics]
    finished: list[str] = []
    expected = [
        sum(_seconds(*jobs[name][:2], arithmetic, task.checks) for name in group) for group, arithmetic in passes
    ]
    if sum(expected) > ANNOUNCED_SECONDS and not quiet:
        complain(f"this will take {in_words(sum(expected))} by estimate")
    try:
        with steps(quiet, expected) as step:
            for group, arithmetic in passes:
                tell = step(f"{' and '.join(group)}, {arithmetic}")
                readers = {}
                if tables is not None and arithmetic == "deviation":
                    readers = {name: tables.readers(name) for name in group}
                results = measure_together(
                    {name: jobs[name] for name in group}, task.metrics, arithmetic, progress=tell,
                    readers=readers, **task.checks,
                )  # fmt: skip
                for name, profile in zip(group, results, strict=True):
                    # A network that falls back to float64 may be measured in float64 anyway.
                    if profile.arithmetics == [arithmetic] or profile.arithmetics[0] not in task.arithmetics:
                        profiles.append(profile)
                    finished.append(f"{name} in {arithmetic}" if len(task.arithmetics) > 1 else name)
    except KeyboardInterrupt:
        if not profiles:
            raise
        stopped = EarlyStop(finished=tuple(finished), asked=len(jobs) * len(task.arithmetics))
        return with_manifest(Profile.join(profiles), stopped=stopped)
    return Profile.join(profiles)


def raise_if_stopped(profile: "Profile", output: Path | None) -> None:
    """End a command that Ctrl-C stopped, after its finished part was shown and written; say what it is."""
    from rankscope.cli.exits import Interruption

    stopped = profile.manifest.stopped
    if stopped is None:
        return
    finished = ", ".join(stopped.finished) or "none"
    raise Interruption(f"after {len(stopped.finished)} of {stopped.asked} ({finished}); {where_written(output)}")


def where_written(output: Path | None) -> str:
    """Where the finished part of an interrupted command is."""
    return "nothing is written without -o" if output is None else f"these are written to {output}"


def _seconds(net: "Transformer", X: "Tensor", arithmetic: str, checks: dict[str, bool]) -> float:
    """The expected seconds of a pass."""
    from rankscope.profiles import ARITHMETICS
    from rankscope.profiles.pass_cost import seconds

    kind = "float"
    if arithmetic == "deviation":
        kind = "confirm" if checks.get("confirm") else "checked" if checks.get("check", True) else arithmetic
    return seconds(net.arch, X.shape[0], X.shape[1], kind, ARITHMETICS[arithmetic], net.device)


def _groups(jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]") -> list[list[str]]:
    """Names of networks that are measured in one pass: those whose layers are read from the same files."""
    from rankscope.nets.weights import StreamedLayers

    groups: dict[object, list[str]] = {}
    for name, (net, _, _) in jobs.items():
        layers = net.weights.layers
        groups.setdefault(id(layers.source) if isinstance(layers, StreamedLayers) else name, []).append(name)
    return list(groups.values())
