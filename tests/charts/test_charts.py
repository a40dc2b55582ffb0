"""Every chart is plain JSON that draws what its table holds, and lets nothing through as markup."""

import json
import math
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
import torch

from rankscope import charts
from rankscope.charts import style
from rankscope.charts.heads import COLUMNS
from rankscope.errors import MetricError
from rankscope.figures.text import power
from rankscope.paths import decompose
from rankscope.profiles import Profile, measure
from rankscope.profiles.cloud import cloud
from rankscope.profiles.spectra import spectra
from rankscope.theory import Certificates, certify
from tests.report.runs import NET, X, profile_of, summary_of

HOSTILE = "<b>&amp;<script>alert(1)</script>"
NETS = {name: NET.variant(name) for name in ("san", "transformer")}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.join([profile_of(tuple(NETS), arithmetic) for arithmetic in ("deviation", "float64")])


@pytest.fixture(scope="module")
def bare() -> Certificates:
    return certify(NETS["san"], X)


def marks_of(figure: charts.Figure) -> dict[str, Any]:
    """The first line's."""
    return next(each for each in figure["data"] if each.get("mode") == "markers")


def texts(value: Any, key: str = "") -> Iterator[str]:
    """What plotly would read as markup, but for our own tags."""
    if isinstance(value, str) and key in ("text", "name", "ticktext", "hovertemplate", "alt"):
        yield value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from texts(item, name) if name != "table" else ()
    if isinstance(value, list):
        for item in value:
            yield from texts(item, key)


def test_curves_draw_the_geometric_mean_and_hollow_marks_at_the_floor(profile: Profile) -> None:
    figure = charts.curves(profile.views("relative_residual"), True)
    json.dumps(figure, allow_nan=False)
    named = {trace["name"]: trace for trace in figure["data"] if trace.get("mode") == "markers"}
    assert set(named) == {f"{v}, {a}" for v in NETS for a in ("deviation", "float64")}
    for (variant, arithmetic), name in ((tuple(n.split(", ")), n) for n in named):
        logs = profile.curve("relative_residual", "log10", variant=variant, arithmetic=arithmetic).mean(0)
        for k, text in zip(logs.tolist(), named[name]["text"], strict=True):
            assert f"<b>{power(k)}</b>" in text
        noise = profile.at_floor("relative_residual", variant=variant, arithmetic=arithmetic).tolist()
        hollow = [mark.endswith("-open") for mark in named[name]["marker"]["symbol"]]
        assert hollow == noise
    assert "floor of float64" in [trace.get("name") for trace in figure["data"]]


def test_the_linear_view_draws_the_mean(profile: Profile) -> None:
    figure = charts.curves(profile.views("relative_residual"), False)
    marks = next(t for t in figure["data"] if t.get("name") == "transformer, deviation")
    mean = profile.curve("relative_residual", variant="transformer", arithmetic="deviation").mean(0)
    assert torch.allclose(torch.tensor(marks["y"], dtype=torch.float64), mean, rtol=1e-6)


def test_proved_bounds_lie_on_their_side_of_the_measurement(bare: Certificates) -> None:
    small = measure(NETS["san"], X, variant="san")
    figure = charts.curves(small.views("relative_residual"), True, {"san": bare})
    marks = marks_of(figure)["y"]
    bounds = [t for t in figure["data"] if "proved" in t.get("name", "")]
    assert bounds
    for trace in bounds:
        for measured, bound in zip(marks, trace["y"], strict=True):
            assert bound is None or (bound >= measured) == ("most" in trace["name"])


def test_a_corpus_has_its_median() -> None:
    summary = summary_of(profile_of(("transformer",)))
    marks = marks_of(charts.curves(summary.views("relative_residual")))
    for k, text in zip(summary.curve("relative_residual", "log10_q50").tolist(), marks["text"], strict=True):
        assert power(k) in text


def test_lengths_and_heads_show_the_decomposition() -> None:
    d = decompose(NET, X)
    table, heads = d.by_length().table, d.by_head()
    figure = charts.lengths(table)
    bars = {t["name"]: t for t in figure["data"] if t["type"] == "bar"}
    total = sum(sum(trace["y"]) for trace in bars.values())
    assert math.isclose(total, 1.0, rel_tol=1e-6)  # shares add up to one
    for column in COLUMNS:
        grid = charts.heads(heads, column)["data"][0]["z"]
        means = heads.group_by("layer", "head").agg(pl.col(column).mean()).sort("layer", "head")
        assert torch.allclose(torch.tensor(grid).flatten(), torch.tensor(means[column].to_list()), atol=1e-5)
    with pytest.raises(MetricError, match="column must be one of contraction"):
        charts.heads(heads, "contractoin")


def test_the_cloud_has_the_same_axes_in_every_frame_and_panel() -> None:
    table = cloud(NETS, X)
    for magnified in (False, True):
        figure = charts.cloud(table, magnified)
        assert [frame["name"] for frame in figure["frames"]] == [str(k) for k in range(6)]
        ranges = [tuple(figure["layout"][a]["range"]) for a in ("xaxis", "xaxis2", "yaxis", "yaxis2")]
        assert len(set(ranges)) == 1
        first = figure["frames"][0]["data"]
        assert first[0] == first[1]  # both variants begin with the same tokens
        spread = [sum(v * v for v in frame["data"][0]["x"]) for frame in figure["frames"]]
        assert magnified or spread[-1] < 1e-12 * spread[0]  # pure attention falls together


def test_the_cloud_of_a_network_that_ends_earlier_stays_where_it_ended() -> None:
    figure = charts.cloud(cloud({"deep": NET.variant(layers=7), "short": NET.variant(layers=3)}, X))
    short = [frame["data"][1] for frame in figure["frames"]]
    assert len(short) == 8 and short[3] == short[4] == short[7] != short[2]
    assert None not in short[7]["x"] and len(short[7]["x"]) == 9
    said = [frame["layout"]["annotations"][1]["text"] for frame in figure["frames"]]
    assert "layer" not in said[3] and "layer 3" in said[7]


def test_the_cloud_shows_where_tokens_begin_however_long_they_are_one() -> None:
    line = torch.zeros_like(X)
    line[:, :, 0] = X[:, :, 0]  # on one axis: half of all coordinates are zero
    figure = charts.cloud(cloud({"san": NET.variant("san").variant(layers=60)}, line))
    first = max(map(abs, figure["frames"][0]["data"][0]["x"]))
    assert figure["layout"]["xaxis"]["range"][1] > 0.3 * first > 0


def test_bounds_are_drawn_where_they_are_at_any_depth() -> None:
    net = NET.variant("san").variant(layers=40)
    found = certify(net, X)
    measured = next(t for t in charts.bounds(found)["data"] if t["name"] == "measured")
    rows = found.table.filter(sample=0, quantity="residual", theorem="dong2021-2.3")
    logs = rows["log10_measured"].to_list()
    assert logs[-1] < -1e12
    assert measured["text"][-1].endswith(f"<b>{power(logs[-1])}</b>")
    assert sorted(measured["y"], reverse=True) == measured["y"] and len(set(measured["y"])) == len(logs)


def test_bounds_draw_what_holds(bare: Certificates) -> None:
    figure = charts.bounds(bare)
    met = bare.table.filter(pl.col("met"), pl.col("sample") == 0, pl.col("quantity") != "affine_rank")
    names = " ".join(trace["name"] for trace in figure["data"])
    for theorem in met["theorem"].unique():
        assert theorem in names


def test_spectra_have_a_panel_a_variant_and_arithmetics_their_digits(profile: Profile) -> None:
    figure = charts.spectrum(spectra(NETS, X))
    assert figure["panels"] == 2 and len(figure["data"]) == 2 * 6
    own = [each for each in profile.views("relative_residual") if each.variant == "san"]
    names = {trace.get("name") for trace in charts.arithmetics(own)["data"]}
    assert {"deviation", "float64"} <= names


def test_nothing_from_a_model_is_markup(profile: Profile, bare: Certificates) -> None:
    nets = {HOSTILE: NET}
    hostile = measure(NET, X, variant=HOSTILE)
    words = [[HOSTILE] * 9, [HOSTILE] * 9]
    for figure in (
        charts.curves(hostile.views("relative_residual"), True, {HOSTILE: bare}),
        charts.cloud(cloud(nets, X, words=words)),
        charts.spectrum(spectra(nets, X)),
    ):
        found = [text for part in ("data", "layout", "frames") for text in texts(figure.get(part))]
        assert any("alert(1)" in text for text in found)
        for text in found:
            assert "<script" not in text and "<b>&" not in text.replace("<b>&lt;b>&amp;amp;", "")


def test_very_deep_networks_are_thinned_in_the_drawing_and_whole_in_the_data() -> None:
    deep = measure(NET.variant(layers=260), X[:1, :3], variant="deep", metrics="relative_residual")
    figure = charts.curves(deep.views("relative_residual"), True)
    marks = marks_of(figure)
    assert len(marks["x"]) <= 200 and marks["x"][0] == 0 and marks["x"][-1] == 260
    assert len(figure["table"]["layer"]) == 261


def test_the_csv_of_a_curve_holds_what_both_views_draw() -> None:
    profile = profile_of(tuple(NETS), "deviation")
    log, linear = (charts.curves(profile.views("relative_residual"), log) for log in (True, False))
    assert log["table"] == linear["table"]
    for variant in profile.variants:
        value = profile.curve("relative_residual", variant=variant)
        rows = [k for k, name in enumerate(log["table"]["variant"]) if name == variant]
        expected = {
            "value": value.mean(0), "low": value.amin(0), "high": value.amax(0),
            "log10": value.log10().mean(0), "log10_high": value.log10().amax(0),
        }  # fmt: skip
        for column, numbers in expected.items():
            mine = [log["table"][column][row] for row in rows]
            assert mine == pytest.approx(numbers.tolist(), rel=1e-6)


def test_no_two_of_many_lines_look_the_same() -> None:
    looks = {(style.colour(k), style.symbol(k), style.dash(k)) for k in range(60)}
    assert len(looks) == 60
