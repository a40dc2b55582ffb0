"""Which cells a specification has, and every way in which one does not hold together."""

import re
from pathlib import Path
from typing import Any

import pytest

from rankscope.engine import read_spec, spec_of
from rankscope.errors import FileError, MetricError, RankscopeError, SweepError


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


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('metrics = "mu"\ncertify = true\n[grid]\nskip = [0.5, 1.0]\n[[list]]\nmask = "causal"\n')
    spec = read_spec(path)
    assert spec.options.metrics == ("mu",) and spec.options.certify and len(spec.cells) == 3


def test_the_specification_of_the_docs_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "sweeps.md"
    (text,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "study.toml").write_text(text)
    spec = read_spec(tmp_path / "study.toml")
    assert len(spec.cells) == 300 and spec.varied == ["depth", "skip", "init", "seed"]


WRONG: list[tuple[dict[str, Any], type[RankscopeError], str]] = [
    ({"grid": {"dept": [1]}}, SweepError, "a factor must be one of"),
    ({"gird": {}}, SweepError, "a part of a sweep must be one of"),
    ({"grid": {"skip": []}}, SweepError, "every factor of a grid must have a value; skip has none"),
    ({"list": []}, SweepError, "a sweep must have at least one cell; it has none"),
    ({"grid": {name: {"range": 1000} for name in ("seed", "depth", "tokens")}}, SweepError,
     "at most 1,000,000 cells; this grid has 1,000,000,000 (1000 seed x 1000 depth x 1000 tokens)"),
    ({"grid": {"seed": {"range": 10**9}}}, SweepError, "at most 1,000,000 levels"),
    ({"grid": {"skip": {"low": 0, "high": 1}}}, SweepError, "must be a value, a list, or {range = 5}"),
    ({"grid": {"seed": {"range": [1, 5, 0]}}}, SweepError, "must be a value, a list, or {range = 5}"),
    ({"sample": {"number": 2, "sample_seed": "x"}}, SweepError, "sample_seed must be a whole number"),
    ({"sample": {"number": 2, "skip": {"low": 0, "high": float("inf")}}}, SweepError, "numbers low <= high"),
    ({"metrics": 3}, SweepError, "metrics must be names"),
    ({"grid": [1]}, SweepError, "grid must be a table of factors; got a list"),
    ({"list": {"skip": 1}}, SweepError, "list must be tables of factors"),
    ({"sample": {"skip": [1]}}, SweepError, "number of a sample must be a whole number"),
    ({"sample": {"number": 2, "skip": {"low": 2, "high": 1}}}, SweepError, "numbers low <= high"),
    ({"sample": {"number": 2, "width": {"low": 0, "high": 1, "log": True}}}, SweepError, "above 0"),
    ({"sample": {"number": 2, "width": {"about": 1}}}, SweepError, "or {low = 0, high = 1}"),
    ({"grid": {"mask": [[1]]}}, SweepError, "mask must be a number, a word or true/false; got a list"),
    ({"metrics": "muu"}, MetricError, "metric"),
    ({"metrics": []}, SweepError, "metrics must name at least one"),
    ({"arithmetic": "exact"}, SweepError, "arithmetic must be one of"),
    ({"certify": "yes"}, SweepError, "certify must be true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "said"), WRONG, ids=[said[:40] for _, _, said in WRONG])
def test_what_does_not_hold_together_is_a_sentence(
    given: dict[str, Any], error: type[RankscopeError], said: str
) -> None:
    with pytest.raises(error) as raised:
        spec_of(given)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="a specification must be a TOML file"):
        read_spec(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("grid = [")
    with pytest.raises(SweepError, match="must be TOML"):
        read_spec(tmp_path / "bad.toml")
