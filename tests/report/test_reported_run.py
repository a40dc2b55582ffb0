"""Run directories are read whatever their manifests hold; what is none is named."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from rankscope.errors import FileError
from rankscope.files import write_text
from rankscope.nets import Transformer
from rankscope.paths import decompose
from rankscope.profiles import Profile
from rankscope.report import read_run, write_report
from rankscope.report.reported_run import TABLES
from rankscope.runs import Store, manifest_of
from rankscope.theory import Certificates, certify
from tests.raising import raises
from tests.report.runs import NET, X, profile_of


def test_a_manifest_of_another_make_is_no_stumbling_block(written: tuple[Profile, Path], tmp_path: Path) -> None:
    shutil.copytree(written[1].parent, tmp_path, dirs_exist_ok=True)
    for odd in ({"networks": "none", "origin": "here"}, {"networks": [{"architecture": {"layers": 1}}]}):
        (tmp_path / "manifest.json").write_text(json.dumps(odd))
        assert "Tokens stay apart" in write_report([tmp_path], tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_chapter_is_of_one_network(tmp_path: Path) -> None:
    """What another network has left in the folder is not shown, and a note says so."""
    other = Transformer.random(NET.arch, seed=1, init="xavier")
    profile, paths = profile_of(("san", "transformer")), decompose(other, X)
    for net, model, left_out in ((NET, "a", False), (other, "a", True), (NET, "b", True)):
        found = certify(net.variant("san"), X, variant="san")
        certificates = Certificates(found.table, found.manifest.adding(model=model))
        with Store(tmp_path) as store:
            store.write("measure", profile.manifest.adding(model="a"), {"profile": with_model(profile, "a")})
            store.write("bounds", certificates.manifest, {"certificates": certificates})
        run = read_run(tmp_path)
        assert list(run.certificates) == ([] if left_out else ["san"])
        assert [note for note in run.notes if "certificates.parquet" in note] == run.notes and bool(
            run.notes
        ) == left_out
        assert ("What is proved" in write_report([tmp_path], tmp_path / "report.html").read_text()) != left_out
    with Store(tmp_path) as store:
        described = {"fingerprint": other.fingerprint, "architecture": other.arch.to_dict()}
        manifest = manifest_of(described, "cpu", "transformer", "float64", [], {})
        store.write("paths", manifest, {"lengths": paths.by_length().table})
    assert "lengths" not in read_run(tmp_path).tables


def with_model(profile: Profile, model: str) -> Profile:
    return Profile(profile.table, profile.manifest.adding(model=model))


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
    heads, profile = (tmp_path / name for name in ("heads.parquet", "profile.parquet"))
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
