"""One view of a theorem: card, terminal, report and explorer print the same cells, of any theorem."""

import io

import polars as pl
import pytest
from rich.console import Console

from rankscope.cli.show import tabular
from rankscope.explorer.answers import bound_figures, bound_line
from rankscope.theory import Certificates
from rankscope.theory.depth import depth_of
from rankscope.theory.figures import bounds_chart, certificate_table, failing_table
from rankscope.theory.views import bounds_sentence, proved_sentence
from tests.theory.test_certify import FOUND

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
    met = [view for view in views if view.met_to]
    assert [row[0] for row in report.rows] == [view.theorem for view in met] and len(met) > 3
    for view, row in zip(met, report.rows, strict=True):
        assert row[4] == view.measured and row[5].endswith(view.proved) and row[6] == view.slack
        line = next(line for line in printed.splitlines() if f"{view.theorem} " in line)
        assert view.measured in line and view.proved in line
        assert all(cell in html and cell in str(found) for cell in (view.measured, view.proved))
        assert bound_line(view)["measured"] == view.measured
    for says, number, limit, theorems in failing_table(found.table, "san").rows:
        assert limit in printed and number in printed and says.split()[0] in printed and theorems
    panels = len(bounds_chart(found.table).panels)
    assert panels == len({view.quantity for view in met} - {"affine_rank"}) >= 2
    assert set(bound_figures(found, views)) == {view.quantity for view in met if view.state == "says"}
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
