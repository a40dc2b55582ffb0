"""What figures and pages show of a sweep: medians, ranges, and how much each factor matters."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from rankscope import read
from rankscope.engine import Sweep
from rankscope.engine.views import SweepView


def drawn(values: list[float], **factors: list[Any]) -> SweepView:
    """A sweep of one layer with these numbers."""
    cells = pl.DataFrame(
        {
            "cell": range(len(values)),
            **factors,
            "value": values,
            "log10": np.log10(values),
            "noise": False,
            "seconds": 0.0,
        }
    )
    layers = cells.select("cell", pl.lit(0).alias("layer"), "value", "log10")
    return SweepView("mu", list(factors), cells, layers)


def test_a_curve_is_the_median_of_its_cells(views_study: Sweep) -> None:
    view = read(views_study.run).view()
    assert view.log and view.arranged == ("skip", "depth")
    means = (
        views_study.table.filter(metric="relative_mu", skip=0.0, depth=3)
        .group_by("seed", "layer")
        .agg(pl.col("log10").mean())
    )
    mine = means.group_by("layer").agg(pl.col("log10").median()).sort("layer")["log10"].to_list()
    curve = next(each for each in view.curves("skip", "depth") if (each.colour, each.panel) == (0, 1))
    assert curve.centre.tolist() == pytest.approx(mine) and curve.cells == 3
    assert (curve.low <= curve.centre).all() and (curve.centre <= curve.high).all()


def test_a_curve_ends_with_the_shallowest_of_its_cells(views_study: Sweep) -> None:
    assert {len(each.centre) for each in read(views_study.run).view().curves("skip", "seed")} == {2}


def test_a_factor_that_decides_all_has_all_of_the_differences() -> None:
    values = [float(10**k) for k in (-300, -299, -9, -8, 1, 2)]
    view = drawn(values, first=[0, 0, 1, 1, 2, 2], second=[0, 1, 0, 1, 0, 1])
    assert list(view.effects) == ["first", "second"]
    # Places 1 to 6: squares about their mean sum to 17.5, within the pairs of `first` to 1.5.
    assert view.effects["first"] == pytest.approx(1 - (1.5 / 3) / (17.5 / 5)) and view.effects["second"] == 0


def test_noise_explains_nothing_however_many_levels_it_has() -> None:
    rng = np.random.default_rng(0)
    effects = [
        drawn((1 + rng.random(120)).tolist(), level=rng.integers(0, 40, 120).tolist()).effects["level"]
        for _ in range(40)
    ]
    assert np.mean(effects) < 0.06  # the plain share of variance would be 39 / 119


def test_many_numbers_are_gathered_and_words_are_not() -> None:
    view = drawn([1.0] * 30, draw=[k / 30 for k in range(30)], word=[f"w{k}" for k in range(30)])
    levels = view.levels("draw")
    assert len(levels.labels) == 5 and np.bincount(levels.of).tolist() == [6] * 5
    assert len(view.levels("word").labels) == 30


def test_a_factor_that_some_cells_lack_has_a_level_for_them() -> None:
    levels = drawn([1.0, 2.0, 3.0], skip=[None, 0.5, 1.0]).levels("skip")
    assert levels.labels == ["0.5", "1", "not given"] and levels.of.tolist() == [2, 0, 1]
