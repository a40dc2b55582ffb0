"""A run folder: what is written is read again, whatever happens to it."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.errors import FileError
from rankscope.runs import Manifest, Store, read
from rankscope.runs.journal import GATHERED, Journal
from tests.made_trainings import measurement, opened
from tests.raising import raises
from tests.runs.test_journal import append

ONE, TWO = pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"a": [3.5]})


def test_commands_keep_their_own_manifests_and_files(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.write("measure", Manifest(model="a"), {"profile": ONE, "cloud": ONE})
        store.write("paths", Manifest(model="b"), {"lengths": TWO}, {"outcome": {"notes": []}})
    run = rankscope.read(tmp_path)
    assert {name: each.model for name, each in run.manifests.items()} == {"measure": "a", "paths": "b"}
    assert run.names == ["cloud", "lengths", "profile"] and run.table("lengths").equals(TWO)
    files = json.loads((tmp_path / "manifest.json").read_text())["entries"]["measure"]["files"]
    assert files["profile.parquet"]["rows"] == 2 and len(files["profile.parquet"]["sha256"]) == 64
    with raises(FileError, subject="clod"):
        run.table("clod")
    with Store(tmp_path) as store:
        store.write("compare", Manifest(model="c"), {"profile": TWO})  # takes that file over
        store.write("measure", Manifest(model="d"), {"spectrum": ONE})  # an earlier cloud is gone
    run = read(tmp_path)
    assert list(run.entries["measure"].files) == ["spectrum.parquet"] and "cloud" not in run.names
    assert run.table("profile").equals(TWO) and run.manifests["paths"].model == "b"
    with Store(tmp_path) as store:
        store.write("measure", Manifest(), {"profile": ONE, "spectrum": ONE})
    assert set(read(tmp_path).manifests) == {"measure", "paths"}, "compare has nothing left"


def test_a_table_grows_chunk_by_chunk(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for number in range(3):
            store.append("train", "losses", pl.DataFrame({"step": [number]}), Manifest(samples=number))
        store.write("train", Manifest(model="a"), {"last": ONE})
        store.drop("losses/000002.parquet")
    run = read(tmp_path)
    assert run.table("losses")["step"].to_list() == [0, 1] and run.names == ["last", "losses"]
    assert "loss" not in run.names
    assert run.manifests["train"].model == "a"


def test_no_file_outside_of_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("../mine.parquet", str(tmp_path / "mine.parquet"), "a/../../mine.parquet", "notes.txt"):
        listed = {"entries": {"measure": {"manifest": {}, "files": {name: {"sha256": ""}}}}}
        (run / "manifest.json").write_text(json.dumps(listed))
        with raises(FileError, subject=str(run / "manifest.json")):
            Store(run)
    assert [path.name for path in run.iterdir()] == ["manifest.json"] and (tmp_path / "mine.parquet").exists()


def test_an_older_manifest_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"networks": [], "command": "rankscope paths"}')
    assert read(tmp_path).manifests == {}
    with Store(tmp_path) as store:
        store.write("paths", Manifest(), {"lengths": ONE})
    assert list(read(tmp_path).manifests) == ["paths"]
    with raises(FileError, subject=str(tmp_path / "nowhere")):
        read(tmp_path / "nowhere")


def test_a_manifest_of_another_program_is_not_written_over(tmp_path: Path) -> None:
    mine = '{"name": "my extension", "manifest_version": 3}'
    (tmp_path / "manifest.json").write_text(mine)
    with raises(FileError, subject=str(tmp_path / "manifest.json")):
        Store(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == [mine]


def test_a_folder_that_was_moved_is_written_no_more_and_another_run_in_its_place_is_whole(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    schema = {"step": pl.Int64, "x": pl.Float64}
    first = Store(a)
    moved = Journal(first, "e", "t", schema, Manifest())
    append(moved, *range(GATHERED + 5))
    a.rename(b)
    with raises(FileError, subject=str(a)):
        append(moved, 1000)
    assert not a.exists()
    with Store(a) as second:
        new = Journal(second, "e", "t", schema, Manifest())
        append(new, 1, 2)
        for write in (
            moved.gather,
            lambda: append(moved, 1000),
            lambda: moved.cut(3),
            lambda: first.write("e", Manifest(), {"profile": ONE}),
            lambda: first.drop("t/000001.parquet"),
        ):
            with raises(FileError, subject=str(a)):
                write()
        first.close()
        with raises(FileError, subject=str(a)):  # the lock of the second is still there
            Store(a)
        append(new, 3)
    assert read(a).table("t")["step"].to_list() == [1, 2, 3]
    assert read(b).table("t")["step"].to_list() == list(range(GATHERED + 5))
    with Store(b) as again:
        assert Journal(again, "e", "t", schema, Manifest()).last == GATHERED + 4


@pytest.mark.parametrize("then", ["renamed", "deleted"])
def test_closing_a_run_whose_folder_is_gone_leaves_nothing_behind(tmp_path: Path, then: str) -> None:
    run_writer = opened(tmp_path / "a")
    run_writer.write(measurement(10))
    if then == "renamed":
        (tmp_path / "a").rename(tmp_path / "b")
    else:
        shutil.rmtree(tmp_path / "a")
    with raises(FileError, subject=str(tmp_path / "a")):
        run_writer.write(measurement(20))
    if then == "renamed":  # in its place again it is written again
        (tmp_path / "b").rename(tmp_path / "a")
        run_writer.write(measurement(30))
        (tmp_path / "a").rename(tmp_path / "b")
    run_writer.close()
    assert not (tmp_path / "a").exists()
    if then == "renamed":
        assert read(tmp_path / "b").table("training")["step"].unique().sort().to_list() == [10, 30]


def test_a_run_is_shown_in_a_few_lines(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(GATHERED + 3):
        run_writer.write(measurement(step))
    run_writer.store.close()
    with Store(tmp_path) as store:
        store.write("measure", Manifest(model="minilm"), {"profile": ONE, "cloud": ONE})
    shown = repr(read(tmp_path)).splitlines()
    assert len(shown) == 3 and str(tmp_path) in shown[0] and max(map(len, shown)) < 160
    rows = GATHERED * len(measurement(0).rows)
    assert "a.SmallGPT" in shown[1] and f"training ({rows:,} rows and 3 steps since)" in shown[1]
    assert shown[2] == "  measure: minilm · profile (2 rows), cloud (2 rows)"
