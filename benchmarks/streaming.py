"""Peak memory of `rankscope measure --text` by the size of the corpus: it must not grow with it.

Each size runs the whole command in a process of its own, checkpoints and report included. Peak memory is
Linux's VmHWM (a child's `ru_maxrss` would begin at its parent's).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import Row

SIZES = (100, 1_000, 10_000)
WORDS = 12

CODE = """
import atexit
from pathlib import Path
from rankscope.cli import main

def peak():
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

atexit.register(peak)  # a command leaves with its exit code: nothing comes after it
main()
"""
COMMAND = "measure bert-tiny --variants san,transformer --split line --max-length 16 --batch-size 32 -q"


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio): the peak of each size against that of the least."""
    sizes = (4,) if small else SIZES
    peaks = {size: peak(size) for size in sizes}
    least = f"{sizes[0]} excerpts ({peaks[sizes[0]]:.0f} MiB)"
    return [(f"{n:,} excerpts, {mb:.0f} MiB", least, mb / peaks[sizes[0]]) for n, mb in peaks.items()]


def peak(excerpts: int) -> float:
    """MiB at most, of the command on so many short excerpts of the bundled prose."""
    from rankscope.sources import bundled_excerpts

    words = " ".join(bundled_excerpts(20)).split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with path.open("w", encoding="utf-8") as file:
            for number in range(excerpts):
                start = number * WORDS % (len(words) - WORDS)
                file.write(f"{number} {' '.join(words[start : start + WORDS])}\n")
        command = [sys.executable, "-c", CODE, *COMMAND.split(), "--text", str(path), "-o", f"{folder}/run"]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # short excerpts give a second nothing to do
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    return int(done.stdout.split()[-1]) / 1024
