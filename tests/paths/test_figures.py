"""Figures of a decomposition show what its tables hold."""

import math

import numpy as np
import polars as pl

from rankscope.errors import MetricError
from rankscope.figures.description import Bars, Heatmap
from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope.paths.figures import HEADS, heads_chart, lengths_chart, single_paths_chart
from tests.builders import normal
from tests.raising import raises

FOUND = decompose(Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier"), normal(2, 9, 16))


def test_shares_of_all_lengths_add_up_to_one() -> None:
    chart = lengths_chart(FOUND.by_length().table)
    bars = [mark for mark in chart.panels[0].marks if isinstance(mark, Bars)]
    assert math.isclose(sum(sum(mark.heights) for mark in bars), 1.0, rel_tol=1e-6)
    assert next(iter(chart.panels[0].counts.values())) == "1"


def test_a_map_of_heads_has_the_mean_of_each() -> None:
    table = FOUND.by_head()
    for column in HEADS:
        (cells,) = heads_chart(table, column).panels[0].marks
        assert isinstance(cells, Heatmap) and cells.signed == ("share" in column)
        means = table.group_by("layer", "head").agg(pl.col(column).mean()).sort("layer", "head")
        assert np.allclose(cells.values.ravel(), means[column].to_numpy())
    with raises(MetricError, subject="column"):
        heads_chart(table, "contractoin")


def test_single_paths_are_drawn_with_their_median() -> None:
    residuals = FOUND.residuals()
    points, line = single_paths_chart(residuals).panels[0].marks
    assert len(points.x) == residuals["log10"].is_finite().sum()  # type: ignore[union-attr]
    assert len(line.x) == residuals["length"].n_unique()  # type: ignore[union-attr]
