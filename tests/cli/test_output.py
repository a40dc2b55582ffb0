"""Folders that several commands write to."""

import shutil
from pathlib import Path

from rankscope import read
from tests.cli.conftest import WrittenRuns
from tests.cli.running import printed

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


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
