"""One view of a curve: what is printed, drawn and told of a run are the same numbers."""

import math

import numpy as np
import polars as pl
import pytest
import torch

from rankscope.figures import power
from rankscope.figures.page import page_figure
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import CorpusRows, Profile, curves_chart, measure
from rankscope.profiles.profile import curve_table, ends_table
from rankscope.profiles.verdict import sentence
from rankscope.report import verdict

NET = Transformer.random(Architecture(layers=3, width=16, heads=2))
X = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ALONE = torch.zeros(3, 6, dtype=torch.bool)
ALONE[0, 1:] = True  # the first sample is one token, which differs from no other


def test_a_sample_of_one_token_is_left_out_of_every_output_which_say_so() -> None:
    profile = measure(NET, X, ALONE, variant="transformer")
    (view,) = profile.views("relative_residual")
    others = measure(NET, X[1:], ALONE[1:]).curve("relative_residual", "log10").mean(0).numpy()
    assert np.allclose(view.log10, others, atol=1e-12) and view.left_out.tolist() == [1] * 4
    (axes,) = profile.plot("relative_residual", log=True).axes
    assert np.allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), others)
    assert np.allclose(curves_chart([view], True).table["log10"], others)
    last = power(float(others[-1]))
    table = curve_table([view])
    assert table.rows[0][-1] == last and last in verdict(profile) and last in sentence(view)
    printed = ends_table([view])
    assert [row[3] for row in printed.rows] == [last]
    said = "left out of the geometric mean: 1 of 3 values of transformer"
    assert all(said in text for text in (table.note, printed.note, profile._repr_html_()))
    assert repr(profile).splitlines()[-1].endswith(f"  {last}")


def test_where_all_are_zero_the_value_is_zero() -> None:
    (view,) = measure(NET, X[:, :1]).views("relative_residual")
    assert np.isneginf(view.log10).all() and not view.left_out.any() and view.ends == [-math.inf] * 3
    assert np.isnan(view.on_axis(log=True)[0]).all()  # a log axis has no place for it


def test_a_head_whose_median_is_zero_is_left_out_of_the_mean_over_heads() -> None:
    profile = measure(NET, X, metrics="dobrushin")
    none = (pl.col("head") == 0) & (pl.col("layer") == 2)
    table = profile.table.with_columns(
        pl.when(none).then(0.0).otherwise("value").alias("value"),
        pl.when(none).then(-math.inf).otherwise("log10").alias("log10"),
    )
    gathered = CorpusRows()
    gathered.add(Profile(table, profile.manifest))
    (view,) = gathered.summary().views()
    logs = profile.curve("dobrushin", "log10")[:, 2, 1]
    assert view.first == 1 and view.log10[2] == pytest.approx(float(logs.median()))


def test_at_floor_from_a_layer_means_to_the_last() -> None:
    profile = measure(NET.variant("san").variant(layers=6), X, arithmetic="float32")
    noise = profile.at_floor("relative_residual").tolist()
    first = noise.index(True)
    assert all(noise[first:]) and profile.views("relative_residual")[0].floor_from == first
    back = pl.col("layer") == 6  # above the floor again at the end
    risen = profile.table.with_columns(below_floor=pl.col("below_floor") & ~back)
    (view,) = Profile(risen, profile.manifest).views("relative_residual")
    assert view.floor_from is None and view.noise.any()
    assert "at floor" not in ends_table([view]).headings


def test_metrics_that_the_package_does_not_know_are_shown_by_their_names() -> None:
    profile = measure(NET, X, metrics="mu")
    renamed = profile.table.with_columns(metric=pl.lit("my_$size"))
    networks = tuple(each.adding(metrics=("my_$size",)) for each in profile.manifest.networks)
    mine = Profile(renamed, profile.manifest.adding(networks=networks))
    view = mine.views("my_$size")
    assert page_figure(curves_chart(view))["layout"]["yaxis"]["title"]["text"] == "my_$size"
    mine.plot().savefig("/dev/null", format="png")
    assert "my_$size" in ends_table(view).title and "my_$size is" in verdict(mine)
