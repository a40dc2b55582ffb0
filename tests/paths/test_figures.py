"""Figures of a decomposition show what its tables hold."""

import math

import numpy as np
import polars as pl
import pytest
import torch

from rankscope.errors import MetricError
from rankscope.figures import power
from rankscope.figures.description import Bars, Heatmap, Line
from rankscope.nets import Architecture, Transformer
from rankscope.paths import carried, decompose
from rankscope.paths.figures import HEADS, heads_chart, length_views, lengths_chart, single_paths_chart
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


NET = Transformer.random(Architecture(layers=2, width=16, heads=2))
X = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ALONE = torch.zeros(3, 6, dtype=torch.bool)
ALONE[0, 1:] = True  # the first sample is one token, whose terms are uniform


@pytest.mark.slow
def test_a_sample_of_one_token_does_not_make_a_residual_zero() -> None:
    found = decompose(NET, X, ALONE).by_length()
    rows = found.table.filter(pl.col("start") == "embedding", pl.col("sample") > 0)
    for view in found.views():
        logs = rows.filter(length=view.length)["relative_residual"].log10()
        assert view.log10_residual == pytest.approx(logs.mean())
        assert f">{power(view.log10_residual)}<" in found._repr_html_()
    (line,) = (mark for mark in lengths_chart(found.table).panels[1].marks if isinstance(mark, Line))
    assert len(line.y) == 3
    both = found.table.with_columns(relative_residual=0.0)
    assert all(view.cells["res / norm"].startswith("0") for view in length_views(both))


def test_the_length_that_carries_most_is_told() -> None:
    found = decompose(NET, X).by_length()
    shares = found.table.filter(start="all").group_by("length").agg(pl.col("share").mean()).sort("share")
    length, share = shares.row(-1)
    heads = ("no head", "one head", "2 heads")[length]
    assert f"Of 9 paths those through {heads} carry" in carried(found.views())
    assert carried(found.views()).endswith(f": {share:.0%} of it.")
    assert carried(length_views(found.table.head(0))) == ""


def test_a_residual_that_overflowed_is_not_called_rounding_noise() -> None:
    table = decompose(NET, X).by_length().table.with_columns(below_floor=True, relative_residual=float("nan"))
    assert not any(view.noise for view in length_views(table))
