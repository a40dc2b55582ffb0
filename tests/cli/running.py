"""The command line, run: in this process, where torch is there already, or as a process of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rankscope.cli import app
from tests.cli.documented import must_be_documented

COMMAND = [sys.executable, "-c", "from rankscope.cli import main; main()"]
SMALL = ["bert-tiny", "--max-length", "8", "--samples", "2"]


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def rankscope(*arguments: str, cwd: Path | None = None, text: str | None = None) -> Answer:
    """In this process, with `text` on stdin."""
    out, err, given = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO((text or "").encode()))
    with inside(cwd or Path.cwd()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", given)
        patch.setattr(sys, "argv", ["rankscope", *arguments])
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            app(list(arguments), prog_name="rankscope")
    done = Answer(int(end.value.code or 0), out.getvalue(), err.getvalue())
    if "--json" in arguments and done.code == 0:
        must_be_documented(arguments[0], json.loads(done.out))
    return done


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def process(
    *arguments: str, cwd: Path | None = None, text: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """As a process of its own, with `text` on stdin."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, input=text, timeout=300,
        env={**os.environ, **env}, check=False,
    )  # fmt: skip


def printed(*arguments: str, cwd: Path | None = None) -> str:
    """What a command that ends well prints; it fits into 80 columns."""
    done = rankscope(*arguments, cwd=cwd)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    return done.out


def answered(*arguments: str, cwd: Path | None = None, text: str | None = None) -> Any:
    """What a command answers with `--json`."""
    done = rankscope(*arguments, "--json", cwd=cwd, text=text)
    assert done.code == 0 and done.err == "", done.err
    return json.loads(done.out)
