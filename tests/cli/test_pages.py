"""`rankscope report`: runs on one page; `rankscope explore`: a process, its address, Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import WrittenRuns
from tests.cli.running import COMMAND, printed, rankscope


@pytest.mark.slow
def test_several_runs_become_one_page(runs: WrittenRuns, tmp_path: Path) -> None:
    page = tmp_path / "all.html"
    out = printed("report", "measure", "paths", "bounds", "-o", os.path.relpath(page, runs.folder), cwd=runs.folder)
    assert out.startswith("Report: ") and out.endswith("all.html\n")
    html = page.read_text()
    for section in ("1-residual", "1-cloud", "1-spectrum", "2-paths", "2-heads", "3-bounds"):
        assert f'id="run{section}"' in html


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = rankscope("report", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith("rankscope: ") and "must be a run directory" in done.err


def test_without_the_extra_it_says_the_line_that_installs_it() -> None:
    code = f"import sys; sys.modules['fastapi'] = None; {COMMAND[-1]}"
    command = [*COMMAND[:-1], code, "explore"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'rankscope[explore]'")


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = rankscope("explore", "--port", port)
    assert done.code == 2 and f"{port} cannot be had" in done.err and len(done.err.splitlines()) == 1


@pytest.fixture
def explorer() -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "explore", "bert-tiny", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_serves_until_ctrl_c(explorer: subprocess.Popen[str], busy: bool) -> None:
    assert explorer.stdout is not None and explorer.stderr is not None
    url = json.loads(explorer.stdout.readline())["address"]
    assert url.startswith("http://127.0.0.1:")
    names = [each["name"] for each in httpx.get(f"{url}api/networks", timeout=60).json()["models"]]
    assert names[0] == "bert-tiny" and names[-1] == "random"
    if busy:
        request = {"setting": {"model": "bert-tiny", "layers": 96, "text": "a b c " * 40, "tokens": 64}}
        with httpx.stream("POST", f"{url}api/answer", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            explorer.send_signal(signal.SIGINT)
            assert explorer.wait(60) in (0, 130)
    else:
        explorer.send_signal(signal.SIGINT)
        assert explorer.wait(60) in (0, 130)
    assert explorer.stderr.read() == ""
