"""Input that no one means: one sentence and exit code 2, whatever the surroundings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import WrittenRuns
from tests.cli.running import COMMAND, SMALL, rankscope

DEEP = "[" * 100_000
TINY = '{"layers": %s, "width": 8, "heads": 2}'


def sentence(*arguments: str) -> str:
    code, out, err = rankscope(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("rankscope: ")
    return err


def test_json_without_a_bottom_is_no_architecture_config_or_manifest(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(DEEP)
    assert "must be a JSON file" in sentence("measure", str(tmp_path / "deep.json"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(DEEP)
    assert "config.json" in sentence("measure", str(tmp_path / "model"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text(DEEP)
    assert "manifest.json" in sentence("report", str(run), "-o", str(tmp_path / "page.html"))


def test_a_depth_that_no_memory_holds_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(TINY % 10**12)
    assert "layers must be at most" in sentence("measure", str(tmp_path / "deep.json"))
    assert "layers must be 1 to" in sentence("measure", *SMALL, "--layers", str(10**20))


def test_a_device_without_numbers_is_refused() -> None:
    assert "device must be one" in sentence("measure", *SMALL, "--device", "meta")


def test_a_page_does_not_take_the_place_of_a_folder(runs: WrittenRuns) -> None:
    run = runs.folder / "paths"
    assert f"{run} must be a file to be written; it is a folder" in sentence("report", str(run), "-o", str(run))
    assert not list(runs.folder.glob(".*"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("theorem", ["norm-rank", "dobrushin"])
def test_a_theorem_can_be_asked_alone(theorem: str) -> None:
    code, out, err = rankscope("bounds", *SMALL, "--theorems", theorem)
    assert code == 0 and err == "" and "Measured to 1e-06 of the tokens' size: " in out


@pytest.mark.parametrize(
    ("closed", "line", "code"),
    [
        pytest.param("<&-", "measure tiny.json --text - --variants san --json", 2, marks=pytest.mark.slow),
        (">&-", "--version", 0),
        ("2>&-", "--version", 0),
    ],
)
def test_a_stream_that_is_closed_is_no_traceback(closed: str, line: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(TINY % 2)
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *line.split()]
    done = subprocess.run(shell, input="two words\n", capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="locales have other names")
def test_a_terminal_without_unicode_has_question_marks() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "masks"], env=env, capture_output=True, check=False)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.isascii() and b"causal" in done.stdout
