"""Measuring a corpus: excerpts by the batch, their rows kept as they come, nothing lost when it stops.

Rows are written every so often, and whenever the run ends, for whatever reason. The same run goes on from
them: it reads past the excerpts that were measured, makes sure they are the same, and gives, bit for bit,
what it would have given in one go. A longer corpus that begins the same way goes on from them, too.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from rankscope.errors import FileError, MetricError, TokensError
from rankscope.files import undisturbed
from rankscope.metrics import MetricsLike, chosen_metrics
from rankscope.nets import Transformer
from rankscope.nets.origin import Encoded
from rankscope.profiles.corpus_rows import MOST, NAME, Gathered
from rankscope.profiles.measure import DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import Summary
from rankscope.runs import Manifest, Store
from rankscope.runs.key import difference, key_of
from rankscope.runs.tables import manifest_in

SAVED_EVERY = 20.0
"""Seconds between chunks of rows on disk."""


def measure_corpus(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    *,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str | Sequence[str] = "deviation",
    tokens: int = 128,
    batch: int = 16,
    folder: str | Path | Store | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Statistics over the excerpts of a corpus, at every layer of every variant.

    `nets` are the variants by name, `texts` any number of excerpts (`sources.excerpts` reads them off files),
    each cut to so many `tokens`. `batch` excerpts are encoded and run together. With `folder` the rows of
    every excerpt are kept there (`rankscope.read(folder).table("rows")`), and an interrupted run goes on
    where it stopped. `progress` is called with the number of excerpts done.

    >>> from rankscope import fresh
    >>> net = fresh("bert-tiny")
    >>> texts = ("a whale " * k for k in range(1, 6))
    >>> measure_corpus({"transformer": net}, texts).curve("relative_residual", "count").tolist()
    [5.0, 5.0, 5.0]
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder
        store = folder if isinstance(folder, Store) else stack.enter_context(Store(folder))
        steps = gathering(
            nets, texts, store, metrics=metrics, arithmetic=arithmetic, tokens=tokens, batch=batch
        )
        gathered = None
        for gathered in stack.enter_context(closing(steps)):
            if progress is not None:
                progress(gathered.excerpts)
        if gathered is None or not gathered.excerpts:
            raise TokensError("a corpus must hold at least one excerpt with a token; it holds none")
        return gathered.summary()


def gathering(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    store: Store,
    *,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str | Sequence[str] = "deviation",
    tokens: int = 128,
    batch: int = 16,
    compile: bool = False,
    saved_every: float = SAVED_EVERY,
    spread: "Spread | None" = None,
) -> Generator[Gathered]:
    """`measure_corpus` step by step: what has been gathered after each batch, and first what the folder
    held. It is one object, and whole whenever it is seen: also after an interruption. `spread` measures
    batches elsewhere, and hands them back in their order."""
    if not nets:
        raise MetricError("a corpus must be measured on at least one network; received none")
    if batch < 1:
        raise TokensError(f"batch must be at least 1 excerpt; got {batch}")
    chosen = chosen_metrics("a corpus", metrics)
    arithmetics = [arithmetic] if isinstance(arithmetic, str) else list(arithmetic)
    key = key_of(
        nets, metrics=[each.name for each in chosen], arithmetics=arithmetics, tokens=tokens, batch=batch
    )
    stream, digest = iter(texts), blake2b(digest_size=16)
    before = _kept(store, key, batch)
    gathered, read = Gathered(store, before, key), 0
    if before:
        read = before[-1].more["read"]
        _skip(stream, digest, read, before[-1].more["digest"], store.folder / NAME)
        yield gathered
    at = time.monotonic()
    work = Batches(nets, chosen, arithmetics, tokens, compile)
    chunks = iter(lambda: list(islice(stream, batch)), [])
    measured = ((chunk, work(chunk)) for chunk in chunks) if spread is None else spread(work, chunks)
    try:
        for chunk, found in measured:
            late = gathered.waiting > MOST or time.monotonic() - at > saved_every
            if len(chunk) < batch or late:
                # An incomplete batch is the last, and a chunk of its own: a longer corpus goes on before it.
                gathered.flush(read=read, digest=digest.hexdigest())
                at = time.monotonic()
            with undisturbed():
                if found is not None:
                    gathered.add(found)
                for text in chunk:
                    _digest(digest, text)
                read += len(chunk)
            yield gathered
    finally:
        with undisturbed():
            gathered.flush(read=read, digest=digest.hexdigest())


def _kept(store: Store, key: dict[str, Any], batch: int) -> list[Manifest]:
    """What the chunks in the folder say of themselves; one that is not of whole batches is taken away."""
    rows = store.folder / NAME
    chunks = store.run.chunks(NAME)
    if not rows.is_dir():
        for file in chunks:
            store.drop(file)
        return []
    anew = f"give another folder, or delete {rows} to start anew"
    found = [manifest_in(store.run.path(file, anew)) for file in chunks]
    if found and (other := difference(found[0].key or {}, key)):
        raise FileError(f"{rows} must be of this run; it is of one with other {other}: {anew}")
    if found and found[-1].more["read"] % batch:
        store.drop(chunks[-1])
        found.pop()
    return found


@dataclass(frozen=True)
class Batches:
    """Measures a batch of texts: every variant in every arithmetic."""

    nets: Mapping[str, Transformer]
    metrics: MetricsLike
    arithmetics: list[str]
    tokens: int
    compile: bool = False

    def __call__(self, texts: list[str]) -> Profile | None:
        """None where no text has a token."""
        profiles = []
        encoded: dict[int, Encoded] = {}
        for name, net in self.nets.items():
            if id(net.origin) not in encoded:  # variants share where they came from
                X, padding = net.encode(texts, self.tokens)
                there = ~padding.all(1)
                encoded[id(net.origin)] = Encoded(X[there], padding[there])
            X, padding = encoded[id(net.origin)]
            if not len(X):
                return None
            for arithmetic in self.arithmetics:
                found = measure(
                    net,
                    X,
                    padding,
                    self.metrics,
                    arithmetic,
                    variant=name,
                    batch=len(X),
                    compile=self.compile,
                )
                # What fell back to float64 may have been asked for as well.
                if found.arithmetics == [arithmetic] or found.arithmetics[0] not in self.arithmetics:
                    profiles.append(found)
        return Profile.join(profiles)


Spread = Callable[[Batches, Iterator[list[str]]], Iterator[tuple[list[str], Profile | None]]]
"""Hands back each batch with what was measured of it, first to last."""


def _skip(texts: Iterator[str], digest: Any, number: int, expected: str, path: Path) -> None:
    """Read past what was counted, and make sure that it is the same text."""
    skipped = 0
    for text in islice(texts, number):
        _digest(digest, text)
        skipped += 1
    if skipped < number or digest.hexdigest() != expected:
        came = f"only {skipped} came" if skipped < number else "others came"
        raise FileError(
            f"{path} has counted {number} excerpts, and the same must come again for the run to go on; "
            f"{came}: give another folder, or delete it to start anew"
        )


def _digest(digest: Any, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
