"""Several processes, one training: the numbers of one process on the joined batch, written once."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope


def together(way: str, number: int, folder: Path) -> list[str]:
    """What each of the processes printed."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.live.monitor.ranks", way]
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(number), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]  # fmt: skip
    done = [run.communicate(timeout=240) for run in runs]
    assert all(run.returncode == 0 for run in runs), done
    return [out for out, _ in done]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "ddp-inline"])
def test_two_processes_give_the_numbers_of_one(way: str, tmp_path: Path) -> None:
    together(way.replace("fsdp", "ddp"), 1, tmp_path / "one")
    together(way, 2, tmp_path / "two")
    keys = ["step", "layer", "head", "metric"]
    one, two = (
        rankscope.read(tmp_path / each / "run").table("training").sort(keys) for each in ("one", "two")
    )
    same = pl.col("metric").is_in(["relative_mu", "mu", "entropy"])
    assert one.select(keys).equals(two.select(keys))  # written once
    one, two = one.filter(same), two.filter(same)
    assert one["samples"].to_list() == two["samples"].to_list() == [4] * len(one)
    for name in ("value", "spread", "least", "most"):
        assert ((one[name] - two[name]).abs() <= 1e-10 * one["value"].abs()).all()


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    said = together("disagrees", 2, tmp_path / "two")
    assert all("all ranks must be given the same metrics and steps; rank 0 has" in each for each in said)
    assert not (tmp_path / "two" / "run").exists()
