"""Bounds are drawn where they are, as far as they hold, at any depth; card, terminal, report and explorer print the
same cells, of any theorem."""

import io
import math

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from rankscope.cli.show import tabular
from rankscope.errors import TheoremError
from rankscope.figures import power
from rankscope.figures.description import Line
from rankscope.theory import Certificates, certify
from rankscope.theory.depth import depth_of
from rankscope.theory.figures import (
    bounds_chart,
    bounds_sentence,
    certificate_table,
    depth_chart,
    failing_table,
    proved_sentence,
    proved_shares,
)
from rankscope_explorer.answers import QUANTITIES, bounds_section
from tests.raising import raises
from tests.report.runs import NET, X
from tests.theory.test_certificates import FOUND

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


MINE = FOUND.table.with_columns(
    theorem="mine $x$ " + pl.col("theorem"), quantity=pl.col("quantity").replace("mu", "my_$size")
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("table", [FOUND.table, MINE], ids=["ours", "unknown names"])
def test_every_output_has_the_same_numbers(table: pl.DataFrame) -> None:
    found = Certificates(table, FOUND.manifest)
    views = found.views()
    report, html = certificate_table(found.views(), found.table, "san"), found._repr_html_()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*map(tabular, (*found.overview().tables, failing_table(found.table, "san"))))
    printed = console.export_text()
    page = bounds_section(found)
    on_page = {row[0]: row[1] for row in page.tables[0].rows}
    met = [view for view in views if view.met_to]
    assert [row[0] for row in report.rows] == [view.theorem for view in met] and len(met) > 3
    for view, row in zip(met, report.rows, strict=True):
        assert row[4] == view.measured and row[5].endswith(view.proved) and row[6] == view.slack
        line = next(line for line in printed.splitlines() if f"{view.theorem} " in line)
        assert view.measured in line and view.proved in line
        assert all(cell in html and cell in str(found) for cell in (view.measured, view.proved))
        assert view.state == "vacuous" or f" {view.measured} {view.sign} {view.bound}" in on_page[view.theorem]
    for says, number, limit, theorems in failing_table(found.table, "san").rows:
        assert limit in printed and number in printed and says.split()[0] in printed and theorems
    panels = len(bounds_chart(found.table).panels)
    assert panels == len({view.quantity for view in met} - {"affine_rank"}) >= 2
    saying = {view.quantity for view in met if view.state == "says"}
    assert {label for label, _ in page.plots[0].views} == {QUANTITIES.get(name, name) for name in saying}
    telling = sum(view.state == "says" for view in views)
    assert bounds_sentence(views, "for san").startswith(
        f"Of {len(views)} theorems {len(met)} hold for san, {telling} of them "
    )
    depth = depth_of(found, 1e-6)
    upper = [layer for name, kind, layer in depth.proved if kind == "upper" and "exact" not in name]
    assert f"Proved by layer {min(upper)}" in depth.said and depth.uniform in depth.said


def test_what_is_proved_is_the_best_bound_that_holds_for_every_sample_at_the_last_layer() -> None:
    """By hand: upper bounds of two theorems and two samples at two layers; one theorem goes further for one sample."""
    rows = [
        # theorem, quantity, kind, sample, layer, log10_bound
        ("loose", "mu", "upper", 0, 1, 5.0), ("loose", "mu", "upper", 1, 1, 4.0),
        ("loose", "mu", "upper", 0, 2, 3.0), ("loose", "mu", "upper", 1, 2, 2.0),
        ("tight", "mu", "upper", 0, 2, -1.0), ("tight", "mu", "upper", 1, 2, -2.0),
        ("tight", "mu", "upper", 0, 3, -9.0),
        ("exact-factors", "mu", "upper", 0, 3, -9.0), ("exact-factors", "mu", "upper", 1, 3, -9.0),
        ("low", "mu", "lower", 0, 2, -4.0), ("low", "mu", "lower", 1, 2, -3.0),
        ("lower", "mu", "lower", 0, 2, -6.0), ("lower", "mu", "lower", 1, 2, -5.0),
    ]  # fmt: skip
    table = pl.DataFrame(rows, ["theorem", "quantity", "kind", "sample", "layer", "log10_bound"], orient="row")
    said = proved_sentence(table, 2)
    assert "‖res X‖F is at most 0.1 after layer 2 (tight); " in said
    assert said.endswith("; ‖res X‖F is at least 1.0e-04 after layer 2 (low).")
    assert "after layer 3 (tight)" in proved_sentence(table.filter(sample=0), 1)
    assert proved_sentence(table.filter(theorem="exact-factors"), 2).startswith("Nothing is proved")
