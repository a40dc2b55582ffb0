"""A sweep's table as a frame, and its cells as things to compare."""

import pytest

import rankscope
from rankscope.engine import Sweep, profile_of
from rankscope.errors import SweepError
from tests.cli.running import answered
from tests.cli.running import rankscope as command


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    spec = {
        "metrics": "mu", "all": {"model": "bert-tiny", "samples": 2, "tokens": 6},
        "grid": {"depth": [1, 2], "skip": [0, 1]}, "list": [{"depth": 0}],
    }  # fmt: skip
    return rankscope.sweep(spec, tmp_path_factory.mktemp("runs") / "study", workers=1)


def test_reading_a_run_gives_one_frame_with_a_column_for_each_factor(study: Sweep) -> None:
    frame = rankscope.read(study.run).table()
    assert frame.equals(study.table) and {"cell", "model", "depth", "skip", "value"} <= set(frame.columns)
    assert frame.filter(depth=2, skip=0.0)["cell"].unique().to_list() == [2]


def test_cells_are_chosen_by_number_or_by_factors(study: Sweep) -> None:
    alone, both = profile_of(study.run, "2"), profile_of(study.run, "depth=2")
    assert alone.variants == ["study:2 (depth 2, skip 0)"] and both.variants[0] == alone.variants[0]
    assert both.variants[1:] == ["study:3 (depth 2, skip 1)"]
    rows = study.table.filter(cell=2).sort("sample", "layer")
    assert alone.curve("mu").flatten().tolist() == rows["value"].to_list()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("9", "'9' chooses 0 of 5"),
        ("two", "'two' chooses 0 of 5"),
        ("dept=2", "did you mean 'depth'"),
        ("4", "cell 4 of"),
    ],
)
def test_what_chooses_no_cell_is_a_sentence(choice: str, said: str, study: Sweep) -> None:
    with pytest.raises(SweepError, match=said):
        profile_of(study.run, choice)


def test_compare_takes_cells(study: Sweep) -> None:
    lines = answered("compare", f"{study.run}:skip=1.0", f"{study.run}:0", "--metrics", "mu")["lines"]
    assert [each["name"] for each in lines] == [
        "study:1 (depth 1, skip 1)", "study:3 (depth 2, skip 1)", "study:0 (depth 1, skip 0)"
    ]  # fmt: skip
    assert "cells must be named" in command("compare", str(study.run), "bert-tiny").err
