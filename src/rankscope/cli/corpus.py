"""`rankscope measure --text`: a corpus, streamed, with what has been done kept whatever happens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rankscope.cli.exits import Stopped, complain
from rankscope.cli.inputs import begins, stream, title_of
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

KEPT, SHOWN = 16, 2
"""Excerpts from the first on that are kept as text, and those with a token of which the report shows more."""


@dataclass(frozen=True)
class Corpus:
    """What is to be read, and how."""

    path: str
    split: str
    field: str
    limit: int | None
    batch: int
    tokens: int
    compile: bool = False


def measure_text(
    net: "Transformer",
    corpus: Corpus,
    variants: list[str],
    metrics: list[str],
    arithmetics: list[str],
    store: "Store | None",
    about: dict[str, Any],
    as_json: bool,
    quiet: bool,
    on: str | None = None,
) -> None:
    """Stream the corpus, then print and write its summary. What ends it early, Ctrl-C or a bad line, is said
    after that of what was done."""
    from rankscope.report import verdict, write_run_directory
    from rankscope.runs import Store, Text

    texts = stream(corpus.path, corpus.split, corpus.field, corpus.tokens)
    nets = {name: net.variant(name) for name in variants}
    rows = store or ending.enter_context(Store(ending.enter_context(TemporaryDirectory())))
    first: list[str] = []
    read = _keeping(texts, first)
    runner = None if on is None else _runner(on, quiet or as_json)
    gathered, end = _gathered(nets, texts, read, corpus, metrics, arithmetics, rows, quiet or as_json, runner)
    if gathered is None or not gathered.excerpts:
        raise end or TokensError(f"{corpus.path} must hold an excerpt with a token; it holds none")
    summary = gathered.summary()
    text = Text(
        path=corpus.path, split=corpus.split, field=corpus.field, limit=corpus.limit,
        read_to_the_end=end is None, more={"excerpts_cut": texts.cut, "batch": corpus.batch},
    )  # fmt: skip
    tables: dict[str, pl.DataFrame | SavedTable] = {}
    if store is not None and not isinstance(end, KeyboardInterrupt):
        tables, text = _pictures(net, variants, first, corpus.tokens, text, quiet or as_json)
    summary = with_manifest(summary, **about, text=text, tokens=corpus.tokens)
    written = None if store is None else write_run_directory(summary, store, title_of(net), tables)
    show_run(summary, metrics[0], [verdict(summary)], written, as_json, quiet)
    if end is not None:
        again = "nothing is kept without -o" if store is None else "the same command goes on from here"
        stopped = f"after {summary.excerpts} excerpts; {again}"
        if isinstance(end, KeyboardInterrupt):
            raise Stopped(stopped) from end
        complain(f"stopped {stopped}")
        raise end


def _gathered(
    nets: dict[str, "Transformer"],
    texts: "Excerpts",
    read: Iterator[str],
    corpus: Corpus,
    metrics: list[str],
    arithmetics: list[str],
    store: "Store",
    quiet: bool,
    runner: "BatchRunner | None",
) -> tuple["CorpusRows | None", BaseException | None]:
    """What was gathered, and what ended it early, if anything did."""
    from rankscope.profiles.corpus import corpus_steps

    gathered = None
    try:
        steps = corpus_steps(
            nets, islice(read, corpus.limit), store, metrics=metrics, arithmetic=arithmetics,
            tokens=corpus.tokens, batch=corpus.batch, compile=corpus.compile, runner=runner,
        )  # fmt: skip
        with _bar(texts, corpus.limit, quiet) as tell, closing(steps):
            for gathered in steps:
                tell(gathered.excerpts)
    except (KeyboardInterrupt, RankscopeError) as end:
        return gathered, end
    return gathered, None


def _runner(on: str, quiet: bool) -> "BatchRunner":
    """Batches are measured by this cluster until the command ends."""
    from rankscope.engine.cluster import cluster
    from rankscope.engine.ray_jobs import CorpusJob

    found = ending.enter_context(cluster(on))
    if found.dashboard and not quiet:
        complain(f"Ray's dashboard: {found.dashboard}")
    return CorpusJob(found)


def _keeping(texts: Iterable[str], first: list[str]) -> Iterator[str]:
    """The same texts; the first few are kept as they pass, also where a run that goes on reads past them."""
    for text in texts:
        if len(first) < KEPT:
            first.append(text)
        yield text


def _pictures(
    net: "Transformer", variants: list[str], first: list[str], tokens: int, text: "Text", quiet: bool
) -> "tuple[dict[str, pl.DataFrame | SavedTable], Text]":
    """What the report shows of single excerpts: the cloud of the first with a token, singular values of the
    first two; and the text with how it begins. They are no part of the statistics, so Ctrl-C here takes
    nothing else away."""
    from rankscope.cli.extra_tables import Pictures

    try:
        X, padding = net.encode(first, tokens)
        there = (~padding.all(1)).nonzero()[:SHOWN, 0]
        chosen = [first[number] for number in there.tolist()]
        if not chosen:
            return {}, text
        drawn = Pictures(net, variants, X[there], padding[there], chosen, tokens)
        drawn.read_alone(quiet)
        found = drawn.tables()
    except KeyboardInterrupt:
        return {}, text
    return {**found}, text.adding(first=begins(chosen[0]))


@contextmanager
def _bar(texts: "Excerpts", limit: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Progress by what has been read, or by the limit where that will be met first."""
    with progress(quiet) as start:
        bar = start("excerpts")

        def tell(done: int) -> None:
            shares = [(done, limit), (texts.bytes_read, texts.bytes_total)]
            known = [(part, whole) for part, whole in shares if whole]
            if known:
                bar(*max(known, key=lambda share: share[0] / share[1]), f"{done} excerpts")
            else:
                bar(done, None, f"{done} excerpts")

        yield tell
