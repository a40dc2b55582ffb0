"""`rankscope measure --text`: a corpus, streamed, with what has been done kept whatever happens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.cli.asked import CHARACTERS, fallbacks, title_of
from rankscope.cli.show import console, curves_table, machine, progress, say, say_report
from rankscope.cli.voice import Stopped, complain
from rankscope.errors import RankscopeError, TokensError
from rankscope.files import writable_folder

if TYPE_CHECKING:
    import polars as pl

    from rankscope.nets import Transformer
    from rankscope.profiles import Gatherer
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


def measure_text(
    net: "Transformer",
    corpus: Corpus,
    variants: list[str],
    metrics: list[str],
    arithmetics: list[str],
    output: Path | None,
    about: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Stream the corpus, then print and write its summary. What ends it early, Ctrl-C or a bad line, is said
    after that of what was done."""
    from rankscope.nets import named_variant
    from rankscope.report import verdict, write_run_directory
    from rankscope.sources import excerpts
    from rankscope.sources.texts import LONGEST

    texts = excerpts(
        corpus.path, corpus.split, corpus.field, longest=max(LONGEST, CHARACTERS * corpus.tokens)
    )
    nets = {name: named_variant(net, name) for name in variants}
    checkpoint = None
    if output is not None:
        writable_folder(output)
        checkpoint = output / "checkpoint.npz"
    first: list[str] = []
    read = _keeping(texts, first)
    gathered, end = _gathered(nets, texts, read, corpus, metrics, arithmetics, checkpoint, quiet or as_json)
    if gathered is None or not gathered.excerpts:
        raise end or TokensError(f"{corpus.path} must hold an excerpt with a token; it holds none")
    summary = gathered.summary()
    text = {
        "path": corpus.path, "split": corpus.split, "field": corpus.field, "limit": corpus.limit,
        "tokens": corpus.tokens, "batch": corpus.batch, "read_to_the_end": end is None,
        "excerpts_cut": texts.cut,
    }  # fmt: skip
    summary.manifest.update(**about, text=text)
    written = None
    if output is not None:
        leave = isinstance(end, KeyboardInterrupt)
        tables = {} if leave else _pictures(net, variants, first, corpus.tokens, text, quiet or as_json)
        written = write_run_directory(summary, output, title_of(net), tables)
    if as_json:
        machine({"manifest": summary.manifest, "table": summary.table.to_dicts()})
    else:
        console().print(curves_table(summary.views(metrics[0])))
        say(*fallbacks(summary))
        if summary.quantiles != "exact":
            say(f"Quantiles: {summary.quantiles}.")
        say("", verdict(summary))
        if written and not quiet:
            say("")
            say_report(written)
    if end is not None:
        again = "no checkpoint without -o" if output is None else "the same command goes on from here"
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
    checkpoint: Path | None,
    quiet: bool,
) -> tuple["Gatherer | None", BaseException | None]:
    """What was gathered, and what ended it early, if anything did."""
    from rankscope.profiles.corpus import gathering

    gathered = None
    try:
        with _bar(texts, corpus.limit, quiet) as tell:
            for gathered in gathering(
                nets, islice(read, corpus.limit), metrics=metrics, arithmetic=arithmetics,
                length=corpus.tokens, batch=corpus.batch, checkpoint=checkpoint,
            ):  # fmt: skip
                tell(gathered.excerpts)
    except (KeyboardInterrupt, RankscopeError) as end:
        return gathered, end
    return gathered, None


def _keeping(texts: Iterable[str], first: list[str]) -> Iterator[str]:
    """The same texts; the first few are kept as they pass, also where a run that goes on reads past them."""
    for text in texts:
        if len(first) < KEPT:
            first.append(text)
        yield text


def _pictures(
    net: "Transformer",
    variants: list[str],
    first: list[str],
    tokens: int,
    described: dict[str, Any],
    quiet: bool,
) -> "dict[str, pl.DataFrame]":
    """What the report shows of single excerpts: the cloud of the first with a token, singular values of the
    first two. They are no part of the statistics, so Ctrl-C here takes nothing else away."""
    from rankscope.cli.asked import begins
    from rankscope.cli.pictures import Pictures

    try:
        X, padding = net.encode(first, tokens)
        there = (~padding.all(1)).nonzero()[:SHOWN, 0]
        chosen = [first[number] for number in there.tolist()]
        if not chosen:
            return {}
        drawn = Pictures(net, variants, X[there], padding[there], chosen, tokens)
        drawn.read_alone(quiet)
        found = drawn.tables()
    except KeyboardInterrupt:
        return {}
    described["first"] = begins(chosen[0])
    return found


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
