"""A table that grows: what is complete counts, once."""

from pathlib import Path

import polars as pl

import rankscope
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import Journal


def test_an_incomplete_line_does_not_count(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        for step in range(3):
            journal.append(step, pl.DataFrame({"step": [step], "x": [float("nan") if step else 0.5]}))
    path = tmp_path / "t" / "journal.jsonl"
    path.write_text(path.read_text()[:-3])
    found = rankscope.read(tmp_path).table("t")
    assert found["step"].to_list() == [0, 1] and found["x"].is_nan().to_list() == [False, True]
    with Store(tmp_path) as store:
        again = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        assert again.last == 1
        again.append(5, pl.DataFrame({"step": [5], "x": [1.0]}))
        again.gather()
        assert again.last == 5
    assert rankscope.read(tmp_path).table("t")["step"].to_list() == [0, 1, 5]
