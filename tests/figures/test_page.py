"""Every chart becomes plain JSON for plotly, and lets nothing through as markup."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.figures.description import Axis, Chart, Flag, Heatmap, Line, Panel, Spans
from rankscope.figures.page import page_figure
from rankscope.figures.powers import Powers
from rankscope.profiles import cloud_chart, curves_chart, measure, spectrum_chart
from tests.profiles.residual_shapes import cloud, spectra
from tests.report.runs import NET, X, profile_of

HOSTILE = "<b>&amp;<script>alert(1)</script>"


def texts(value: Any, key: str = "") -> Iterator[str]:
    """What plotly would read as markup, but for our own tags."""
    if isinstance(value, str) and key in ("text", "name", "ticktext", "hovertemplate", "hovertext"):
        yield value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from texts(item, name) if name != "table" else ()
    if isinstance(value, list):
        for item in value:
            yield from texts(item, key)


def chart_of(*marks: Any, **panel: Any) -> Chart:
    return Chart([Panel(Axis("layer", last=3), Axis("mu"), marks, **panel)], {}, "a chart")


def hostile_charts() -> Iterator[Chart]:
    profile = measure(NET, X, variant=HOSTILE)
    bounds = {HOSTILE: {"upper": np.zeros(6)}}
    yield curves_chart(profile.views("relative_residual"), True, bounds)
    yield cloud_chart(cloud({HOSTILE: NET}, X, words=[[HOSTILE] * 9] * 2))
    yield spectrum_chart(spectra({HOSTILE: NET}, X))
    mark = Heatmap([0], [0], np.ones((1, 1)), HOSTILE, hover=[[(HOSTILE, HOSTILE, "")]])
    yield chart_of(mark, heading=HOSTILE, flags=[Flag(1, HOSTILE)])
    yield chart_of(Spans([0], [0], [1], "line 0", HOSTILE))


def test_nothing_from_a_model_is_markup() -> None:
    for chart in hostile_charts():
        found = list(texts(page_figure(chart)))
        assert any("alert(1)" in text for text in found)
        for text in found:
            assert "<script" not in text and "<b>&" not in text.replace("<b>&lt;b>&amp;amp;", "")


def test_a_line_is_solid_above_its_floor_and_hollow_at_it() -> None:
    profile = profile_of(("san",), "float64")
    (curve,) = profile.views("relative_residual")
    figure = page_figure(curves_chart([curve], True))
    json.dumps(figure, allow_nan=False)
    solid = next(trace for trace in figure["data"] if trace.get("name") == "san")
    hollow = next(trace for trace in figure["data"] if str(trace.get("marker", {}).get("symbol")).endswith("-open"))
    assert curve.noise.any() and not curve.noise.all()
    assert [value is None for value in solid["y"]] == curve.noise.tolist()
    assert [size > 0 for size in hollow["marker"]["size"]] == curve.noise.tolist()
    assert hollow["line"]["dash"] == "dot" and not hollow["showlegend"]
    assert hollow["legendgroup"] == solid["legendgroup"]
    assert "floor of float64" in [trace.get("name") for trace in figure["data"]]


def test_an_axis_of_powers_has_their_places() -> None:
    powers = Powers([0.0, -1000.0])
    line = Line([0, 1], [0.0, -1000.0], "ink")
    figure = page_figure(Chart([Panel(Axis(), Axis(powers=powers), [line])], {}, ""))
    assert figure["data"][0]["y"] == [0.0, -4.0] and figure["data"][0]["line"]["color"] == "@ink"
    assert "10<sup>−1000</sup>" in figure["layout"]["yaxis"]["ticktext"]


def test_a_group_has_one_entry_in_the_legend() -> None:
    lines = [Line([0, 1], [0.0, 1.0], "line 0", "one", "group") for _ in range(3)]
    assert [trace["showlegend"] for trace in page_figure(chart_of(*lines))["data"]] == [True, False, False]


def test_the_colours_of_a_map_of_powers_reach_from_its_lowest_to_its_highest() -> None:
    """Squares and both ends of the colours are at the places that the axis of powers has for their logs."""
    powers, logs = Powers([-2.0, -900.0]), [[-2.0, -30.0], [-900.0, -5.0]]
    mark = Heatmap(["1", "2"], ["a", "b"], np.array(logs), powers=powers)
    (trace,) = page_figure(Chart([Panel(Axis(), Axis(), [mark])], {}, ""))["data"]
    places = [place for row in logs for place in powers.place(row) if place is not None]
    assert np.asarray(trace["z"]).ravel().tolist() == pytest.approx(places, rel=1e-5)
    assert (trace["zmin"], trace["zmax"]) == pytest.approx((min(places), max(places)), rel=1e-5)
