"""Ctrl-C in a terminal: what was done is shown and written, and a sentence says so."""

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from rankscope.profiles import Profile
from rankscope.runs import EarlyStop, read
from rankscope.theory import Certificates
from tests.cli.running import COMMAND


def interrupted(awaited: str | None, *arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Run with a terminal for stderr, press Ctrl-C once the progress names what is awaited; answers with the
    exit code, stdout, and what the terminal says at last."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "COLUMNS": "200", "TERM": "xterm"},
        # As from a shell: what runs in the background may have been told to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(theirs)
    seen, pressed = "", False
    while True:
        try:
            piece = os.read(ours, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
        if not pressed and awaited is not None and awaited in seen:
            run.send_signal(signal.SIGINT)
            pressed = True
    os.close(ours)
    out, _ = run.communicate(timeout=120)
    return run.returncode, out, seen.replace("\r", "\n").rstrip("\n").rpartition("rankscope: ")[2]


@pytest.mark.slow
def test_measure_keeps_the_variants_that_were_finished(tmp_path: Path) -> None:
    code, out, said = interrupted(
        "transformer, deviation", "measure", "bert-mini", "--variants", "san,transformer", "--layers", "40",
        "--samples", "1", "--metrics", "mu", "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert code == 130 and " san " in out and " transformer " not in out
    assert said == "stopped after 1 of 2 (san); these are written to out"
    profile = Profile.read(tmp_path / "out" / "profile.parquet")
    assert profile.variants == ["san"] and profile.manifest.stopped == EarlyStop(finished=("san",), asked=2)
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
def test_a_sweep_goes_on_with_the_cells_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        "metrics = 'mu'\n[all]\nmodel = 'bert-tiny'\nsamples = 2\n[grid]\ndepth = 30\nseed = {range = 40}\n"
    )
    code, _, said = interrupted("2 of 40 cells", "sweep", "study.toml", "--workers", "1", cwd=tmp_path)
    assert code == 130 and said.endswith("of 40 cells; the same command resumes from there")
    before = int(read(tmp_path / "runs" / "study").tables["cells"]["done"].sum())
    assert said.startswith(f"stopped after {before} of") and 2 <= before < 40


@pytest.mark.slow
def test_compare_keeps_those_that_were_finished(tmp_path: Path) -> None:
    code, out, said = interrupted(
        "bert-base (random weights), deviation", "compare", "bert-tiny:san", "bert-tiny", "bert-base",
        "--metrics", "mu",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 130 and "bert-tiny:san" in out and "bert-base" not in out
    done = "bert-tiny:san (random weights), bert-tiny (random weights)"
    assert said == f"stopped after 2 of 3 ({done}); nothing is written without -o"


@pytest.mark.slow
def test_paths_keeps_lengths_and_heads(tmp_path: Path) -> None:
    code, out, said = interrupted(
        "heaviest single paths", "paths", "bert-mini", "--layers", "8", "--top", "99", "--samples", "1",
        "--max-length", "32", "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert code == 130 and "Paths by length" in out and "Heads, mean over samples" in out
    assert said == "stopped after lengths and heads; these are written to out"
    assert {"lengths.parquet", "heads.parquet", "manifest.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_bounds_keeps_the_samples_that_were_finished(tmp_path: Path) -> None:
    code, out, said = interrupted(
        "sample 2 of 3", "bounds", "bert-mini", "--layers", "12", "--samples", "3", "--max-length", "32",
        "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert code == 130 and "Bounds whose hypotheses are met" in out
    assert said == "stopped after 1 of 3 samples; these are written to out"
    found = Certificates.read(tmp_path / "out" / "certificates.parquet")
    assert found.table["sample"].unique().to_list() == [0]
    assert read(tmp_path / "out").manifests["bounds"].samples == 1


@pytest.mark.slow
def test_reproduce_says_that_it_goes_on(tmp_path: Path) -> None:
    code, _, said = interrupted("wu2024 fig1: ", "reproduce", "wu2024", "-o", "out", cwd=tmp_path)
    assert code == 130
    assert said == "stopped in wu2024 fig1, after 0 of 8; the same command resumes from here"


@pytest.mark.slow
def test_results_go_to_stdout_while_a_terminal_shows_progress(tmp_path: Path) -> None:
    code, out, seen = interrupted(None, "reproduce", "dong2021", "lengths", "-o", "out", cwd=tmp_path)
    assert code == 0 and out.count("agrees") == 8 and out.splitlines()[-2].startswith("Written: ")
    assert "agrees" not in seen and "dong2021 lengths" in seen
