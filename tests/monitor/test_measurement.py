"""What is written of a run that is killed or goes back: the table of an undisturbed one."""

import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope import Monitor
from rankscope.runs.journal import GATHERED
from tests.monitor.killed_training import main
from tests.monitor.small import encoder, tokens


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


def killed(folder: Path, steps: int, kills: int) -> int:
    """Train to the end, the last part in this process, killed so many times on the way; how often it was."""
    command = [sys.executable, "-m", "tests.monitor.killed_training", str(folder), str(steps)]
    rng = random.Random(kills)
    for done in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None and run.stderr is not None
            for _ in islice(run.stdout, rng.randrange(5, steps // 3)):
                pass
            run.kill()
            code, error = run.wait(timeout=120), run.stderr.read()
        if code == 0:
            return done
        assert code == -9, error
    main(folder, steps)
    return kills


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "kills"), [(30, 1), pytest.param(300, 40, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_table_is_the_same(steps: int, kills: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    main(tmp_path / "whole", steps)
    assert killed(tmp_path / "killed", steps, kills) > 0
    assert table(tmp_path / "killed" / "run").equals(table(tmp_path / "whole" / "run"))
    assert table(tmp_path / "whole" / "run")["step"].n_unique() == steps // 2 + 1


@pytest.mark.slow
def test_going_back_takes_away_what_came_later(tmp_path: Path) -> None:
    model, probe = encoder(), tokens(99)
    with Monitor(model, "mu", every=1, probe=probe, run=tmp_path / "one") as monitor:
        for _ in range(GATHERED + 20):
            monitor.step(loss=1.0)
        state = monitor.state_dict()
        for _ in range(30):
            monitor.step(loss=2.0)
        monitor.load_state_dict(state)
        for _ in range(10):
            monitor.step(loss=3.0)
        monitor.resume(GATHERED - 10)  # into what was gathered already
        monitor.step(loss=4.0)
    found = table(tmp_path / "one").filter(metric="loss")
    assert found["step"].to_list() == list(range(1, GATHERED - 8))
    assert found["value"].to_list() == [1.0] * (GATHERED - 10) + [4.0]


def test_going_back_to_the_start_is_no_double(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=1, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step()
        monitor.resume(0)
    found = table(tmp_path)
    assert found["step"].to_list() == [0] * 4 and found["layer"].to_list() == [0, 1, 2, 3]
