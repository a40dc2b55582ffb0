"""Folders that several commands write to."""

import shutil
from pathlib import Path

import pytest

from rankscope.runs import read
from tests.cli.conftest import WrittenRuns
from tests.cli.running import printed, rankscope

SMALL = ["bert-tiny", "--max-length", "16", "--samples", "2"]


@pytest.mark.slow
def test_commands_into_one_folder_keep_their_manifests(runs: WrittenRuns, tmp_path: Path) -> None:
    shutil.copytree(runs.folder / "paths", tmp_path / "out")
    printed("bounds", *SMALL, "-o", "out", cwd=tmp_path)
    run = read(tmp_path / "out")
    assert list(run.manifests) == ["paths", "bounds"]
    for name, manifest in run.manifests.items():
        assert (manifest.command or "").startswith(f"rankscope {name} ") and manifest.versions
        assert manifest.networks[0].architecture and manifest.networks[0].fingerprint
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Manifest of paths" in html and "Which paths carry the output" in html and "What is proved" in html


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line",
    ["measure bert-mini", "paths bert-tiny --seed 1", "measure bert-tiny --layers 3", "compare bert-tiny bert-mini"],
)
def test_a_folder_holds_one_network(runs: WrittenRuns, tmp_path: Path, line: str) -> None:
    shutil.copytree(runs.folder / "bounds", tmp_path / "out")
    before = read(tmp_path / "out").manifests
    code, out, err = rankscope(*line.split(), "--max-length", "8", "--samples", "1", "-o", "out", cwd=tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "bert-tiny" in err and line.split()[1] in err, "both are named"
    assert read(tmp_path / "out").manifests == before


@pytest.mark.slow
def test_a_run_may_be_replaced_by_one_of_another_network(runs: WrittenRuns, tmp_path: Path) -> None:
    shutil.copytree(runs.folder / "measure", tmp_path / "out")
    printed(
        "measure", "bert-mini", "--variants", "san", "--max-length", "8", "--samples", "1", "-o", "out", cwd=tmp_path
    )
    assert read(tmp_path / "out").manifests["measure"].model == "bert-mini"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", ["measure", "paths", "bounds", "compare bert-tiny:san", "demo", "demo --train",
                                  "remedies", "reproduce", "checkpoints"])  # fmt: skip
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "checkpoint-1").mkdir()
    command, *more = line.split()
    model = {"demo": [], "reproduce": [], "checkpoints": [str(tmp_path)]}.get(command, ["bert-tiny"])
    monkeypatch.setattr("rankscope.nets.Transformer.run", None)
    monkeypatch.setattr("rankscope.nets.transformer.random_tensors", None)  # no network is made
    code, out, err = rankscope(command, *model, *more, "-o", "file/out", cwd=tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1 and "file/out" in err
