"""`rankscope measure`: how uniform a network's tokens become, variant by variant; with `--text` a corpus is streamed,
and what has been measured is kept whatever ends it.

The functions below the command are shared with `compare`, `demo` and others: they measure networks with
progress on stderr, and keep what was finished when Ctrl-C comes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import inputs
from rankscope.cli import options as opt
from rankscope.cli.app import ending
from rankscope.cli.options import CorpusOptions, MeasuredNetwork, ResultOptions
from rankscope.cli.output import ReportTables, open_store, require_same_network, where_written, with_manifest
from rankscope.cli.show import Interruption, complain, progress, show_run, steps
from rankscope.errors import MetricError, RankscopeError, TokensError

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import BatchRunner, Profile
    from rankscope.runs import Store
    from rankscope.sources import Excerpts

FIRST_EXCERPTS = 16  # Excerpts from the beginning that are kept as text
DRAWN_EXCERPTS = 2  # Of these, how many the report draws
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
    task = inputs.MeasureTask.parse(measured.metrics, measured.arithmetic, checks)
    variants = inputs.split_names("variants", options.variants)
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
    net = inputs.network(options.model, options, options.device, options.stream, results.silent)
    nets = {name: net.variant(name) for name in variants}
    entry = "corpus" if isinstance(excerpts, Excerpts) else "measure"
    require_same_network(store, entry, nets, inputs.manifest_fields(net, options.model))
    if isinstance(excerpts, Excerpts):
        return measure_text(net, store, options, text, task, results)
    X, padding = net.encode(excerpts, text.max_length)
    words = net.words(excerpts[:1], text.max_length) if isinstance(excerpts, list) else None
    tables = None if store is None else ReportTables(net, variants, X, padding, words)
    jobs = {name: (net, X, padding) for name, net in nets.items()}
    profile = measure_all(jobs, task, results.silent, tables=tables)
    profile = with_manifest(profile, **inputs.manifest_fields(net, options.model), **inputs.text_fields(text, excerpts))
    written = None
    if store is not None and tables is not None:
        extra = {} if profile.manifest.stopped is not None else tables.tables()
        written = write_run_directory(profile, store, inputs.title_of(net), extra)
    sentences = [verdict(profile), *agreement(profile.table, measured.confirm)]
    show_run(profile, task.metrics[0], sentences, written, results)
    raise_if_stopped(profile, results.output)


def measure_all(
    jobs: "dict[str, tuple[Transformer, Tensor, Tensor]]",
    task: inputs.MeasureTask,
    quiet: bool,
    saved: "Sequence[Profile]" = (),
    tables: ReportTables | None = None,
) -> "Profile":
    """Measure networks, each with its tokens and padding, and join them with profiles that were saved.

    After Ctrl-C it gives the networks that were finished, and the manifest says so. `tables` reads along, in
    the same pass if there is one in deviation arithmetic.
    """
    from rankscope.profiles import Profile, expected_seconds, in_words, measure_together
    from rankscope.runs import EarlyStop

    profiles = [*saved]
    checks: dict[str, Any] = {"check": True, **task.checks}
    passes = [(group, arithmetic) for group in _groups(jobs) for arithmetic in task.arithmetics]
    finished: list[str] = []
    expected = [
        sum(expected_seconds(*jobs[name][:2], arithmetic, **checks) for name in group) for group, arithmetic in passes
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


def measure_text(
    net: "Transformer",
    store: "Store | None",
    options: MeasuredNetwork,
    corpus: CorpusOptions,
    task: inputs.MeasureTask,
    results: ResultOptions,
) -> None:
    """Measure a corpus, then print and write its summary.

    If Ctrl-C or a bad line ends it early, the summary is of the excerpts until then.
    """
    from rankscope.profiles import corpus_steps
    from rankscope.report import verdict, write_run_directory
    from rankscope.runs import Store, Text

    texts = inputs.stream_excerpts(corpus)
    variants = inputs.split_names("variants", options.variants)
    rows = store or ending.enter_context(Store(ending.enter_context(TemporaryDirectory())))
    first: list[str] = []
    gathered, end = None, None
    try:
        steps = corpus_steps(
            {name: net.variant(name) for name in variants},
            islice(_remember(texts, first), corpus.samples),
            rows,
            metrics=task.metrics,
            arithmetic=task.arithmetics,
            max_length=corpus.max_length,
            batch_size=corpus.batch_size,
            runner=None if options.on is None else _cluster_job(options.on, options.stuck_after, results.silent),
        )
        with _bar(texts, corpus.samples, results.silent) as tell, closing(steps):
            for gathered in steps:
                tell(gathered.excerpts)
    except (KeyboardInterrupt, RankscopeError) as error:
        end = error
    if gathered is None or not gathered.excerpts:
        raise end or TokensError(f"{corpus.text} must hold an excerpt with a token; it holds none", subject="text")
    text = Text(
        path=str(corpus.text), split=corpus.split, field=corpus.field, limit=corpus.samples,
        read_to_the_end=end is None, more={"excerpts_cut": texts.cut, "batch": corpus.batch_size},
    )  # fmt: skip
    tables: dict[str, pl.DataFrame] = {}
    if store is not None and not isinstance(end, KeyboardInterrupt):
        tables, start = _report_tables(net, variants, first, corpus.max_length, results.silent)
        text = text.adding(first=start) if start is not None else text
    fields = inputs.manifest_fields(net, options.model)
    summary = with_manifest(gathered.summary(), **fields, text=text, tokens=corpus.max_length)
    written = None if store is None else write_run_directory(summary, store, inputs.title_of(net), tables)
    show_run(summary, task.metrics[0], [verdict(summary)], written, results)
    if end is not None:
        again = "nothing is kept without -o" if store is None else "the same command resumes from here"
        progress_made = f"after {summary.excerpts} excerpts; {again}"
        if isinstance(end, KeyboardInterrupt):
            raise Interruption(progress_made) from end
        complain(f"stopped {progress_made}")
        raise end


def _cluster_job(on: str, stuck_after: float, quiet: bool) -> "BatchRunner":
    """Connect to a cluster until the command ends; batches are measured there."""
    from rankscope.engine import Cluster, measure_on_cluster

    connected = ending.enter_context(Cluster(on, stuck_after=stuck_after))
    if connected.dashboard and not quiet:
        complain(f"Ray's dashboard: {connected.dashboard}")
    return partial(measure_on_cluster, connected)


def _remember(texts: Iterable[str], first: list[str]) -> Iterator[str]:
    """Yield the texts, and append the first few to `first` as they pass."""
    for text in texts:
        if len(first) < FIRST_EXCERPTS:
            first.append(text)
        yield text


def _report_tables(
    net: "Transformer", variants: list[str], first: list[str], tokens: int, quiet: bool
) -> "tuple[dict[str, pl.DataFrame], str | None]":
    """The tables that the report draws of single excerpts, and how the first of these begins.

    They are no part of the statistics: Ctrl-C here leaves them out, and nothing else.
    """
    with suppress(KeyboardInterrupt):
        X, padding = net.encode(first, tokens)
        with_tokens = (~padding.all(1)).nonzero()[:DRAWN_EXCERPTS, 0]
        if len(with_tokens):
            text = first[int(with_tokens[0])]
            tables = ReportTables(net, variants, X[with_tokens], padding[with_tokens], net.words([text], tokens))
            tables.read_alone(quiet)
            return tables.tables(), inputs.beginning(text)
    return {}, None


@contextmanager
def _bar(texts: "Excerpts", limit: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar by the bytes that were read, or by the excerpts if their limit is reached first."""
    with progress(quiet) as start:
        bar = start("excerpts")

        def tell(done: int) -> None:
            shares = [(done, limit), (texts.bytes_read, texts.bytes_total)]
            known = [(part, total) for part, total in shares if total]
            furthest = max(known, key=lambda share: share[0] / share[1], default=(done, None))
            bar(*furthest, f"{done} excerpts")

        yield tell
