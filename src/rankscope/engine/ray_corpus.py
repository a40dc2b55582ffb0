"""A corpus on a Ray cluster: the numbers of one process, exactly.

`measure --text --on ray` passes `measure_on_cluster` to `profiles.corpus.corpus_steps`; its task, `_measure_batch`,
goes through `cluster.Cluster`.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

from rankscope.engine.cluster import Cluster
from rankscope.engine.shared_inputs import ZeroCopyPickle, dump
from rankscope.errors import SweepError
from rankscope.metrics import METRICS, chosen_metrics
from rankscope.profiles import BatchMeasurement, Profile


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
