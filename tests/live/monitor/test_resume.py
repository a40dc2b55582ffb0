"""Runs that are killed, go back, or go on: the table is that of an undisturbed run."""

import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

import rankscope
from rankscope import Monitor
from rankscope.errors import MonitorError
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import GATHERED, Journal
from tests.live.monitor.killed_training import main
from tests.live.monitor.small import encoder, tokens
from tests.raising import raises


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).table("training")


def killed(folder: Path, steps: int, kills: int) -> int:
    """Train to the end, killed so many times on the way; how often it was."""
    command = [sys.executable, "-m", "tests.live.monitor.killed_training", str(folder), str(steps)]
    done, rng = 0, random.Random(kills)
    while True:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert run.stdout is not None and run.stderr is not None
        at = rng.randrange(5, steps // 3) if done < kills else None
        for _ in run.stdout:
            at = None if at is None else at - 1
            if at == 0:
                run.kill()
                done += 1
                break
        code = run.wait(timeout=120)
        error = run.stderr.read()
        run.stdout.close()
        run.stderr.close()
        if code == 0:
            return done
        assert code == -9, error


@pytest.mark.parametrize(("steps", "kills"), [(200, 1), pytest.param(300, 40, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_table_is_the_same(steps: int, kills: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    main(tmp_path / "whole", steps)
    assert killed(tmp_path / "killed", steps, kills) > 0
    assert table(tmp_path / "killed" / "run").equals(table(tmp_path / "whole" / "run"))
    assert table(tmp_path / "whole" / "run")["step"].n_unique() == steps // 2 + 1


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


def test_scalars_between_looks_are_in_the_state(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(loss=torch.tensor(1.0))
        state = monitor.state_dict()
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as again:
        again.load_state_dict(state)
        for _ in range(3):
            again.step(loss=5.0)
    assert table(tmp_path).filter(metric="loss")["value"].to_list() == [4.0]


def test_a_folder_with_a_run_in_it_asks_from_where(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(2)
        with raises(MonitorError, subject="step"):
            monitor.step(1)
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as again:
        with raises(MonitorError, subject="run"):
            again.step()
        again.resume(2)
        again.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2]


def test_half_a_line_does_not_count(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        journal = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        for step in range(3):
            journal.append(step, pl.DataFrame({"step": [step], "x": [float("nan") if step else 0.5]}))
    path = tmp_path / "t" / "journal.jsonl"
    path.write_text(path.read_text()[:-3])
    found = rankscope.read(tmp_path).table("t")
    assert found["step"].to_list() == [0, 1] and found["x"].is_nan().to_list() == [False, True]
    with Store(tmp_path) as store:
        again = Journal(store, "e", "t", {"step": pl.Int64, "x": pl.Float64}, Manifest())
        assert again.last == 1
        again.append(5, pl.DataFrame({"step": [5], "x": [1.0]}))
        again.gather()
        assert again.last == 5
    assert rankscope.read(tmp_path).table("t")["step"].to_list() == [0, 1, 5]
