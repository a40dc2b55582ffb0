"""`rankscope measure --text`: a corpus, streamed; what has been measured is kept whatever ends it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rankscope.cli.ending import ending
from rankscope.cli.inputs import MeasureTask, beginning, manifest_fields, split_names, stream_excerpts, title_of
from rankscope.cli.options import CorpusOptions, MeasuredNetwork, ResultOptions
from rankscope.cli.output import ReportTables, with_manifest
from rankscope.cli.show import Interruption, complain, progress, show_run
from rankscope.errors import RankscopeError, TokensError

if TYPE_CHECKING:
    import polars as pl

    from rankscope.nets import Transformer
    from rankscope.profiles import BatchRunner
    from rankscope.runs import Store
    from rankscope.sources import Excerpts

FIRST_EXCERPTS = 16  # Excerpts from the beginning that are kept as text
DRAWN_EXCERPTS = 2  # Of these, how many the report draws


def measure_text(
    net: "Transformer",
    store: "Store | None",
    options: MeasuredNetwork,
    corpus: CorpusOptions,
    task: MeasureTask,
    results: ResultOptions,
) -> None:
    """Measure a corpus, then print and write its summary.

    If Ctrl-C or a bad line ends it early, the summary is of the excerpts until then.

    Args:
        net: The network, whose variants are measured.
        store: The run folder, open; None where nothing is to be written.
        options: Which variants, and where they run.
        corpus: The text, and how it is cut into excerpts.
        task: What is measured.
        results: How results are printed.
    """
    from rankscope.profiles import corpus_steps
    from rankscope.report import verdict, write_run_directory
    from rankscope.runs import Store, Text

    texts = stream_excerpts(corpus)
    variants = split_names("variants", options.variants)
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
            tokens=corpus.tokens,
            batch=corpus.batch,
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
        read_to_the_end=end is None, more={"excerpts_cut": texts.cut, "batch": corpus.batch},
    )  # fmt: skip
    tables: dict[str, pl.DataFrame] = {}
    if store is not None and not isinstance(end, KeyboardInterrupt):
        tables, start = _report_tables(net, variants, first, corpus.tokens, results.silent)
        text = text.adding(first=start) if start is not None else text
    fields = manifest_fields(net, options.model)
    summary = with_manifest(gathered.summary(), **fields, text=text, tokens=corpus.tokens)
    written = None if store is None else write_run_directory(summary, store, title_of(net), tables)
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

    connected = ending.enter_context(Cluster.named(on, stuck_after=stuck_after))
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
            return tables.tables(), beginning(text)
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
