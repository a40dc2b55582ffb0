"""Run directories are read whatever their manifests hold; what is none is named."""

import json
import shutil
from pathlib import Path

import polars as pl

from rankscope.errors import FileError
from rankscope.files import write_text
from rankscope.profiles import Profile
from rankscope.report import read_run, write_report
from rankscope.report.reported_run import TABLES
from tests.raising import raises


def test_a_manifest_of_another_make_is_no_stumbling_block(written: tuple[Profile, Path], tmp_path: Path) -> None:
    shutil.copytree(written[1].parent, tmp_path, dirs_exist_ok=True)
    for odd in ({"networks": "none", "origin": "here"}, {"networks": [{"architecture": {"layers": 1}}]}):
        (tmp_path / "manifest.json").write_text(json.dumps(odd))
        assert "Tokens stay apart" in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_a_folder_that_is_no_run_is_a_sentence(written: tuple[Profile, Path], tmp_path: Path) -> None:
    """The subject of the error is the folder, or the file that is not as it must be."""

    def refused(path: Path, folder: Path = tmp_path) -> None:
        with raises(FileError, subject=str(path)):
            read_run(folder)

    refused(tmp_path)
    refused(tmp_path / "nowhere", tmp_path / "nowhere")
    with raises(FileError, subject="folders"):
        write_report([], tmp_path / "report.html")
    with raises(FileError, subject=str(tmp_path)):
        write_text(tmp_path, "page")
    heads, profile, outcome = (tmp_path / name for name in ("heads.parquet", "profile.parquet", "outcome.json"))
    heads.write_text("no table")
    refused(heads)
    written[0].table.write_parquet(heads)
    refused(heads)
    pl.DataFrame({name: ["word"] for name in TABLES["heads"]}).write_parquet(heads)
    refused(heads)
    heads.unlink()
    Profile(written[0].table.head(0), written[0].manifest).save(profile)
    refused(profile)
    written[0].table.write_parquet(profile, metadata={"rankscope": "[1"})
    refused(profile)
    profile.unlink()
    outcome.write_text("[1]")
    refused(outcome)
