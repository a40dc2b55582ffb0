"""`rankscope spikes`, on a table whose spike and what came before it are known."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rankscope import Spikes, TrainingRun, read
from tests.cli.running import answered, printed, rankscope
from tests.made_trainings import written


@pytest.fixture
def table(tmp_path: Path) -> Path:
    steps = np.arange(600)
    noise = np.random.default_rng(0).normal(size=(2, 600))
    logit = 10 + noise[1] + 30 * ((steps >= 460) & (steps < 520))
    pl.DataFrame({"step": steps, "loss": 2 + 0.1 * noise[0] + 4 * (steps == 500), "largest_logit": logit}).write_csv(
        tmp_path / "history.csv"
    )
    return tmp_path / "history.csv"


def test_it_says_what_came_before(table: Path, tmp_path: Path) -> None:
    said = printed("spikes", table.name, "-o", "found", cwd=tmp_path)
    assert "At step 500" in said and "largest_logit rose 40 steps earlier" in " ".join(said.split())
    events = pl.read_csv(tmp_path / "found" / "events.csv")
    assert events.select("signal", "step", "lead").rows() == [("largest_logit", 460, 40)]
    assert pl.read_csv(tmp_path / "found" / "spikes.csv")["first"].to_list() == [500]
    again = read(tmp_path / "found")
    assert isinstance(again, Spikes) and again.spikes[0].first == 500 and again.events.height == 1
    assert again.manifest.command == "rankscope spikes history.csv -o found"


def test_a_run_folder_that_is_read_stays_a_training(tmp_path: Path) -> None:
    written(tmp_path)
    printed("spikes", ".", "-o", ".", cwd=tmp_path)
    assert isinstance(read(tmp_path), TrainingRun) and (tmp_path / "spikes.csv").is_file()


def test_json_has_everything(table: Path) -> None:
    found = answered("spikes", str(table))
    assert [spike["first"] for spike in found["spikes"]] == [500] and found["events"][0]["lead"] == 40


def test_without_a_spike_there_is_a_sentence(table: Path) -> None:
    assert "no spike" in printed("spikes", str(table), "--deviations", "100")
    assert answered("spikes", str(table), "--deviations", "100")["spikes"] == []


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = rankscope("spikes", str(tmp_path / "gone.csv"))
    assert done.code == 2 and "gone.csv" in done.err


def test_a_table_that_is_read_is_not_written_over(table: Path, tmp_path: Path) -> None:
    table = table.rename(tmp_path / "events.csv")
    before = table.read_bytes()
    done = rankscope("spikes", "events.csv", "-o", ".", cwd=tmp_path)
    assert done.code == 2 and "give -o another folder" in " ".join(done.err.split()) and table.read_bytes() == before
