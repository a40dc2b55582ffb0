"""The table that `rankscope sweep` prints."""

from io import StringIO
from pathlib import Path

from rich.console import Console

import rankscope
from rankscope.cli.sweep import cells_table
from rankscope.engine.views import view_of


def test_what_overflowed_is_no_rounding_noise(tmp_path: Path) -> None:
    sizes = {"model": "bert-tiny", "samples": 2, "tokens": 6, "depth": 2}
    spec = {"metrics": ["mu"], "arithmetic": "float32", "all": sizes, "grid": {"skip": [1.0, 1e200]}}
    swept = rankscope.sweep(spec, tmp_path, workers=1)
    assert swept.table.filter(skip=1e200, layer=2)["value"].is_nan().all()
    Console(file=(printed := StringIO()), width=200).print(cells_table(swept))
    text = " ".join(printed.getvalue().split())
    assert "○" not in text and "noise" not in text and "nan: no number, as after an overflow." in text
    assert view_of(rankscope.read(tmp_path)).cells["noise"].to_list() == [False, False]
