"""Peak memory of `rankscope measure --text` by the size of the corpus: it must not grow with it.

Each size runs the whole command in a process of its own, checkpoints and report included. Peak memory is
Linux's VmHWM (a child's `ru_maxrss` would begin at its parent's).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = (100, 1_000, 10_000)
WORDS = 12

CODE = """
import sys
from pathlib import Path
from rankscope.cli import app

text, folder = sys.argv[1:]
app(["measure", "bert-tiny", "--text", text, "--split", "line", "--tokens", "16", "-o", folder, "-q"],
    standalone_mode=False)
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def rows() -> list[tuple[str, str, float]]:
    """(what, against what, ratio): the peak of each size against that of the least."""
    peaks = {size: peak(size) for size in SIZES}
    least = SIZES[0]
    return [
        (
            f"{size:,} excerpts, {peaks[size]:.0f} MiB",
            f"{least} excerpts ({peaks[least]:.0f} MiB)",
            peaks[size] / peaks[least],
        )
        for size in SIZES
    ]


def peak(excerpts: int) -> float:
    """MiB at most, of the command on so many short excerpts of the bundled prose."""
    from rankscope.sources.words import bundled_excerpts

    words = " ".join(bundled_excerpts(20)).split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with path.open("w", encoding="utf-8") as file:
            for number in range(excerpts):
                start = number * WORDS % (len(words) - WORDS)
                file.write(f"{number} {' '.join(words[start : start + WORDS])}\n")
        command = [sys.executable, "-c", CODE, str(path), str(Path(folder) / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024
