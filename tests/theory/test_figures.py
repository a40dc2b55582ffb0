"""Bounds are drawn where they are, as far as they hold, at any depth."""

import math

import numpy as np
import polars as pl
import pytest

from rankscope.errors import TheoremError
from rankscope.figures import power
from rankscope.figures.description import Line
from rankscope.theory import certify
from rankscope.theory.figures import bounds_chart, depth_chart, proved_shares
from tests.raising import raises
from tests.report.runs import NET, X

SAN = NET.variant("san")


@pytest.mark.slow
def test_bounds_are_drawn_where_they_are_at_any_depth() -> None:
    table = certify(SAN.variant(layers=30), X[:1, :4], theorems="dong2021-2.3").table
    measured = next(
        mark for mark in bounds_chart(table).panels[0].marks if isinstance(mark, Line) and mark.name == "measured"
    )
    logs = table.filter(sample=0, quantity="residual", theorem="dong2021-2.3")["log10_measured"].to_list()
    assert logs[-1] < -1e12 and np.array_equal(measured.y, logs)
    assert measured.hover is not None and measured.hover[-1][1] == power(logs[-1])


@pytest.mark.slow
def test_bounds_draw_what_holds() -> None:
    found = certify(SAN, X)
    marks = [mark for panel in bounds_chart(found.table).panels for mark in panel.marks]
    names = " ".join(mark.name for mark in marks if isinstance(mark, Line))
    met = found.table.filter(pl.col("met"), pl.col("sample") == 0, pl.col("quantity") != "affine_rank")
    for theorem in met["theorem"].unique():
        assert theorem in names


@pytest.mark.slow
def test_a_bound_of_zero_has_no_line_and_no_name_in_the_legend() -> None:
    table = certify(SAN, X, theorems=["oscillation", "dobrushin"]).table
    zero = pl.when(theorem="oscillation").then(-math.inf).otherwise("log10_bound")
    for found, theorems in (
        (table, {"oscillation", "dobrushin"}),
        (table.with_columns(log10_bound=zero), {"dobrushin"}),
    ):
        marks = [mark for panel in bounds_chart(found).panels for mark in panel.marks if isinstance(mark, Line)]
        named = {str(mark.name).split()[0] for mark in marks}
        assert named == {*theorems, "measured", "tokens'"} and all(np.isfinite(mark.y).any() for mark in marks)


@pytest.mark.slow
def test_a_figure_needs_a_sample_and_a_size() -> None:
    found = certify(SAN, X, theorems=["dong2021-2.3", "norm-rank"])
    with raises(TheoremError, subject="sample"):
        bounds_chart(found.table, 7)
    with raises(TheoremError, subject="theorems"):
        bounds_chart(found.table.filter(theorem="norm-rank"))


def test_shares_that_are_proved_are_those_of_bounds_and_not_of_the_measurement_itself() -> None:
    rows = [("exact-factors", -9.0), ("dobrushin", -2.0), ("oscillation", -1.0)]
    table = pl.DataFrame([
        {"theorem": name, "quantity": "mu", "kind": "upper", "sample": 0, "layer": 2, "log10_bound": bound,
         "log10_size": 1.0}
        for name, bound in rows
    ])  # fmt: skip
    assert proved_shares("relative_mu", table, 1)["upper"][2] == -3.0


def test_every_theorem_has_a_row_of_one_height() -> None:
    rows = [(f"theorem {k}", "upper", k) for k in range(9)]
    heights = [depth_chart(rows[:count], [3]).size[1] for count in range(1, 10)]
    steps = np.diff(heights)
    assert min(heights) > 1 and min(steps) > 0.2 and np.allclose(steps, steps[0])
