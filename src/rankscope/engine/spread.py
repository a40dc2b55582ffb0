"""A corpus and the studies of papers on a Ray cluster: the numbers of one process, exactly."""

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rankscope.engine.cluster import Cluster, agreed, refuse_other
from rankscope.engine.laid import Laid, laid
from rankscope.errors import SweepError
from rankscope.metrics import METRICS, chosen_metrics
from rankscope.profiles import Profile
from rankscope.profiles.corpus import Batches
from rankscope.studies import Outcome, Setup, Study, chosen, reproduce
from rankscope.studies.reproduce import home


class Corpus:
    """A `spread` for `profiles.corpus.gathering`: batches are measured by whoever is free, and come back in
    their order. Weights, embedding and tokenizer go to each node once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __call__(
        self, work: Batches, chunks: Iterator[list[str]]
    ) -> Iterator[tuple[list[str], Profile | None]]:
        """Each batch with what was measured of it."""
        for net in work.nets.values():
            if net.device.type != "cpu":
                raise SweepError(f"a corpus on Ray must be measured on the CPU; got device {net.device}")
            getattr(net.origin, "tokenizer", None)  # read here: a node may not have its files
        named = [each.name if each.name in METRICS else each for each in chosen_metrics("work", work.metrics)]
        sent = replace(work, metrics=named)  # a built-in metric must be that of the worker
        name, stored = os.urandom(8).hex(), self.cluster.ray.put(laid(sent))
        ahead, texts = itertools.tee(chunks)
        given = ((name, stored, chunk, self.cluster.threads, agreed()) for chunk in ahead)
        for found in self.cluster.in_order(_batch, given):
            yield next(texts), found


_work: tuple[str, Batches] | None = None


def _batch(name: str, stored: Laid, texts: list[str], threads: int, driver: dict[str, str]) -> Profile | None:
    """A batch, as a task of Ray."""
    global _work
    refuse_other(agreed(), "a node that joined since", driver)
    torch.set_num_threads(threads)
    if _work is None or _work[0] != name:
        _work = name, stored.taken()
    return _work[1](texts)


def reproduced(cluster: Cluster, studies: Sequence[Study], setup: Setup) -> Iterator[tuple[Study, Outcome]]:
    """Studies, each by one worker, written here as they end. What they had computed before is sent along."""
    sent = replace(setup, say=_silent)
    given = (
        (number, (study.paper, study.figure, sent, _parts(study, setup), cluster.threads, agreed()))
        for number, study in enumerate(studies)
    )
    for number, found in cluster.run(_study, given):
        if isinstance(found, Exception):
            raise found
        outcome, parts = pickle.loads(found)

        def kept(own: Setup, outcome: Outcome = outcome, parts: dict[str, bytes] = parts) -> Outcome:
            _lay(own.folder, parts)
            return outcome

        yield studies[number], reproduce(studies[number], setup, kept)


def _study(
    paper: str, figure: str, setup: Setup, parts: dict[str, bytes], threads: int, driver: dict[str, str]
) -> bytes:
    """A study, as a task of Ray: what it found, and what it has computed on the way. Pickled, as numbers that
    come through Ray's store cannot be written to, and matplotlib writes to those of a figure."""
    refuse_other(agreed(), "a node that joined since", driver)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        own = replace(setup, folder=Path(folder))
        _lay(own.folder, parts)
        found = chosen(paper, figure)[0].run(own)
        return pickle.dumps((found, _read(own.folder)))


def _parts(study: Study, setup: Setup) -> dict[str, bytes]:
    return _read(home(setup) / study.paper / study.figure)


def _read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "parts").glob("*.parquet"))}


def _lay(folder: Path, parts: dict[str, bytes]) -> None:
    from rankscope.files import atomic

    for name, data in parts.items():
        with atomic(folder / "parts" / name) as temporary:
            temporary.write_bytes(data)


def _silent(_: Any) -> None:
    """Nobody hears what a worker says."""
