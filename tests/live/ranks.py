"""Starts several processes that train one model together, each `python -m WORKER rank number folder way ...`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def together(worker: ModuleType, number: int, folder: Path, *ways: str) -> list[str]:
    """What each of the processes printed."""
    runs = started(worker, range(number), number, folder, *ways)
    done = [run.communicate(timeout=600) for run in runs]
    assert all(run.returncode == 0 for run in runs), done
    return [out for out, _ in done]


def beside(worker: ModuleType, folder: Path, *ways: str) -> None:
    """Two processes, of which this is the first: the second alone has to import torch."""
    (run,) = started(worker, [1], 2, folder, *ways)
    try:
        worker.main(0, 2, folder, list(ways))
    finally:
        out, error = run.communicate(timeout=120)
    assert run.returncode == 0, out + error


def started(
    worker: ModuleType, ranks: Sequence[int], number: int, folder: Path, *ways: str
) -> "list[subprocess.Popen[str]]":
    folder.mkdir()
    command = [sys.executable, "-m", worker.__name__]
    return [
        subprocess.Popen(
            [*command, str(rank), str(number), str(folder), *ways], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
