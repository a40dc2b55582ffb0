"""Which cells a specification has, and every way in which one does not hold together."""

import re
from pathlib import Path
from typing import Any

import pytest

from rankscope.engine import read_spec, spec_of
from rankscope.errors import FileError, MetricError, RankscopeError, SweepError
from tests.raising import raises


def test_a_grid_is_every_combination_in_order() -> None:
    spec = spec_of({"all": {"model": "bert-tiny"}, "grid": {"depth": [2, 3], "seed": {"range": [1, 6, 2]}}})
    assert [(cell["depth"], cell["seed"]) for cell in spec.cells] == [
        (2, 1), (2, 3), (2, 5), (3, 1), (3, 3), (3, 5)
    ]  # fmt: skip
    assert spec.varied == ["depth", "seed"] and {cell["model"] for cell in spec.cells} == {"bert-tiny"}


def test_parts_together_have_each_cell_once() -> None:
    spec = spec_of({"grid": {"skip": [0.0, 1.0]}, "list": [{"skip": 1.0}, {"skip": 0.5, "mask": "causal"}]})
    assert [(cell["skip"], cell.get("mask")) for cell in spec.cells] == [
        (0.0, None), (1.0, None), (0.5, "causal")
    ]  # fmt: skip


def test_a_sample_is_drawn_within_its_bounds_and_the_same_again() -> None:
    given = {
        "sample": {
            "number": 200, "skip": {"low": 0.2, "high": 0.4}, "width": {"low": 8, "high": 512, "log": True},
            "mask": ["causal", "complete"], "depth": {"low": 1, "high": 3},
        }
    }  # fmt: skip
    cells = spec_of(given).cells
    assert cells == spec_of(given).cells and len(cells) == 200
    assert all(0.2 <= cell["skip"] <= 0.4 and type(cell["width"]) is int for cell in cells)  # type: ignore[operator]
    assert {cell["depth"] for cell in cells} == {1, 2, 3} and {cell["mask"] for cell in cells} == {
        "causal", "complete"
    }  # fmt: skip
    widths = sorted(int(cell["width"]) for cell in cells)
    assert widths[0] >= 8 and widths[-1] <= 512 and 40 < widths[100] < 102  # the median of logs is 64
    other = spec_of({"sample": {**given["sample"], "sample_seed": 1}})
    assert other.cells != cells


@pytest.mark.parametrize("empty", [{}, {"metrics": "mu"}, {"grid": {}}, {"all": {}}, {"sample": {"number": 3}}])
def test_a_specification_that_names_no_factor_has_no_cell(empty: dict[str, Any]) -> None:
    with raises(SweepError, subject="cells"):
        spec_of(empty)
    assert len(spec_of({**empty, "list": [{}, {"skip": 0.5}]}).cells) == 2  # the first is all defaults, for comparison


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('metrics = "mu"\ncertify = true\n[grid]\nskip = [0.5, 1.0]\n[[list]]\nmask = "causal"\n')
    spec = read_spec(path)
    assert spec.options.metrics == ("mu",) and spec.options.jobs == ("certify",) and len(spec.cells) == 3


def test_the_specification_of_the_docs_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "sweeps.md"
    (text,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "study.toml").write_text(text)
    spec = read_spec(tmp_path / "study.toml")
    assert len(spec.cells) == 300 and spec.varied == ["depth", "skip", "init", "seed"]


WRONG: list[tuple[dict[str, Any], type[RankscopeError], str]] = [
    ({"grid": {"dept": [1]}}, SweepError, "dept"),
    ({"gird": {}}, SweepError, "gird"),
    ({"grid": {"skip": []}}, SweepError, "skip"),
    ({"list": []}, SweepError, "cells"),
    ({"grid": {name: {"range": 1000} for name in ("seed", "depth", "tokens")}}, SweepError, "grid"),
    ({"grid": {"seed": {"range": 10**9}}}, SweepError, "seed"),
    ({"grid": {"skip": {"low": 0, "high": 1}}}, SweepError, "skip"),
    ({"grid": {"seed": {"range": [1, 5, 0]}}}, SweepError, "seed"),
    ({"sample": {"number": 2, "sample_seed": "x"}}, SweepError, "sample_seed"),
    ({"sample": {"number": 2, "skip": {"low": 0, "high": float("inf")}}}, SweepError, "skip"),
    ({"metrics": 3}, SweepError, "metrics"),
    ({"grid": [1]}, SweepError, "grid"),
    ({"list": {"skip": 1}}, SweepError, "list"),
    ({"sample": {"skip": [1]}}, SweepError, "number"),
    ({"sample": {"number": 2, "skip": {"low": 2, "high": 1}}}, SweepError, "skip"),
    ({"sample": {"number": 2, "width": {"low": 0, "high": 1, "log": True}}}, SweepError, "width"),
    ({"sample": {"number": 2, "width": {"about": 1}}}, SweepError, "width"),
    ({"grid": {"mask": [[1]]}}, SweepError, "mask"),
    ({"metrics": []}, SweepError, "metrics"),
    ({"arithmetic": "exact"}, SweepError, "arithmetic"),
    ({"certify": "yes"}, SweepError, "certify"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "error", "subject"), WRONG)
def test_a_specification_that_does_not_hold_together_is_refused(
    tables: dict[str, Any], error: type[RankscopeError], subject: str
) -> None:
    with raises(error, subject=subject) as caught:
        spec_of(tables)
    assert "\n" not in str(caught.value)


def test_a_grid_that_is_too_large_says_how_large_it_is() -> None:
    with raises(SweepError, subject="grid") as caught:
        spec_of({"grid": {name: {"range": 1000} for name in ("seed", "depth", "tokens")}})
    assert "1,000,000,000 (1000 seed x 1000 depth x 1000 tokens)" in str(caught.value)


def test_a_metric_that_does_not_exist_is_refused() -> None:
    with raises(MetricError):
        spec_of({"metrics": "muu"})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing, damaged = tmp_path / "none.toml", tmp_path / "bad.toml"
    with raises(FileError, subject=str(missing)):
        read_spec(missing)
    damaged.write_text("grid = [")
    with raises(SweepError, subject=str(damaged)):
        read_spec(damaged)
