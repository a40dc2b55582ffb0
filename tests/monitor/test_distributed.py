"""Several processes, one training: the numbers of one process on the joined batch, written once."""

from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.monitor.measurement import UNMEASURED
from rankscope.monitor.weight_gradients import GROUPS
from tests.live.ranks import together
from tests.monitor import distributed_worker
from tests.monitor.distributed_worker import main

EMBEDDINGS = ("embeddings", "embeddings of views", "embeddings that disagree", "embeddings of other widths")
pytestmark = pytest.mark.slow  # processes that import torch and meet each other


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(where one process and two wrote, what the two printed)."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "1").mkdir()
    main(0, 1, folder / "1", ["ddp", "inline", "jacobians", *EMBEDDINGS[:2]])
    ways = ["ddp", "fsdp", "inline", "disagree", "silent", "paths_fsdp", "jacobians", "jacobians_fsdp", *EMBEDDINGS]
    ways += ["alone", "alone from the start"]
    return folder, together(distributed_worker, 2, folder / "2", *ways)


@pytest.mark.parametrize(("way", "alone"), [("ddp", "ddp"), ("fsdp", "ddp"), ("inline", "inline")])
def test_two_processes_give_the_numbers_of_one(way: str, alone: str, runs: tuple[Path, list[str]]) -> None:
    keys = ["step", "layer", "head", "metric"]
    one, two = (rankscope.read(runs[0] / each).tables["training"].sort(keys) for each in (f"1/{alone}", f"2/{way}"))
    assert one.select(keys).equals(two.select(keys)) and len(one)  # written once
    for name in ("mu", "relative_mu", "grad_tokens"):
        tokens = one.filter(metric=name), two.filter(metric=name)
        assert all(each["samples"].unique().to_list() == [4] for each in tokens)
        for column in ("value", "spread", "least", "most"):
            assert ((tokens[0][column] - tokens[1][column]).abs() <= 1e-10 * tokens[0]["value"].abs()).all()


@pytest.mark.parametrize("way", ["ddp", "fsdp", "inline"])
def test_gradients_and_updates_are_those_of_the_joined_batch(way: str, runs: tuple[Path, list[str]]) -> None:
    alone = "inline" if way == "inline" else "ddp"
    one, two = (rankscope.read(runs[0] / each).tables["training"] for each in (f"1/{alone}", f"2/{way}"))
    names = [f"{what}_{group}" for what in ("grad", "update") for group in GROUPS]
    for name in [*names, "lr"]:
        mine, ours = (each.filter(metric=name).sort("step", "layer") for each in (one, two))
        assert len(mine) == len(ours) == (2 if name == "lr" else 2 * 3)  # two measurements of three layers
        assert ours["samples"].unique().to_list() == [1] and mine["value"].min() > 0
        assert ours["value"].to_list() == pytest.approx(mine["value"].to_list(), rel=1e-9)


@pytest.mark.parametrize("way", EMBEDDINGS[:2])
def test_collapse_across_samples_is_of_the_samples_of_all_ranks(way: str, runs: tuple[Path, list[str]]) -> None:
    names = ["rankme", "alpha_req", "uniformity", *(["lidar", "alignment"] if way == EMBEDDINGS[1] else [])]
    keys = ["step", "layer", "metric"]
    one, two = (rankscope.read(runs[0] / each / way).tables["training"].sort(keys) for each in ("1", "2"))
    for name in names:  # no mean over ranks gives these
        mine, ours = (each.filter(metric=name) for each in (one, two))
        assert mine.select(keys).equals(ours.select(keys)) and len(mine) == (3 if "lidar" in names else 3 * 4)
        assert ours["value"].to_list() == pytest.approx(mine["value"].to_list(), rel=1e-8)
        assert ours["floor"].to_list() == mine["floor"].to_list() and ours["samples"].unique().to_list() == [1]


def test_ranks_that_disagree_about_embeddings_are_told(runs: tuple[Path, list[str]]) -> None:
    assert all("MonitorError about embeddings\n" in printed for printed in runs[1])
    assert all(printed.count("MonitorError about metrics and steps\n") == 2 for printed in runs[1])


def test_ranks_that_disagree_are_told(runs: tuple[Path, list[str]]) -> None:
    assert all("MonitorError about metrics and steps\n" in printed for printed in runs[1])
    assert not (runs[0] / "2" / "disagree").exists()
    silent = rankscope.read(runs[0] / "2" / "silent")  # one rank gives no loss: after the first measurement, an alarm
    assert silent.tables["training"]["step"].unique().sort().to_list() == [0, 2, 4]  # of all else that was read
    assert not len(silent.tables["training"].filter(metric="loss"))
    assert [(row["rule"], row["since"]) for row in silent.tables["alarms"].to_dicts()] == [(UNMEASURED, 0)]


def test_a_rank_that_steps_alone_is_told_and_the_training_ends(runs: tuple[Path, list[str]]) -> None:
    run = rankscope.read(runs[0] / "2" / "alone")
    assert run.tables["training"]["step"].unique().to_list() == [0]  # where all ranks were
    assert [(row["rule"], row["since"]) for row in run.tables["alarms"].to_dicts()] == [(UNMEASURED, 0)]
    assert ["MonitorError about ranks\n" in printed for printed in runs[1]] == [True, False]


def test_paths_are_of_the_samples_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    main(0, 1, tmp_path / "1", ["paths"])
    together(distributed_worker, 2, tmp_path / "2", "paths")
    one, two = (rankscope.read(tmp_path / folder / "paths") for folder in ("1", "2"))
    rows = [run.tables["training"].filter(pl.col("metric").str.starts_with("paths")) for run in (one, two)]
    assert rows[0]["samples"].to_list() == rows[1]["samples"].to_list() == [4, 4, 4]
    assert ((rows[0]["value"] - rows[1]["value"]).abs() < 1e-9).all()
    proved = [run.tables["training_certificates"].select("theorem", "met_to", "says_at") for run in (one, two)]
    assert proved[0].equals(proved[1])


def test_jacobians_are_of_the_samples_of_all_ranks(runs: tuple[Path, list[str]]) -> None:
    one, two = (rankscope.read(runs[0] / each / "jacobians").tables["training"] for each in ("1", "2"))
    for name, layers in (("jacobian_norm", 3), ("jacobian_alignment", 2)):
        mine, ours = (each.filter(metric=name).sort("step", "layer") for each in (one, two))
        assert len(mine) == len(ours) == 2 * layers and ours["samples"].unique().to_list() == [4]
        assert ours["value"].to_list() == pytest.approx(mine["value"].to_list(), rel=1e-9)
    assert all("MonitorError about jacobians\n" in printed for printed in runs[1])
    assert not (runs[0] / "2" / "jacobians_fsdp").exists()


def test_paths_of_weights_that_are_spread_out_are_refused(runs: tuple[Path, list[str]]) -> None:
    assert all("MonitorError about paths_every\n" in printed for printed in runs[1])
    assert not (runs[0] / "2" / "paths_fsdp").exists()
