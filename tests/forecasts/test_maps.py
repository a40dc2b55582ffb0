"""Maps: every cell is the forecast of its design."""

import math

import numpy as np
import polars as pl
import pytest

from rankscope import Architecture, forecast
from rankscope.errors import LabError
from rankscope.figures import plot
from rankscope.figures.description import Heatmap, Line
from rankscope.forecasts import AXES, Design, Forecast, Recipe, forecast_map, forecast_of, layers_chart, map_chart

ARCH = Architecture(layers=2, width=16, heads=2, mask="causal", norm_place="pre", final_norm=True)


@pytest.fixture(scope="module")
def found() -> Forecast:
    return forecast(ARCH, design=Design(tokens=8), recipe=Recipe(steps=30))


@pytest.mark.parametrize("name", list(AXES))
def test_values_go_from_the_first_to_the_last(name: str) -> None:
    axis = AXES[name]
    values = axis.values(5)
    assert values[0] == pytest.approx(axis.low) and values[-1] == pytest.approx(axis.high) and values == sorted(values)
    if axis.in_logs and not axis.whole:
        np.testing.assert_allclose(np.diff(np.log(values)), math.log(axis.high / axis.low) / 4, rtol=1e-2)


def test_changes_are_made(found: Forecast) -> None:
    for name, axis in AXES.items():
        changed = axis.change(found.design, axis.values(4)[1])
        assert changed != found.design, name
        changed.model()
    assert AXES["depth"].change(found.design, 5.0).arch.layers == 5


@pytest.mark.slow  # worker processes
def test_a_cell_is_the_forecast_of_its_design(found: Forecast) -> None:
    table = forecast_map(found, "skip", "query_gain", size=2, workers=1)
    assert table.height == 4 and table["probability"].is_between(0, 1).all()
    plan = AXES["query_gain"].change(AXES["skip"].change(found.design, 0.0), 4.0)
    row = table.filter((pl.col("x") == 0.0) & (pl.col("y") == 4.0)).row(0, named=True)
    assert row["probability"] == pytest.approx(forecast_of(plan, layers=False).probability, abs=1e-9)


@pytest.mark.parametrize("names", [("skip", "skip"), ("skip", "nothing")])
def test_what_is_no_plane_is_refused(found: Forecast, names: tuple[str, str]) -> None:
    with pytest.raises(LabError):
        forecast_map(found, *names)


def test_figures_show_what_the_tables_have(found: Forecast) -> None:
    chart = layers_chart(found.table, found.verdict[0])
    lines = {line.name: line for panel in chart.panels for line in panel.marks if isinstance(line, Line)}
    np.testing.assert_array_equal(lines["measured"].y, found.table["residual"].to_numpy())
    assert found.plot().axes
    plane = pl.DataFrame({"x": [0.0, 1.0, 0.0, 1.0], "y": [3.0, 3.0, 9.0, 9.0], "probability": [0.1, 0.2, 0.3, None]})
    heat = map_chart(plane, "skips", "layers").panels[0].marks[0]
    assert isinstance(heat, Heatmap)
    np.testing.assert_array_equal(heat.values, [[0.1, 0.2], [0.3, np.nan]])
    assert plot(map_chart(plane, "skips", "layers")).axes
