"""`rankscope paths`: tables, the folder, and parts that add up."""

import pytest

from tests.cli.conftest import WrittenRuns
from tests.cli.running import answered

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


def test_paths_prints_tables_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["paths"]
    assert "The parts add up to the output within" in out and "heaviest single paths" in out
    names = {path.name for path in (runs.folder / "paths").iterdir()}
    assert {"lengths.parquet", "layers.parquet", "heads.parquet", "single_paths.parquet"} < names
    assert {"lengths.png", "lengths.svg", "heads.png", "single_paths.png", "manifest.json"} < names


def test_paths_as_json_add_up() -> None:
    answer = answered("paths", *SMALL, "--variant", "san+skip")
    shares = [row["share"] for row in answer["lengths"] if row["start"] == "all" and row["sample"] == 0]
    assert sum(shares) == pytest.approx(1.0)
    assert [row["paths"] for row in answer["lengths"] if row["start"] == "embedding"][::2] == ["1", "4", "4"]
    assert answer["manifest"]["closure"] < 1e-12 and len(answer["heads"]) == 2 * 2 * 2
