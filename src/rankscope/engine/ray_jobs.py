"""A corpus, and the studies of papers, on a Ray cluster: the numbers of one process, exactly.

`measure --text --on ray` passes `measure_on_cluster` to `profiles.corpus.corpus_steps`; `reproduce --on ray` calls
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

from rankscope.engine.cluster import Cluster
from rankscope.engine.shared_inputs import ZeroCopyPickle, dump
from rankscope.errors import SweepError
from rankscope.files import atomic
from rankscope.metrics import METRICS, chosen_metrics
from rankscope.profiles import Profile
from rankscope.profiles.corpus import BatchMeasurement
from rankscope.studies import Setup, Study, StudyResult, chosen, reproduce
from rankscope.studies.reproduce import home


def measure_on_cluster(
    cluster: Cluster, batches: BatchMeasurement, chunks: Iterator[list[str]]
) -> Iterator[tuple[list[str], Profile | None]]:
    """Measure the batches of a corpus on a cluster; with a cluster, the `runner` of `profiles.corpus.corpus_steps`.

    Free workers take the next chunk of texts; each comes back with its profile, in the order of the chunks. Weights,
    embedding and tokenizer go to each node once.
    """
    for net in batches.nets.values():
        if net.device.type != "cpu":
            raise SweepError(f"a corpus on Ray must be measured on the CPU; got device {net.device}", subject="device")
        getattr(net.origin, "tokenizer", None)  # read here: a node may not have its files
    # A built-in metric goes by name, so that each worker takes its own; a user's goes as it is.
    metrics = [known.name if known.name in METRICS else known for known in chosen_metrics("work", batches.metrics)]
    common = os.urandom(8).hex(), cluster.ray.put(dump(replace(batches, metrics=metrics)))
    submitted, returned = itertools.tee(chunks)
    profiles = cluster.in_order(_measure_batch, ((*common, chunk) for chunk in submitted))
    for profile in profiles:
        yield next(returned), profile


_loaded_batches: tuple[str, BatchMeasurement] | None = None
"""The job that this process, one of Ray's workers, has loaded last, and its networks."""


def _measure_batch(job: str, stored: ZeroCopyPickle, texts: list[str]) -> Profile | None:
    """The task that Ray runs for one batch of a corpus."""
    global _loaded_batches
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
    folders = [home(setup) / study.paper / study.figure for study in studies]
    pieces = (
        (index, (study.paper, study.figure, remote_setup, _read_parts(folders[index])))
        for index, study in enumerate(studies)
    )
    for index, result in cluster.run(_run_study, pieces):
        if isinstance(result, Exception):
            raise result
        outcome, parts = pickle.loads(result)

        def finished(local: Setup, outcome: StudyResult = outcome, parts: dict[str, bytes] = parts) -> StudyResult:
            _write_parts(local.folder, parts)
            return outcome

        yield studies[index], reproduce(studies[index], setup, finished)


def _run_study(paper: str, figure: str, setup: Setup, parts: dict[str, bytes]) -> bytes:
    """The task that Ray runs for a study: its outcome and its parts, pickled.

    Pickled, because arrays that come through Ray's store are read-only, and matplotlib writes to those of a
    figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        local = replace(setup, folder=Path(folder), elsewhere={})
        _write_parts(local.folder, parts)
        outcome = chosen(paper, figure)[0].run(local)
        outcome = replace(outcome, notes=[*outcome.notes, *local.notes()])
        return pickle.dumps((outcome, _read_parts(local.folder)))


def _read_parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "parts").glob("*.parquet"))}


def _write_parts(folder: Path, parts: dict[str, bytes]) -> None:
    for name, data in parts.items():
        with atomic(folder / "parts" / name) as temporary:
            temporary.write_bytes(data)


def _say_nothing(_: Any) -> None:
    """The `say` of a study on a worker, where nobody reads it."""
