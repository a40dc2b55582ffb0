"""`rankscope forecast`: a table, sentences and changes, or all of it as JSON."""

import json
from pathlib import Path

import pytest

from rankscope import Architecture, Forecast, read
from rankscope.cli.forecast import MAPS, TASKS
from rankscope.forecasts import AXES
from rankscope.lab import TASKS as KNOWN
from tests.cli.running import answered, printed, rankscope

DESIGN = Architecture(layers=3, width=16, heads=2, norm_place="post")


@pytest.fixture
def design(tmp_path: Path) -> str:
    path = tmp_path / "design.json"
    path.write_text(json.dumps(DESIGN.to_dict()))
    return str(path)


def test_it_says_what_to_expect(design: str) -> None:
    said = printed("forecast", design, "--tokens", "12", "--steps", "60", "--no-mends")
    assert "From the first layer to the last" in said and "3 layers, 60 steps" in said
    assert "what would mend it" not in said


@pytest.mark.slow  # two dozen forecasts
def test_changes_follow(design: str) -> None:
    said = printed("forecast", design, "--tokens", "12", "--steps", "60", "--layers", "4")
    assert "4 layers, 60 steps" in said and "what would mend it" in said


def test_json_has_everything(design: str) -> None:
    told = answered("forecast", design, "--tokens", "12", "--no-mends")
    assert 0 <= told["probability"] <= 1 and len(told["table"]) == 4 and told["mends"] == []


def test_a_folder_holds_the_forecast(design: str, tmp_path: Path) -> None:
    told = answered("forecast", design, "--tokens", "12", "--no-mends", "-o", "out", cwd=tmp_path)
    again = read(tmp_path / "out")
    assert isinstance(again, Forecast) and again.verdict == told["verdict"] and again.table.height == 4
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"forecast.json", "layers.png", "layers.svg"}
    assert json.loads((tmp_path / "out" / "forecast.json").read_text()).keys() == told.keys()


@pytest.mark.slow  # four forecasts in worker processes, and figures
def test_a_map_and_a_folder(design: str, tmp_path: Path) -> None:
    options = ("--tokens", "12", "--no-mends", "--map", "skip,rate", "--map-size", "2", "-o", "out")
    said = printed("forecast", design, *options, cwd=tmp_path)
    assert "probability that it learns" in said and "across skip, up rate" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"forecast.json", "layers.png", "map.png", "map.svg"}
    told = json.loads((tmp_path / "out" / "forecast.json").read_text())
    assert {row["x"] for row in told["map"]} == {0.0, 1.0} and len(told["map"]) == 4


def test_tasks_are_those_of_the_lab() -> None:
    assert set(TASKS) == set(KNOWN.shipped)
    assert set(MAPS) == set(AXES)


@pytest.mark.parametrize("wrong", [("--lr", "0"), ("--task", "nothing"), ("--layers", "0"), ("--map", "skip")])
def test_a_mistake_is_one_sentence(design: str, wrong: tuple[str, str]) -> None:
    done = rankscope("forecast", design, *wrong)
    assert done.code == 2 and done.err.count("\n") == 1


def test_help_has_the_training_under_its_own_heading() -> None:
    said = printed("forecast", "--help")
    training = said.partition("─ Training ")[2].partition("─ Text ")[0].partition("─ Result ")[0]
    assert all(option in training for option in ("--task", "--steps", "--lr"))
    assert "read alike" not in said and "plane of two" not in said
