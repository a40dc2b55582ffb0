"""A run folder has one writer at a time, also on systems without `fcntl`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.errors import FileError
from rankscope.runs import Store, read
from tests.raising import raises


def test_two_writers_are_refused_and_one_that_was_killed_blocks_nobody(tmp_path: Path) -> None:
    code = "import sys; from rankscope.runs import Store; s = Store(sys.argv[1]); print('held', flush=True)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with raises(FileError, subject=str(tmp_path)):
        Store(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / ".lock").exists()
    with Store(tmp_path), raises(FileError, subject=str(tmp_path)):
        Store(tmp_path)
    with Store(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with raises(FileError, subject=str(tmp_path / "file")):
        Store(tmp_path / "file")


WITHOUT_FCNTL = """
import os, sys
from types import ModuleType

sys.modules["fcntl"] = None  # what Python itself takes for "cannot be imported"
import rankscope
from rankscope.errors import FileError
from rankscope.runs import Manifest, Store

windows = ModuleType("msvcrt")  # stands in for Windows' own, with a lock of this system
windows.LK_NBLCK = 2

def locking(handle, mode, length):
    try:
        os.lockf(handle, os.F_TLOCK, length)
    except BlockingIOError as error:
        raise PermissionError(*error.args)

windows.locking = locking
sys.modules["msvcrt"] = windows
if sys.argv[2:]:
    try:
        Store(sys.argv[1])
    except FileError as error:
        print(error)
    raise SystemExit

import subprocess
import polars as pl

with Store(sys.argv[1]) as store:
    again = subprocess.run([sys.executable, __file__, sys.argv[1], "again"], capture_output=True, text=True)
    print(again.stdout, again.stderr)
    store.append("training", "training", pl.DataFrame({"step": [0], "value": [0.5]}), Manifest())
"""


@pytest.mark.slow
def test_without_fcntl_rankscope_is_imported_and_writes_a_run(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(WITHOUT_FCNTL)
    done = subprocess.run([sys.executable, str(script), str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "must have one writer at a time" in done.stdout
    assert read(run).table("training")["value"].to_list() == [0.5] and not (run / ".lock").exists()
