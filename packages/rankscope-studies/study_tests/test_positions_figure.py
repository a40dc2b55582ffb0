"""The figure of what tokens the last one comes from: what is drawn are the numbers of the tables, and theory's."""

from typing import Any

import polars as pl
import pytest

from rankscope_studies.research.positions_figure import POSITION, positions_chart

COLUMNS = ("model", "layers", "seed", "source", "share", "size", "published", "independent")


def powers(logs: Any) -> list[float]:
    return [10.0**log for log in logs]


def drawn(paths: pl.DataFrame, models: pl.DataFrame) -> Any:
    """The panels, of marks of several kinds."""
    return positions_chart(paths, 0.4, models).panels


def test_shares_and_sizes_are_drawn_as_means_over_seeds() -> None:
    rows = [
        ("GPT-2, unit tokens", 12, 0, 0, 0.25, 0.5, 0.1, 0.2), ("GPT-2, unit tokens", 12, 0, 1, 0.75, 0.5, 0.9, 0.8),
        ("GPT-2, unit tokens", 12, 1, 0, 0.75, 0.05, 0.3, 0.4), ("GPT-2, unit tokens", 12, 1, 1, 0.25, 4.5, 0.7, 0.6),
    ]  # fmt: skip
    paths = pl.DataFrame({"layers": [1, 1], "source": [0, 1], "share": [0.2, 0.8]})
    models = pl.DataFrame(rows, schema=COLUMNS, orient="row")
    uniform, sizes, _, _, shares, trained = drawn(paths, models)
    # One layer of two tokens: the last is a/2 + 1 - a of itself, a/2 of the first; n times that, ring at n (1 - a).
    density, points, ring = uniform.marks
    assert list(points.x) == [0.25, 0.75] and powers(points.y) == pytest.approx([0.4, 1.6])
    assert list(ring.x) == [0.75] and powers(ring.y) == pytest.approx([1.2])
    assert powers(density.y) == pytest.approx([0.4] * 400)  # `a` wherever the source is, but for the last
    means = [mark for mark in sizes.marks if mark.dash == "solid"]
    assert powers(means[0].y) == pytest.approx([2 * 0.275, 2 * 2.5])
    ((low, high),) = means[0].bands
    assert powers(low) == pytest.approx([0.1, 1.0]) and powers(high) == pytest.approx([1.0, 9.0])
    measured, published = shares.marks
    assert list(measured.x) == [0.5, 1.0] and list(measured.y) == [0.5, 1.0]  # sums from the first source on
    assert list(published.y) == pytest.approx([0.2, 1.0]) and not trained.marks
    for panel in (shares, trained):
        assert panel.x.title == POSITION
        assert panel.y.labels == {0.0: "0%", 0.25: "25%", 0.5: "50%", 0.75: "75%", 1.0: "100%"}
