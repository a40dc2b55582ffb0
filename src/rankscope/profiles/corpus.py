"""Measuring a corpus: excerpts by the chunk, statistics in constant memory, nothing lost when it stops.

A checkpoint is written every so often and whenever the run ends, for whatever reason, and holds the excerpts
of all whole chunks. The same run goes on from it: it reads past the excerpts that were counted, makes sure
they are the same, and gives, bit for bit, what it would have given in one go. A longer corpus that begins the
same way goes on from it, too.
"""

import json
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import FileError, MetricError, TokensError
from rankscope.files import atomic
from rankscope.metrics import Metric, MetricsLike, chosen_metrics
from rankscope.nets import Transformer
from rankscope.nets.origin import Encoded
from rankscope.profiles.gather import RESERVOIR, Gatherer
from rankscope.profiles.measure import DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import Summary

SAVED_EVERY = 20.0
"""Seconds between checkpoints."""


def measure_corpus(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    *,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str | Sequence[str] = "deviation",
    length: int = 128,
    batch: int = 16,
    checkpoint: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    reservoir: int = RESERVOIR,
) -> Summary:
    """Statistics over the excerpts of a corpus, at every layer of every variant.

    `nets` are the variants by name, `texts` any number of excerpts (`sources.excerpts` reads them off files),
    each cut to `length` tokens. `batch` excerpts are encoded and run together. With `checkpoint`, the path of
    a file, an interrupted run goes on where it stopped. `progress` is called with the number of excerpts
    done. Quantiles are exact up to `reservoir` excerpts.

    >>> from rankscope import fresh
    >>> net = fresh("bert-tiny")
    >>> texts = ("a whale " * k for k in range(1, 6))
    >>> measure_corpus({"transformer": net}, texts).curve("relative_residual", "count").tolist()
    [5.0, 5.0, 5.0]
    """
    gathered = None
    for gathered in gathering(
        nets, texts, metrics=metrics, arithmetic=arithmetic, length=length, batch=batch,
        checkpoint=checkpoint, reservoir=reservoir,
    ):  # fmt: skip
        if progress is not None:
            progress(gathered.excerpts)
    if gathered is None or not gathered.excerpts:
        raise TokensError("a corpus must hold at least one excerpt with a token; it holds none")
    return gathered.summary()


def gathering(
    nets: Mapping[str, Transformer],
    texts: Iterable[str],
    *,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str | Sequence[str] = "deviation",
    length: int = 128,
    batch: int = 16,
    checkpoint: str | Path | None = None,
    reservoir: int = RESERVOIR,
    saved_every: float = SAVED_EVERY,
) -> Iterator[Gatherer]:
    """`measure_corpus` step by step: what has been gathered after each chunk, and first what a checkpoint
    held. It is one object, and whole whenever it is seen: also after an interruption."""
    if not nets:
        raise MetricError("a corpus must be measured on at least one network; received none")
    if batch < 1:
        raise TokensError(f"batch must be at least 1 excerpt; got {batch}")
    chosen = chosen_metrics("a corpus", metrics)
    arithmetics = [arithmetic] if isinstance(arithmetic, str) else list(arithmetic)
    key = _key(nets, [each.name for each in chosen], arithmetics, length, batch, reservoir)
    path = None if checkpoint is None else Path(checkpoint)
    stream, digest = iter(texts), blake2b(digest_size=16)
    gathered = Gatherer(reservoir)
    read = 0
    if path is not None and path.exists():
        gathered, read, expected = _restored(path, key)
        _skip(stream, digest, read, expected, path)
        yield gathered
    saved, at = read, time.monotonic()
    try:
        while chunk := list(islice(stream, batch)):
            if (
                path is not None
                and saved < read
                and (len(chunk) < batch or time.monotonic() - at > saved_every)
            ):
                # An incomplete chunk is the last: a longer corpus would go on from before it.
                _save(path, key, gathered, read, digest.hexdigest())
                saved, at = read, time.monotonic()
            found = _measured(nets, chunk, chosen, arithmetics, length)
            with _undisturbed():
                if found is not None:
                    gathered.add(found)
                for text in chunk:
                    _digest(digest, text)
                read += len(chunk)
            yield gathered
    finally:
        if path is not None and saved < read and read % batch == 0:
            with _undisturbed():
                _save(path, key, gathered, read, digest.hexdigest())


def _measured(
    nets: Mapping[str, Transformer],
    texts: list[str],
    metrics: list[Metric],
    arithmetics: list[str],
    length: int,
) -> Profile | None:
    """Every variant in every arithmetic on one chunk; None where no text of it has a token."""
    profiles = []
    encoded: dict[int, Encoded] = {}
    for name, net in nets.items():
        if id(net.origin) not in encoded:  # variants share where they came from
            X, padding = net.encode(texts, length)
            there = ~padding.all(1)
            encoded[id(net.origin)] = Encoded(X[there], padding[there])
        X, padding = encoded[id(net.origin)]
        if not len(X):
            return None
        for arithmetic in arithmetics:
            found = measure(net, X, padding, metrics, arithmetic, variant=name, batch=len(X))
            # What fell back to float64 may have been asked for as well.
            if found.arithmetics == [arithmetic] or found.arithmetics[0] not in arithmetics:
                profiles.append(found)
    return Profile.join(profiles)


def _key(
    nets: Mapping[str, Transformer],
    metrics: list[str],
    arithmetics: list[str],
    length: int,
    batch: int,
    reservoir: int,
) -> dict[str, Any]:
    """All that the numbers depend on, but for the texts themselves."""
    first = next(iter(nets.values()))
    return {
        "variants": {name: net.fingerprint for name, net in nets.items()},
        "embedding": [None if net.origin is None else net.origin.described() for net in nets.values()],
        "metrics": metrics,
        "arithmetics": arithmetics,
        "tokens": length,
        "batch": batch,
        "reservoir": reservoir,
        "device": str(first.device),
        "versions": {name: version(name) for name in ("rankscope", "torch")},
    }


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
            f"{came}: give another folder, or delete that file to start anew"
        )


def _digest(digest: Any, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _save(path: Path, key: dict[str, Any], gathered: Gatherer, read: int, digest: str) -> None:
    if not gathered.excerpts:
        return
    run = np.array(json.dumps({"key": key, "read": read, "digest": digest}))
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez(file, run=run, **gathered.arrays())  # type: ignore[arg-type]  # its keywords are arrays


def _restored(path: Path, key: dict[str, Any]) -> tuple[Gatherer, int, str]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        run = json.loads(str(arrays.pop("run")))
        gathered = Gatherer.restored(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise FileError(
            f"{path} must be the checkpoint of a corpus; it cannot be read ({error}): delete it to start anew"
        ) from error
    other = [name for name, value in json.loads(json.dumps(key)).items() if run["key"].get(name) != value]
    if other:
        raise FileError(
            f"{path} must be the checkpoint of this run; it is of one with other {', '.join(other)}: give "
            "another folder, or delete that file to start anew"
        )
    return gathered, int(run["read"]), str(run["digest"])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that no number is counted by half."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is None:  # no Python handler to put back
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])
