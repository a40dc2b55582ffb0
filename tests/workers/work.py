"""Work for the workers of tests: functions of a module, as workers look them up."""

import os
from pathlib import Path

from rankscope.workers import worker_index


def squared(number: int) -> int:
    """A function of a module, as workers look it up; it fails on five."""
    if number == 5:
        raise ValueError("five")
    return number * number


def dies(path: str) -> int:
    """End the worker the first time; with the path "always", every time."""
    if path == "always" or (path and not Path(path).exists()):
        if path != "always":
            Path(path).touch()
        os._exit(3)
    return os.getpid()


def describe(with_torch: bool) -> tuple[int, str, int, int]:
    """The worker's index, the threads that its environment allows, those of torch, its process group."""
    variable, threads = os.environ["OMP_NUM_THREADS"], 1
    if with_torch:
        import torch  # late: other work starts faster without

        threads = torch.get_num_threads()
    return worker_index(), variable, threads, os.getpgid(0)


class Counter:
    """Work with something that it keeps."""

    count = 0

    def __call__(self, _: int) -> int:
        self.count += 1
        return self.count
