"""`rankscope measure`: how uniform a network's tokens become, variant by variant.

The functions below the command are shared with `compare`, `demo` and others: they measure networks with
progress on stderr, and keep what was finished when Ctrl-C comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import inputs
from rankscope.cli import options as opt
from rankscope.cli.inputs import MeasureTask, manifest_fields, network, split_names, text_fields, title_of
from rankscope.cli.output import ReportTables, open_store, require_same_network, where_written, with_manifest
from rankscope.cli.show import Interruption, complain, show_run, steps
from rankscope.errors import MetricError

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Profile

ANNOUNCED_SECONDS = 10.0  # Seconds from which on a measurement is announced with its expected time


@dataclass(frozen=True)
class MeasureOptions(opt.MetricOptions):
    """Options that say what is measured, and how it is checked."""

    check: Annotated[bool, opt.option(opt.RESULT, " ", "check", (), "--check/--no-check")] = True
    confirm: Annotated[bool, opt.option(opt.RESULT, " ", "confirm", (), "--confirm")] = False


def measure(
    options: opt.MeasuredNetwork = opt.MeasuredNetwork(),
    text: opt.CorpusOptions = opt.CorpusOptions(),
    measured: MeasureOptions = MeasureOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Measure how uniform the tokens become with depth, for a network and its variants.

    A loaded model reads excerpts of Moby Dick with its own tokenizer and embedding; a network with random
    weights reads them with a random embedding of words.

    With [bold]--text[/bold] it reads your text, of any size, and gives means, standard deviations and
    quantiles over its excerpts: lines, paragraphs or JSON lines. With [bold]-o[/bold] the same command
    resumes an interrupted run; with [bold]--on ray[/bold] a cluster measures it. With [bold]--confirm[/bold] it reads
    the first four excerpts, or as many as [bold]--samples[/bold] says.
    """
    from rankscope.profiles.verdict import agreement
    from rankscope.report import verdict, write_run_directory
    from rankscope.sources import Excerpts

    checks = {name: getattr(measured, name) for name in ("check", "confirm")}
    task = MeasureTask.parse(measured.metrics, measured.arithmetic, checks)
    variants = split_names("variants", options.variants)
    whole_text = text.text is not None and not measured.confirm  # --confirm takes thirty times as long
    if options.on is not None and not whole_text:
        given = "with --confirm, which reads a few excerpts: leave one out" if measured.confirm else "without --text"
        raise MetricError(f"--on goes with a text of any length; got --on {options.on} {given}", subject="on")
    # The text is looked at first: a model takes longer to load than a path to be misspelt.
    if whole_text:
        excerpts: Any = inputs.stream_excerpts(text)
    else:
        excerpts = inputs.read_inputs(text, options.model, quiet=results.silent)
    store = open_store(results.output)
    net = network(options.model, options, options.device, options.stream, results.silent)
    nets = {name: net.variant(name) for name in variants}
    entry = "corpus" if isinstance(excerpts, Excerpts) else "measure"
    require_same_network(store, entry, nets, manifest_fields(net, options.model))
    if isinstance(excerpts, Excerpts):
        from rankscope.cli.corpus import measure_text

        return measure_text(net, store, options, text, task, results)
    X, padding = net.encode(excerpts, text.tokens)
    words = net.words(excerpts[:1], text.tokens) if isinstance(excerpts, list) else None
    tables = None if store is None else ReportTables(net, variants, X, padding, words)
    jobs = {name: (net, X, padding) for name, net in nets.items()}
    profile = measure_all(jobs, task, results.silent, tables=tables)
    profile = with_manifest(profile, **manifest_fields(net, options.model), **text_fields(text, excerpts))
    written = None
    if store is not None and tables is not None:
        extra = {} if profile.manifest.stopped is not None else tables.tables()
        written = write_run_directory(profile, store, title_of(net), extra)
    sentences = [verdict(profile), *agreement(profile.table, measured.confirm)]
    show_run(profile, task.metrics[0], sentences, written, results)
    raise_if_stopped(profile, results.output)


def measure_all(
    jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]",
    task: MeasureTask,
    quiet: bool,
    saved: "Sequence[Profile]" = (),
    tables: ReportTables | None = None,
) -> "Profile":
    """Measure networks, each with its tokens and padding, and join them with profiles that were saved.

    After Ctrl-C it gives the networks that were finished, and the manifest says so. `tables` reads along, in
    the same pass if there is one in deviation arithmetic.
    """
    from rankscope.profiles import PassOptions, Profile, expected_seconds, in_words, measure_together
    from rankscope.runs import EarlyStop

    profiles = [*saved]
    checks: dict[str, Any] = {"check": True, **task.checks}
    passes = [(group, arithmetic) for group in _groups(jobs) for arithmetic in task.arithmetics]
    finished: list[str] = []
    expected = [
        sum(expected_seconds(*jobs[name][:2], PassOptions(arithmetic, **checks)) for name in group)
        for group, arithmetic in passes
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
                together = {name: jobs[name] for name in group}
                results = measure_together(
                    together, task.metrics, arithmetic, progress=tell, readers=readers, **task.checks
                )
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
    if tables is not None and "deviation" not in task.arithmetics:
        tables.read_alone(quiet)
    return Profile.join(profiles)


def raise_if_stopped(profile: "Profile", output: Path | None) -> None:
    """End a command that Ctrl-C stopped, after its finished part was shown and written; say what it is."""
    stopped = profile.manifest.stopped
    if stopped is None:
        return
    finished = ", ".join(stopped.finished) or "none"
    raise Interruption(f"after {len(stopped.finished)} of {stopped.asked} ({finished}); {where_written(output)}")


def _groups(jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]") -> list[list[str]]:
    """Names of networks that are measured in one pass: those whose layers are read from the same files."""
    from rankscope.nets import StreamedLayers

    groups: dict[object, list[str]] = {}
    for name, (net, _, _) in jobs.items():
        layers = net.weights.layers
        groups.setdefault(id(layers.source) if isinstance(layers, StreamedLayers) else name, []).append(name)
    return list(groups.values())
