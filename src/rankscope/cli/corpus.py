"""`rankscope measure --text`: a corpus, streamed; what has been measured is kept whatever ends it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rankscope.cli.exits import Interruption, complain
from rankscope.cli.inputs import MeasureTask, beginning, stream_excerpts, title_of
from rankscope.cli.options import CorpusOptions, PrintOptions
from rankscope.cli.output import ending, with_manifest
from rankscope.cli.show import progress, show_run
from rankscope.errors import RankscopeError, TokensError

if TYPE_CHECKING:
    import polars as pl

    from rankscope.nets import Transformer
    from rankscope.profiles import CorpusRows
    from rankscope.profiles.corpus import BatchRunner
    from rankscope.runs import Store, Text
    from rankscope.runs.tables import SavedTable
    from rankscope.sources import Excerpts

FIRST_EXCERPTS = 16
"""Excerpts from the beginning that are kept as text."""
DRAWN_EXCERPTS = 2
"""Of these, how many the report draws."""


def measure_text(
    net: "Transformer",
    corpus: CorpusOptions,
    variants: list[str],
    task: MeasureTask,
    store: "Store | None",
    fields: dict[str, Any],
    printing: PrintOptions,
    on: str | None = None,
) -> None:
    """Measure a corpus, then print and write its summary.

    If Ctrl-C or a bad line ends it early, the summary is of the excerpts until then.

    Args:
        net: The network.
        corpus: The text and how it is read.
        variants: Names of the variants of the network.
        task: What is measured.
        store: The run folder; None writes nothing.
        fields: Further fields of the manifest.
        printing: How results are printed.
        on: The cluster that measures it; None for this process.
    """
    from rankscope.report import verdict, write_run_directory
    from rankscope.runs import Store, Text

    texts = stream_excerpts(corpus)
    nets = {name: net.variant(name) for name in variants}
    rows = store or ending.enter_context(Store(ending.enter_context(TemporaryDirectory())))
    first: list[str] = []
    runner = None if on is None else _cluster_job(on, printing.silent)
    gathered, end = _gather(nets, texts, _remember(texts, first), corpus, task, rows, printing.silent, runner)
    if gathered is None or not gathered.excerpts:
        raise end or TokensError(f"{corpus.text} must hold an excerpt with a token; it holds none", subject="text")
    text = Text(
        path=str(corpus.text), split=corpus.split, field=corpus.field, limit=corpus.samples,
        read_to_the_end=end is None, more={"excerpts_cut": texts.cut, "batch": corpus.batch},
    )  # fmt: skip
    tables: dict[str, pl.DataFrame | SavedTable] = {}
    if store is not None and not isinstance(end, KeyboardInterrupt):
        tables, text = _report_tables(net, variants, first, corpus.tokens, text, printing.silent)
    summary = with_manifest(gathered.summary(), **fields, text=text, tokens=corpus.tokens)
    written = None if store is None else write_run_directory(summary, store, title_of(net), tables)
    show_run(summary, task.metrics[0], [verdict(summary)], written, printing)
    if end is not None:
        again = "nothing is kept without -o" if store is None else "the same command resumes from here"
        progress_made = f"after {summary.excerpts} excerpts; {again}"
        if isinstance(end, KeyboardInterrupt):
            raise Interruption(progress_made) from end
        complain(f"stopped {progress_made}")
        raise end


def _gather(
    nets: dict[str, "Transformer"],
    texts: "Excerpts",
    read: Iterator[str],
    corpus: CorpusOptions,
    task: MeasureTask,
    store: "Store",
    quiet: bool,
    runner: "BatchRunner | None",
) -> tuple["CorpusRows | None", BaseException | None]:
    """The statistics that were gathered, and the error or Ctrl-C that ended them early, if any."""
    from rankscope.profiles.corpus import corpus_steps

    gathered = None
    try:
        steps = corpus_steps(
            nets, islice(read, corpus.samples), store, metrics=task.metrics, arithmetic=task.arithmetics,
            tokens=corpus.tokens, batch=corpus.batch, compile=task.checks.get("compile", False),
            runner=runner,
        )  # fmt: skip
        with _bar(texts, corpus.samples, quiet) as tell, closing(steps):
            for gathered in steps:
                tell(gathered.excerpts)
    except (KeyboardInterrupt, RankscopeError) as end:
        return gathered, end
    return gathered, None


def _cluster_job(on: str, quiet: bool) -> "BatchRunner":
    """Connect to a cluster until the command ends; batches are measured there."""
    from rankscope.engine.cluster import cluster
    from rankscope.engine.ray_jobs import measure_on_cluster

    connected = ending.enter_context(cluster(on))
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
    net: "Transformer", variants: list[str], first: list[str], tokens: int, text: "Text", quiet: bool
) -> "tuple[dict[str, pl.DataFrame | SavedTable], Text]":
    """The tables that the report draws of single excerpts, and the manifest's text with how it begins.

    They are no part of the statistics: Ctrl-C here leaves them out, and nothing else.
    """
    from rankscope.cli.extra_tables import ReportTables

    try:
        X, padding = net.encode(first, tokens)
        with_tokens = (~padding.all(1)).nonzero()[:DRAWN_EXCERPTS, 0]
        excerpts = [first[index] for index in with_tokens.tolist()]
        if not excerpts:
            return {}, text
        tables = ReportTables(net, variants, X[with_tokens], padding[with_tokens], excerpts, tokens)
        tables.read_alone(quiet)
        return {**tables.tables()}, text.adding(first=beginning(excerpts[0]))
    except KeyboardInterrupt:
        return {}, text


@contextmanager
def _bar(texts: "Excerpts", limit: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar by the bytes that were read, or by the excerpts if their limit is reached first."""
    with progress(quiet) as start:
        bar = start("excerpts")

        def tell(done: int) -> None:
            shares = [(done, limit), (texts.bytes_read, texts.bytes_total)]
            known = [(part, total) for part, total in shares if total]
            if known:
                bar(*max(known, key=lambda share: share[0] / share[1]), f"{done} excerpts")
            else:
                bar(done, None, f"{done} excerpts")

        yield tell
