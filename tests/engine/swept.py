"""A small sweep, alone in a process: `python -m tests.engine.swept FOLDER WORKERS [ray]`."""

import sys
from pathlib import Path
from typing import Any

from polars.testing import assert_frame_equal

import rankscope
from rankscope.engine import Sweep, sweep

SPEC: dict[str, Any] = {
    "metrics": ["relative_mu", "entropy"],
    "certify": True,
    "paths": True,
    "all": {"samples": 2, "tokens": 8},
    "grid": {"model": "bert-tiny", "depth": [1, 2], "skip": 0.5, "seed": {"range": 2}},
    "list": [
        {"model": "minilm", "depth": 1},
        {"model": "minilm", "seed": 3},  # fails: its weights are not drawn
        {"model": "bert-tiny", "width": 6, "heads": 4},  # fails: no such architecture
    ],
}
CELLS = 2 * 2 + 3
TABLES = ("sweep", "sweep_paths", "sweep_certificates")


def swept(folder: Path, **options: Any) -> Sweep:
    return sweep(SPEC, folder, **options)


def same(one: Path, other: Path) -> None:
    """Bit for bit, but for how long cells took."""
    for name in TABLES:
        assert_frame_equal(rankscope.read(one).tables[name], rankscope.read(other).tables[name], check_exact=True)
    cells = [rankscope.read(folder).tables["cells"].drop("seconds") for folder in (one, other)]
    assert_frame_equal(*cells)


if __name__ == "__main__":
    swept(Path(sys.argv[1]), workers=int(sys.argv[2]), on=sys.argv[3] if len(sys.argv) > 3 else None)
