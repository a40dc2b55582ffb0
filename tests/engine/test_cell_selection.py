"""A sweep's table as a frame, and its cells as things to compare."""

from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.engine import Sweep, choice_in, profile_of, spec_of
from rankscope.engine.views import chosen_cells
from rankscope.errors import SweepError
from rankscope.runs import Store, begun
from tests.cli.running import answered
from tests.cli.running import rankscope as command
from tests.raising import raises


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    spec = {
        "metrics": "mu", "all": {"model": "bert-tiny", "samples": 2, "tokens": 6},
        "grid": {"depth": [1, 2], "skip": [0, 1]}, "list": [{"depth": 0}],
    }  # fmt: skip
    return rankscope.sweep(spec, tmp_path_factory.mktemp("runs") / "study", workers=1)


@pytest.mark.slow
def test_reading_a_run_gives_one_frame_with_a_column_for_each_factor(study: Sweep) -> None:
    frame = rankscope.read(study.run).table
    assert frame.equals(study.table) and {"cell", "model", "depth", "skip", "value"} <= set(frame.columns)
    assert frame.filter(depth=2, skip=0.0)["cell"].unique().to_list() == [2]


def test_cells_are_chosen_by_number_or_by_factors(study: Sweep) -> None:
    alone, both = profile_of(study.run, "2"), profile_of(study.run, "depth=2")
    assert alone.variants == ["study:2 (depth 2, skip 0)"] and both.variants[0] == alone.variants[0]
    assert both.variants[1:] == ["study:3 (depth 2, skip 1)"]
    rows = study.table.filter(cell=2).sort("sample", "layer")
    assert alone.curve("mu").flatten().tolist() == rows["value"].to_list()


@pytest.mark.parametrize(("choice", "subject"), [("9", "choice"), ("two", "choice"), ("dept=2", "dept"), ("4", "cell")])
def test_a_choice_of_no_measured_cell_is_refused(choice: str, subject: str, study: Sweep) -> None:
    with raises(SweepError, subject=subject):
        profile_of(study.run, choice)


@pytest.mark.parametrize(
    ("choice", "cells"),
    [
        ("mask=window:2", [0]),
        ("remedy=shaped:alpha=1,beta=2", [1]),
        ("remedy=shaped:alpha=1,beta=2,depth=1", [1]),
        ("depth=1, remedy=differential2:peak=0.5,norm=0", [2]),
        ("remedy=differential2:peak=0.5,norm=rms", []),
    ],
)
def test_colons_and_commas_within_values_do_not_split_them(choice: str, cells: list[int], tmp_path: Path) -> None:
    """`norm` is a factor and an option of `differential2` as well: what some cell has decides."""
    spec = spec_of(
        {
            "metrics": "mu",
            "all": {"model": "bert-tiny", "samples": 1, "tokens": 4, "depth": 1, "norm": "layer"},
            "list": [
                {"mask": "window:2"}, {"remedy": "shaped:alpha=1,beta=2"},
                {"remedy": "differential2:peak=0.5,norm=0"}, {"depth": 2},
            ],
        }
    )  # fmt: skip
    folder = tmp_path / "runs:2026" / "study"
    frame = pl.DataFrame([{"cell": number, **cell} for number, cell in enumerate(spec.cells)])
    with Store(folder) as store:
        store.write("sweep", begun("cpu"), {"cells": frame, "sweep": frame})
    assert choice_in(f"{folder}:{choice}") == (folder, choice)
    if cells:
        assert chosen_cells(rankscope.read(folder), choice)["cell"].to_list() == cells
    else:
        with raises(SweepError, subject="choice"):
            chosen_cells(rankscope.read(folder), choice)


def test_compare_takes_cells(study: Sweep) -> None:
    lines = answered("compare", f"{study.run}:skip=1.0", f"{study.run}:0", "--metrics", "mu")["lines"]
    assert [line["name"] for line in lines] == [
        "study:1 (depth 1, skip 1)", "study:3 (depth 2, skip 1)", "study:0 (depth 1, skip 0)"
    ]  # fmt: skip
    unnamed = command("compare", str(study.run), "bert-tiny")
    assert unnamed.code == 2 and f"{study.run}:0" in unnamed.err
