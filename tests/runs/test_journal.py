"""A table that grows: what is complete counts, once."""

from pathlib import Path

import polars as pl

import rankscope
from rankscope.errors import FileError
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import GATHERED, Journal
from tests.full_disk import full_disk
from tests.raising import raises

SCHEMA = {"step": pl.Int64, "x": pl.Float64}


def append(journal: Journal, *steps: int) -> None:
    for step in steps:
        journal.append(step, pl.DataFrame({"step": [step], "x": [step / 2]}))


def steps_in(folder: Path) -> list[int]:
    found = rankscope.read(folder).tables["t"]
    assert found["x"].to_list() == [step / 2 for step in found["step"]]
    return found["step"].to_list()


def test_an_incomplete_line_does_not_count(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        for step in range(3):
            journal.append(step, pl.DataFrame({"step": [step], "x": [float("nan") if step else 0.5]}))
    path = tmp_path / "t" / "journal.jsonl"
    path.write_text(path.read_text()[:-3])
    found = rankscope.read(tmp_path).tables["t"]
    assert found["step"].to_list() == [0, 1] and found["x"].is_nan().to_list() == [False, True]
    with Store(tmp_path) as store:
        again = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        assert again.last == 1
        again.append(5, pl.DataFrame({"step": [5], "x": [1.0]}))
        again.gather()
        assert again.last == 5
    assert rankscope.read(tmp_path).tables["t"]["step"].to_list() == [0, 1, 5]


def test_a_full_disk_loses_the_line_that_it_cannot_take_and_no_other(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", SCHEMA, Manifest())
        append(journal, 0, 1, 2)
        size = journal.path.stat().st_size
        for room in (size, size + 10):  # nothing of the line, and half of it
            with full_disk(room), raises(FileError, subject=str(journal.path)):
                append(journal, 3)
            assert journal.path.stat().st_size == size
        append(journal, 4)
        assert steps_in(tmp_path) == [0, 1, 2, 4]
    with Store(tmp_path) as store:
        again = Journal(store, "e", "t", SCHEMA, Manifest())
        assert again.last == 4
        append(again, 5)
    assert steps_in(tmp_path) == [0, 1, 2, 4, 5]


def test_half_a_line_that_a_killed_process_left_is_cut_before_the_next(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(Journal(store, "e", "t", SCHEMA, Manifest()), 0, 1)
    path = tmp_path / "t" / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + '{"step": 2, "rows": {"ö'.encode()[:-1])  # half a character, too
    assert steps_in(tmp_path) == [0, 1]
    with Store(tmp_path) as store:
        again = Journal(store, "e", "t", SCHEMA, Manifest())
        append(again, 3)
    assert steps_in(tmp_path) == [0, 1, 3] and path.read_bytes().startswith(whole)


def test_lines_behind_a_damaged_one_are_read(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(Journal(store, "e", "t", SCHEMA, Manifest()), 0, 1, 2, 3)
    path = tmp_path / "t" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:9] + "".join(lines[2:]))  # as 0.2.0 left it: one line is within another
    assert steps_in(tmp_path) == [0, 3]
    with Store(tmp_path) as store:
        append(Journal(store, "e", "t", SCHEMA, Manifest()), 4)
    assert steps_in(tmp_path) == [0, 3, 4]


def test_what_a_full_disk_cannot_cut_is_cut_before_the_next_line(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", SCHEMA, Manifest())
        append(journal, *range(GATHERED + 5))
        with full_disk(), raises(FileError):
            journal.cut(10)
        with full_disk(), raises(FileError):
            append(journal, 11)
        append(journal, 12)
        assert steps_in(tmp_path) == [*range(11), 12]
        journal.gather()
    assert steps_in(tmp_path) == [*range(11), 12]


def test_lines_that_cannot_be_gathered_stay_lines(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", SCHEMA, Manifest())
        append(journal, *range(GATHERED - 1))
        (tmp_path / "t" / "000001.parquet").mkdir()  # in the way of the chunk
        append(journal, GATHERED - 1)
        assert len(journal.lines) == GATHERED and steps_in(tmp_path) == list(range(GATHERED))
        (tmp_path / "t" / "000001.parquet").rmdir()
        append(journal, GATHERED)
        assert steps_in(tmp_path) == list(range(GATHERED + 1))
        assert len(journal.lines) == 0


HOSTILE = [
    "[]", "7", "null", '"step"', "{}", '{"step": 5}', '{"step": "5", "rows": {"x": [1.0]}}',
    '{"step": true, "rows": {}}',
    '{"step": 5, "rows": [1.0]}', '{"step": 5, "rows": {"y": [1.0]}}', '{"step": 5, "rows": {"x": 1.0}}',
    '{"step": 5, "rows": {"x": ["one"]}}', '{"step": 5, "rows": {"x": [[1.0]]}}', '{"step": 5, "rows": {"x": [{}]}}',
    '{"step": NaN, "rows": {"x": [1.0]}}', '{"step": 1' + "0" * 30 + ', "rows": {"x": [1.0]}}', "[" * 10**5,
    '{"step": 5, "rows": {"x": [1.0], "y": [1.0]}}', '{"step": 5, "rows": {"x": [' + "[" * 400 + "]" * 400 + "]}}",
    "\xff",
]  # fmt: skip


def test_a_line_that_holds_no_rows_hides_no_other_and_is_named(tmp_path: Path) -> None:
    for number, bad in enumerate(HOSTILE):
        folder = tmp_path / str(number)
        with Store(folder) as store:
            append(Journal(store, "e", "t", SCHEMA, Manifest()), 0, 1, 2)
        path = folder / "t" / "journal.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], bad, *lines[1:]]) + "\n", encoding="latin-1")
        assert steps_in(folder) == [0, 1, 2], bad[:60]
        (note,) = rankscope.read(folder).table_and_notes("t")[1]
        assert f"{path}: line 2 is no row" in note
        with Store(folder) as store:
            again = Journal(store, "e", "t", SCHEMA, Manifest())
            append(again, 3)
            again.gather()
        assert steps_in(folder) == [0, 1, 2, 3] and rankscope.read(folder).table_and_notes("t")[1] == []


def test_a_cut_at_the_last_step_of_a_chunk_leaves_the_chunk(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", SCHEMA, Manifest())
        append(journal, *range(GATHERED))
        append(journal, GATHERED, GATHERED + 1)
        journal.cut(GATHERED - 1)
        assert len(store.run.chunks("t")) == 2 and not journal.lines and steps_in(tmp_path) == list(range(GATHERED))
        journal.cut(GATHERED - 2)
        assert len(store.run.chunks("t")) == 1 and steps_in(tmp_path) == list(range(GATHERED - 1))
