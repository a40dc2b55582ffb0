"""`measure_corpus`: excerpts by the batch, their rows written as they come, nothing lost when it stops.

Called by users, and step by step (`corpus_steps`) by the command line. In order: `BatchMeasurement` encodes a batch of
texts and measures every variant in every arithmetic, here or on a cluster (`BatchRunner`); `CorpusRows` takes the rows
in, writes them every so often and whenever the run ends, and makes the `Summary`. The same run resumes from the rows on
disk: it reads past the excerpts that were measured, makes sure they are the same, and gives, bit for bit, what it would
have given in one go. So does a longer corpus that begins the same way.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rankscope.errors import FileError, MetricError, TokensError, require, require_one_of
from rankscope.files import undisturbed
from rankscope.metrics import MetricsLike, chosen_metrics
from rankscope.nets import Encoded, Transformer
from rankscope.profiles.measuring import DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import MOST, NAME, CorpusRows, Summary
from rankscope.runs import Manifest, Store, difference, key_of, manifest_in

SAVED_EVERY = 20.0  # seconds between chunks of rows on disk


class ExcerptOptions(TypedDict, total=False):
    """What is measured of each excerpt: options of `measure_corpus` and `corpus_steps`."""

    metrics: MetricsLike  # as of `measure`
    arithmetic: str | Sequence[str]  # one or several of `ARITHMETICS`; "deviation" if left out
    max_length: int  # the most tokens of an excerpt; 128 if left out
    batch_size: int  # excerpts that are encoded and run together; 16 if left out


EXCERPT_OPTIONS: ExcerptOptions = {
    "metrics": DEFAULT_METRICS, "arithmetic": "deviation", "max_length": 128, "batch_size": 16,
}  # fmt: skip
"""What is taken for options that are left out."""


def measure_corpus(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    *,
    folder: str | Path | Store | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Unpack[ExcerptOptions],
) -> Summary:
    """Measure the excerpts of a corpus, at every layer of every variant, for statistics over them.

    Args:
        nets: Networks (variants) by name.
        texts: Any number of excerpts; `sources.excerpts` reads them off files.
        folder: Where the rows of every excerpt are written (`rankscope.runs.read(folder).table("rows")`), so that
            an interrupted run resumes where it stopped; None keeps them for this call alone.
        progress: Called with the number of excerpts done.
        **options: Those of `ExcerptOptions`, which describes each.

    Returns:
        A `Summary`, with exact quantiles over all excerpts.

    Raises:
        TokensError: if no excerpt holds a token.
        FileError: if the folder holds rows of another run, or other excerpts come than before.

    >>> from rankscope import fresh
    >>> net = fresh("bert-tiny")
    >>> texts = ("a whale " * k for k in range(1, 6))
    >>> measure_corpus({"transformer": net}, texts).curve("relative_residual", "count").tolist()
    [5.0, 5.0, 5.0]
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder
        store = folder if isinstance(folder, Store) else stack.enter_context(Store(folder))
        rows = None
        for rows in stack.enter_context(closing(corpus_steps(nets, texts, store, **options))):
            if progress is not None:
                progress(rows.excerpts)
        if rows is None or not rows.excerpts:
            raise TokensError("a corpus must hold at least one excerpt with a token; it holds none", subject="texts")
        return rows.summary()


def corpus_steps(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    store: Store,
    *,
    saved_every: float = SAVED_EVERY,
    runner: "BatchRunner | None" = None,
    **options: Unpack[ExcerptOptions],
) -> Generator[CorpusRows]:
    """`measure_corpus` as a generator: it yields the rows so far after each batch, and first those that the folder
    held. They are one object, complete whenever it is yielded, also after an interruption. Arguments are those of
    `measure_corpus`, and

    Args:
        store: The run that rows are written to.
        saved_every: Seconds between chunks of rows on disk.
        runner: Measures batches elsewhere and hands them back in order; left out, they are measured here.
    """
    require(nets, "a corpus must be measured on at least one network; received none", MetricError, "nets")
    for name in options:
        require_one_of("an option of a corpus", name, EXCERPT_OPTIONS, MetricError, name)
    asked = EXCERPT_OPTIONS | options
    arithmetic, length, size = asked["arithmetic"], asked["max_length"], asked["batch_size"]
    require(size >= 1, f"batch_size must be at least 1 excerpt; got {size}", TokensError, "batch_size")
    chosen = chosen_metrics("a corpus", asked["metrics"])
    arithmetics = [arithmetic] if isinstance(arithmetic, str) else list(arithmetic)
    names = [metric.name for metric in chosen]
    key = key_of(nets, metrics=names, arithmetics=arithmetics, tokens=length, batch=size)  # as in runs already saved
    stream, digest = iter(texts), blake2b(digest_size=16)
    before = _earlier_chunks(store, key, size)
    rows, read = CorpusRows(store, before, key), 0
    if before:
        read = before[-1].more["read"]
        _skip(stream, digest, read, before[-1].more["digest"], store.folder / NAME)
        yield rows
    at = time.monotonic()
    work = BatchMeasurement(nets, chosen, arithmetics, length)
    chunks = iter(lambda: list(islice(stream, size)), [])
    measured = ((chunk, work(chunk)) for chunk in chunks) if runner is None else runner(work, chunks)
    try:
        for chunk, profile in measured:
            late = rows.waiting > MOST or time.monotonic() - at > saved_every
            if len(chunk) < size or late:
                # An incomplete batch is the last, and a chunk of its own: a longer corpus goes on before it.
                rows.flush(read=read, digest=digest.hexdigest())
                at = time.monotonic()
            with undisturbed():
                if profile is not None:
                    rows.add(profile)
                for text in chunk:
                    _digest(digest, text)
                read += len(chunk)
            yield rows
    finally:
        with undisturbed():
            rows.flush(read=read, digest=digest.hexdigest())


def _earlier_chunks(store: Store, key: dict[str, Any], batch_size: int) -> list[Manifest]:
    """The manifests of the chunks in the folder; one that is not of whole batches is taken away."""
    rows = store.folder / NAME
    chunks = store.run.chunks(NAME)
    if not rows.is_dir():
        for file in chunks:
            store.drop(file)
        return []
    anew = f"give another folder, or delete {rows} to start anew"
    manifests = [manifest_in(store.run.path(file, anew)) for file in chunks]
    changed = difference(manifests[0].key or {}, key) if manifests else ""
    sentence = f"{rows} must be of this run; it is of one with other {changed}: {anew}"
    require(not changed, sentence, FileError, str(rows))
    if manifests and manifests[-1].more["read"] % batch_size:
        store.drop(chunks[-1])
        manifests.pop()
    return manifests


@dataclass(frozen=True)
class BatchMeasurement:
    """Measures a batch of texts: every variant in every arithmetic."""

    nets: Mapping[str, Transformer]
    metrics: MetricsLike
    arithmetics: list[str]
    max_length: int

    def __call__(self, texts: list[str]) -> Profile | None:
        """Measure these texts; None where no text has a token."""
        profiles = []
        encoded: dict[int, Encoded] = {}
        for name, net in self.nets.items():
            if id(net.origin) not in encoded:  # variants share where they came from
                X, padding = net.encode(texts, self.max_length)
                nonempty = ~padding.all(1)
                encoded[id(net.origin)] = Encoded(X[nonempty], padding[nonempty])
            X, padding = encoded[id(net.origin)]
            if not len(X):
                return None
            for arithmetic in self.arithmetics:
                profile = measure(net, X, padding, self.metrics, arithmetic, variant=name, batch_size=len(X))
                # What fell back to float64 may have been asked for as well.
                if profile.arithmetics == [arithmetic] or profile.arithmetics[0] not in self.arithmetics:
                    profiles.append(profile)
        return Profile.join(profiles)


BatchRunner = Callable[[BatchMeasurement, Iterator[list[str]]], Iterator[tuple[list[str], Profile | None]]]
"""Hands back each batch with what was measured of it, first to last."""


def _skip(texts: Iterator[str], digest: Any, count: int, expected: str, path: Path) -> None:
    """Read past the excerpts that were measured before, and make sure that they are the same."""
    skipped = 0
    for text in islice(texts, count):
        _digest(digest, text)
        skipped += 1
    same = skipped == count and digest.hexdigest() == expected
    received = f"only {skipped} came" if skipped < count else "others came"
    sentence = f"{path} has counted {count} excerpts, and the same must come again for the run to go on; {received}"
    require(same, f"{sentence}: give another folder, or delete it to start anew", FileError, str(path))


def _digest(digest: Any, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
