"""A corpus, and the studies of papers, on a Ray cluster: the numbers of one process, exactly.

`measure --text --on ray` passes a `CorpusJob` to `profiles.corpus.corpus_steps`; `reproduce --on ray` calls
`reproduce_on_cluster`. Both submit their tasks (`_measure_batch`, `_run_study`) through `cluster.Cluster`.
"""

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rankscope.engine.cluster import Cluster, require_same_software, software
from rankscope.engine.zero_copy_pickle import ZeroCopyPickle, dump
from rankscope.errors import SweepError
from rankscope.metrics import METRICS, chosen_metrics
from rankscope.profiles import Profile
from rankscope.profiles.corpus import BatchMeasurement
from rankscope.studies import Setup, Study, StudyResult, chosen, reproduce
from rankscope.studies.reproduce import home


class CorpusJob:
    """Measures the batches of a corpus on a cluster; the `runner` argument of `profiles.corpus.corpus_steps`.

    Free workers take the next batch, and results come back in the order of the batches. Weights, embedding
    and tokenizer go to each node once.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __call__(
        self, batches: BatchMeasurement, chunks: Iterator[list[str]]
    ) -> Iterator[tuple[list[str], Profile | None]]:
        """Measure each chunk of texts; it comes back with its profile."""
        for net in batches.nets.values():
            if net.device.type != "cpu":
                raise SweepError(
                    f"a corpus on Ray must be measured on the CPU; got device {net.device}", subject="device"
                )
            getattr(net.origin, "tokenizer", None)  # read here: a node may not have its files
        # A built-in metric goes by name, so that each worker takes its own; a user's goes as it is.
        metrics = [
            metric.name if metric.name in METRICS else metric for metric in chosen_metrics("work", batches.metrics)
        ]
        job = os.urandom(8).hex()
        stored = self.cluster.ray.put(dump(replace(batches, metrics=metrics)))
        submitted, returned = itertools.tee(chunks)
        arguments = ((job, stored, chunk, self.cluster.threads, software()) for chunk in submitted)
        for profile in self.cluster.in_order(_measure_batch, arguments):
            yield next(returned), profile


_loaded_batches: tuple[str, BatchMeasurement] | None = None
"""The job that this process, one of Ray's workers, has loaded last, and its networks."""


def _measure_batch(
    job: str, stored: ZeroCopyPickle, texts: list[str], threads: int, driver: dict[str, str]
) -> Profile | None:
    """The task that Ray runs for one batch of a corpus."""
    global _loaded_batches
    require_same_software(software(), "a node that joined since", driver)
    torch.set_num_threads(threads)
    if _loaded_batches is None or _loaded_batches[0] != job:
        _loaded_batches = job, stored.load()
    return _loaded_batches[1](texts)


def reproduce_on_cluster(
    cluster: Cluster, studies: Sequence[Study], setup: Setup
) -> Iterator[tuple[Study, StudyResult]]:
    """Run studies, each on one worker; the driver writes each as it ends.

    Parts that an earlier run has computed go along with a study, so that they are not computed again.
    """
    remote_setup = replace(setup, say=_say_nothing)
    pieces = (
        (number, (study.paper, study.figure, remote_setup, _stored_parts(study, setup), cluster.threads,
                  software()))
        for number, study in enumerate(studies)
    )  # fmt: skip
    for number, result in cluster.run(_run_study, pieces):
        if isinstance(result, Exception):
            raise result
        outcome, parts = pickle.loads(result)

        def finished(local: Setup, outcome: StudyResult = outcome, parts: dict[str, bytes] = parts) -> StudyResult:
            _write_parts(local.folder, parts)
            return outcome

        yield studies[number], reproduce(studies[number], setup, finished)


def _run_study(
    paper: str, figure: str, setup: Setup, parts: dict[str, bytes], threads: int, driver: dict[str, str]
) -> bytes:
    """The task that Ray runs for a study: its outcome and its parts, pickled.

    Pickled, because arrays that come through Ray's store are read-only, and matplotlib writes to those of a
    figure.
    """
    require_same_software(software(), "a node that joined since", driver)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        local = replace(setup, folder=Path(folder))
        _write_parts(local.folder, parts)
        outcome = chosen(paper, figure)[0].run(local)
        return pickle.dumps((outcome, _read_parts(local.folder)))


def _stored_parts(study: Study, setup: Setup) -> dict[str, bytes]:
    return _read_parts(home(setup) / study.paper / study.figure)


def _read_parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "parts").glob("*.parquet"))}


def _write_parts(folder: Path, parts: dict[str, bytes]) -> None:
    from rankscope.files import atomic

    for name, data in parts.items():
        with atomic(folder / "parts" / name) as temporary:
            temporary.write_bytes(data)


def _say_nothing(_: Any) -> None:
    """The `say` of a study on a worker, where nobody reads it."""
