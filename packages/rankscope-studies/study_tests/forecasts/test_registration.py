"""Forecasts are written down once, with a digest, and scored against what was trained."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rankscope.errors import FileError, LabError
from rankscope.forecasts import Plan, outcomes
from rankscope.lab import Copying, Initialisation
from rankscope_studies.forecasts.__main__ import main
from rankscope_studies.forecasts.designs import draw_design
from rankscope_studies.forecasts.registration import (
    confusion,
    digest,
    growth_exponents,
    mistakes,
    register,
    reliability,
    results,
    score,
)

BLIND = 3.0


def trainings(numbers: range, losses: list[float], seed: int = 0) -> list[dict[str, Any]]:
    """What a training of each design would have written, on text."""
    return [
        {"number": number, "seed": seed, "key": f"key {number}", "design": {"task": "next-character"}, "loss": loss,
         "blind": BLIND, "loss_early": 3.0}
        for number, loss in zip(numbers, losses, strict=True)
    ]  # fmt: skip


def registered(probabilities: list[float]) -> dict[str, Any]:
    point = {"depth": 3.0, "residual_last": -1.0, "lowest_value": -2.0, "tilt_value": 0.5}
    forecasts: list[dict[str, Any]] = [
        {
            "number": k,
            "key": f"key {k}",
            "probability": p,
            "place": 1 - p,
            "point": point,
            "growth": {"activations": 0.0, "gradients": 0.1 * k},
        }
        for k, p in enumerate(probabilities)
    ]
    return {"time": "2026-01-01", "digest": digest(forecasts), "forecasts": forecasts}


def test_what_is_right_is_scored_so() -> None:
    said = registered([0.9, 0.8, 0.2, 0.1])
    table = results(said, [*trainings(range(4), [2.0, 2.2, 3.0, math.nan]), *trainings(range(4), [2.0] * 4, seed=1)])
    scores = score(table).filter(pl.col("by") == "forecast").row(0, named=True)
    assert scores["spearman"] == pytest.approx(1.0) and scores["right"] == 1.0 and scores["designs"] == 4
    assert table["learns"].to_list() == [True, True, False, False] and table["loss"][3] == 10.0
    blind = score(table).filter(pl.col("by") == "depth")
    assert math.isnan(blind["spearman"][0]) and blind["right"][0] == 0.5  # the same depth says nothing


def test_probabilities_are_compared_with_shares() -> None:
    draw = np.random.default_rng(0)
    p = draw.random(4000)
    losses = np.where(draw.random(4000) < p, 2.0, 3.0).tolist()
    table = reliability(results(registered(p.round(6).tolist()), trainings(range(4000), losses)))
    assert table.height == 5 and table["designs"].sum() == 4000
    np.testing.assert_allclose(table["learnt"], table["probability"], atol=0.06)


def test_a_forecast_that_was_changed_is_noticed() -> None:
    said = registered([0.9, 0.1])
    said["forecasts"][0]["probability"] = 0.2
    with pytest.raises(FileError):
        results(said, trainings(range(2), [2.0, 3.0]))


def test_another_design_of_the_same_number_does_not_count() -> None:
    lines = trainings(range(2), [2.0, 3.0])
    lines[1]["key"] = "another"
    assert results(registered([0.9, 0.1]), lines).height == 1


@pytest.mark.slow  # reads designs of up to 48 layers
def test_designs_are_registered_once(tmp_path: Path) -> None:
    numbers = [number for number in range(100_000, 100_100) if draw_design(number).layers <= 4][:2]
    said = register(numbers, tmp_path / "said.json", workers=1)
    assert [line["number"] for line in said["forecasts"]] == numbers and digest(said["forecasts"]) == said["digest"]
    assert all(0 <= line["probability"] <= 1 for line in said["forecasts"])
    with pytest.raises(FileError):
        register(numbers, tmp_path / "said.json")


def test_designs_that_were_fitted_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError):
        register(outcomes()["number"].to_list()[:1], tmp_path / "said.json")


def test_skips_alone_grow_by_their_weight() -> None:
    task = Copying(symbols=4, length=3)
    fields = {"norm": "none", "mlp": "none", "attention_skip": 0.5, "final_norm": False, "positions": "none"}
    silent = Initialisation(gains=(("attention.output.weight", 0.0),))
    found = growth_exponents(Plan(task.architecture(5, 8, 2, **fields), task, initialisation=silent))
    assert found == pytest.approx({"activations": math.log(0.5), "gradients": math.log(0.5)})


def test_every_design_is_counted_once() -> None:
    losses = [2.0, 3.0, 2.0, 3.0, 3.0]
    table = results(registered([0.9, 0.8, 0.2, 0.1, 0.3]), trainings(range(5), losses))
    assert confusion(table).rows() == [("next-character", "learns", 1, 1), ("next-character", "does not", 1, 2)]
    by_task = mistakes(table, least=1).filter(pl.col("part") == "task").row(0, named=True)
    assert by_task["designs"] == 5 and by_task["wrong"] == pytest.approx(2 / 5)


def test_the_command_prints_how_often_forecasts_were_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, came = tmp_path / "said.json", tmp_path / "came.jsonl"
    said.write_text(json.dumps(registered([0.9, 0.6, 0.2, 0.1])))
    came.write_text("".join(json.dumps(line) + "\n" for line in trainings(range(4), [2.0, 3.0, 3.0, 3.0])))
    monkeypatch.setattr("sys.argv", ["forecasts", "score", str(said), str(came)])
    main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["task", "by", "designs", "spearman", "right"]
    right = next(row for row in rows if row[1:2] == ["forecast"])
    assert right[2] == "4" and right[4] == "0.750"
