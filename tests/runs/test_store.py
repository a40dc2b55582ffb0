"""A run folder: what is written is read again, by one writer at a time, whatever happens to it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.errors import FileError
from rankscope.runs import Manifest, Network, Stopped, Store, Text, read
from rankscope.runs.key import difference, digest, files_of, key_of
from rankscope.sources import fresh, load

ONE, TWO = pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"a": [3.5]})


def test_a_manifest_keeps_what_it_knows_and_what_it_does_not() -> None:
    given = {
        "created": "now", "networks": [{"variant": "san", "metrics": ["mu"], "later": 1}],
        "text": {"path": "a.txt", "limit": 3}, "stopped": {"finished": ["san"], "asked": 2},
        "later": {"b": []},
    }  # fmt: skip
    manifest = Manifest.from_dict(given)
    assert manifest.networks == (Network(variant="san", metrics=("mu",), more={"later": 1}),)
    assert manifest.text == Text(path="a.txt", limit=3)
    assert manifest.stopped == Stopped(finished=("san",), asked=2)
    assert manifest.more == {"later": {"b": []}}
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    for field, odd in (
        ("created", 1),
        ("networks", {}),
        ("networks", [1]),
        ("text", "a.txt"),
        ("samples", "3"),
    ):
        with pytest.raises(ValueError, match="must"):
            Manifest.from_dict({**given, field: odd})


def test_commands_keep_their_own_manifests_and_files(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.write("measure", Manifest(model="a"), {"profile": ONE, "cloud": ONE})
        store.write("paths", Manifest(model="b"), {"lengths": TWO}, {"outcome": {"notes": []}})
    run = rankscope.read(tmp_path)
    assert {name: each.model for name, each in run.manifests.items()} == {"measure": "a", "paths": "b"}
    assert run.names == ["cloud", "lengths", "profile"] and run.table("lengths").equals(TWO)
    files = json.loads((tmp_path / "manifest.json").read_text())["entries"]["measure"]["files"]
    assert files["profile.parquet"]["rows"] == 2 and len(files["profile.parquet"]["sha256"]) == 64
    with pytest.raises(FileError, match="must be one of cloud, lengths, profile; got 'clod'"):
        run.table("clod")
    with Store(tmp_path) as store:
        store.write("compare", Manifest(model="c"), {"profile": TWO})  # takes that file over
        store.write("measure", Manifest(model="d"), {"spectrum": ONE})  # an earlier cloud is gone
    run = read(tmp_path)
    assert list(run.entries["measure"].files) == ["spectrum.parquet"] and not run.has("cloud")
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
    assert run.manifests["train"].model == "a"


def test_two_writers_are_refused_and_one_that_was_killed_bars_nobody(tmp_path: Path) -> None:
    code = "import sys; from rankscope.runs import Store; s = Store(sys.argv[1]); print('held', flush=True)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(FileError, match="must have one writer at a time; another run is writing there"):
        Store(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / ".lock").exists()
    with Store(tmp_path), pytest.raises(FileError, match="one writer"):
        Store(tmp_path)
    with Store(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="must be a place that can be written"):
        Store(tmp_path / "file")


def test_no_file_outside_of_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("../mine.parquet", str(tmp_path / "mine.parquet"), "a/../../mine.parquet", "notes.txt"):
        listed = {"entries": {"measure": {"manifest": {}, "files": {name: {"sha256": ""}}}}}
        (run / "manifest.json").write_text(json.dumps(listed))
        with pytest.raises(FileError, match=r"manifest\.json must list .*a file must lie in the folder"):
            Store(run)
    assert [path.name for path in run.iterdir()] == ["manifest.json"] and (tmp_path / "mine.parquet").exists()


def test_an_older_manifest_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"networks": [], "command": "rankscope paths"}')
    assert read(tmp_path).manifests == {}
    with Store(tmp_path) as store:
        store.write("paths", Manifest(), {"lengths": ONE})
    assert list(read(tmp_path).manifests) == ["paths"]
    with pytest.raises(FileError, match="there is none at"):
        read(tmp_path / "nowhere")


def test_the_key_holds_all_that_decides_the_numbers(tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    key = key_of({"a": net}, tokens=8)
    assert {"rankscope", "torch", "polars"} <= set(key["versions"]) and key["device"] == "cpu"
    assert digest(key) == digest(key_of({"a": fresh("bert-tiny")}, tokens=8))
    assert difference(key, key_of({"a": net}, tokens=9)) == "tokens (8, now 9)"
    assert "variants of a" in difference(key, key_of({"a": fresh("bert-tiny", seed=1)}, tokens=8))
    older = {**key, "versions": {**key["versions"], "torch": "1.0"}}
    assert difference(older, key).startswith("versions of torch (1.0, now ")
    (tmp_path / "weights").write_text("a")
    before = files_of(str(tmp_path))
    (tmp_path / "weights").write_text("ab")
    assert files_of(str(tmp_path)) != before and files_of("bert-base") == ["bert-base"]


def test_a_tokenizer_is_known_by_what_it_does() -> None:
    origin = load("minilm").origin
    assert origin is not None
    before = origin.fingerprint()
    origin.words(["Call me Ishmael."], 3)  # it has cut a text since
    assert origin.fingerprint() == before == load("minilm").origin.fingerprint()  # type: ignore[union-attr]
    origin.tokenizer.add_tokens(["ishmaelite"])  # type: ignore[attr-defined]
    assert origin.fingerprint() != before
