"""Cores and threads of a process: a fixed number of threads gives the same sums on any machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

LIMITS = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "POLARS_MAX_THREADS"]
"""Environment variables in which libraries look up how many threads they may start."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(threads: int) -> dict[str, str]:
    """Environment variables for a new process of so many threads."""
    return dict.fromkeys(LIMITS, str(threads))


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Give torch so many threads inside the block: then sums are added up in one order on any machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
