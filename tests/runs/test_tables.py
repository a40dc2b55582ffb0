"""How rows and tables are written: every number survives, and a damaged file is named."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rankscope.errors import FileError
from rankscope.runs import Manifest
from rankscope.runs.tables import frame_of, lines_of, manifest_in, read_lines, read_parquet, text_of, write_parquet
from tests.raising import raises

TABLE = pl.DataFrame(
    {"step": [0, 0, 7], "x": [float("nan"), float("-inf"), None], "n": [None, 2**62, -1], "name": ["é\n", "nan", None]}
)


def test_lines_of_json_keep_every_value_and_those_after_a_step_are_read(tmp_path: Path) -> None:
    lines = lines_of(TABLE)
    path = tmp_path / "journal.jsonl"
    path.write_text(text_of(lines) + '{"step": 9, "ro', encoding="utf-8")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[:2]] == [0, 7]
    assert_frame_equal(frame_of(read_lines(path, -1, TABLE.schema)[0], TABLE.schema), TABLE)
    assert_frame_equal(frame_of(read_lines(path, 0, TABLE.schema)[0], TABLE.schema), TABLE[2:])
    assert read_lines(tmp_path / "none", -1, TABLE.schema) == ([], [])


def test_a_table_holds_its_manifest_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TABLE, Manifest(model="minilm"))
    table, manifest = read_parquet(path)
    assert_frame_equal(table, TABLE)
    assert manifest == manifest_in(path) == Manifest(model="minilm")
    TABLE.write_parquet(path)
    assert read_parquet(path)[1] is None
    path.write_bytes(path.read_bytes()[:50])
    for read in (read_parquet, manifest_in):
        with raises(FileError, subject=str(path)):
            read(path)


def test_the_line_for_pandas_on_the_first_page_needs_no_pyarrow() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    assert "`pandas.DataFrame(profile.table.to_dict(as_series=False))`" in page
    assert "`pip install pandas pyarrow`" in page  # for polars' own `to_pandas`
    pandas: Any = pytest.importorskip("pandas")
    frame = pandas.DataFrame(TABLE.to_dict(as_series=False))
    assert list(frame.columns) == TABLE.columns and frame["step"].tolist() == [0, 0, 7]
    assert frame["name"].tolist()[:2] == ["é\n", "nan"] and int(frame["n"][1]) == 2**62
