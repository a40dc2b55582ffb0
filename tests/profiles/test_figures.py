"""Figures of profiles describe what their tables hold: means, floors, bounds, clouds and spectra."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rankscope.figures import power
from rankscope.figures.description import Chart, Line
from rankscope.figures.text import plain
from rankscope.nets import Transformer
from rankscope.profiles import Profile, arithmetics_chart, cloud_chart, curves_chart, measure, spectrum_chart
from rankscope.theory import certify
from rankscope.theory.figures import proved_shares
from tests.profiles.residual_shapes import cloud, spectra
from tests.report.runs import NET, X, profile_of, summary_of

NETS: dict[str, Transformer] = {name: NET.variant(name) for name in ("san", "transformer")}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.join([profile_of(tuple(NETS), arithmetic) for arithmetic in ("deviation", "float64")])


def lines_of(chart: Chart, panel: int = 0) -> dict[str, Line]:
    """Lines by name."""
    return {mark.name: mark for mark in chart.panels[panel].marks if isinstance(mark, Line) and mark.name is not None}


def numbers_said(line: Line) -> list[str]:
    return [number for _, number, _ in line.hover or ()]


def test_curves_draw_the_geometric_mean_and_mark_what_lies_at_the_floor(profile: Profile) -> None:
    lines = lines_of(curves_chart(profile.views("relative_residual"), True))
    named = [(variant, arithmetic) for arithmetic in ("deviation", "float64") for variant in NETS]
    assert set(lines) == {f"{variant}, {arithmetic}" for variant, arithmetic in named} | {"floor of float64"}
    for variant, arithmetic in named:
        line = lines[f"{variant}, {arithmetic}"]
        logs = profile.curve("relative_residual", "log10", variant=variant, arithmetic=arithmetic).mean(0)
        assert np.allclose(line.y, logs) and numbers_said(line) == [power(k) for k in logs.tolist()]
        noise = profile.at_floor("relative_residual", variant=variant, arithmetic=arithmetic).tolist()
        assert line.noise is not None and line.noise.tolist() == noise
        assert [bool(after) for *_, after in line.hover or ()] == noise


def test_the_linear_view_draws_the_mean(profile: Profile) -> None:
    line = lines_of(curves_chart(profile.views("relative_residual"), False))["transformer, deviation"]
    mean = profile.curve("relative_residual", variant="transformer", arithmetic="deviation").mean(0)
    assert np.allclose(line.y, mean)


@pytest.mark.slow
def test_proved_bounds_lie_on_their_side_of_the_measurement() -> None:
    certificates = certify(NETS["san"], X)
    proved = proved_shares("relative_residual", certificates.guarantees(), len(X))
    assert proved and not proved_shares("entropy", certificates.guarantees(), len(X))
    curves = measure(NETS["san"], X, variant="san").views("relative_residual")
    lines = lines_of(curves_chart(curves, True, {"san": proved}))
    bounds = {name: line for name, line in lines.items() if "proved" in name}
    assert len(bounds) == len(proved)
    for name, line in bounds.items():
        for measured, bound in zip(lines["san"].y, line.y, strict=False):
            assert np.isnan(bound) or (bound >= measured) == ("most" in name)


def test_a_corpus_has_its_median() -> None:
    summary = summary_of(profile_of(("transformer",)))
    (line,) = [line for line in lines_of(curves_chart(summary.views("relative_residual"))).values() if line.bands]
    assert numbers_said(line) == list(map(power, summary.curve("relative_residual", "log10_q50").tolist()))


def test_very_deep_networks_are_thinned_in_the_drawing_and_whole_in_the_data() -> None:
    deep = measure(
        NET.variant(layers=260), X[:1, :3], variant="deep", metrics="relative_residual", arithmetic="float64"
    )
    chart = curves_chart(deep.views("relative_residual"), True)
    layers = list(lines_of(chart)["deep"].x)
    assert len(layers) <= 200 and layers[0] == 0 and layers[-1] == 260
    assert len(chart.table["layer"]) == 261


def test_the_csv_of_a_curve_holds_what_both_views_draw() -> None:
    profile = profile_of(tuple(NETS), "deviation")
    log, linear = (curves_chart(profile.views("relative_residual"), log).table for log in (True, False))
    assert plain(log) == plain(linear)
    for variant in profile.variants:
        value = profile.curve("relative_residual", variant=variant)
        rows = [k for k, name in enumerate(log["variant"]) if name == variant]
        expected = {
            "value": value.mean(0), "low": value.amin(0), "high": value.amax(0),
            "log10": value.log10().mean(0), "log10_high": value.log10().amax(0),
        }  # fmt: skip
        for column, numbers in expected.items():
            assert [log[column][row] for row in rows] == pytest.approx(numbers.tolist(), rel=1e-6)


def steps(number: int) -> Chart:
    """A training of that many steps."""
    (curve,) = measure(NET, X, variant="a").views("relative_mu")
    names = [f"step {100 * k}" for k in reversed(range(number))]
    return curves_chart([replace(curve, variant=name, label=name) for name in names])


def test_steps_of_a_training_are_coloured_in_their_order() -> None:
    assert [line.colour for line in lines_of(steps(5)).values()] == [f"order {k / 4:.2f}" for k in range(4, -1, -1)]
    assert steps(5).colour_bar is None and not lines_of(steps(12))
    bar = steps(12).colour_bar
    assert bar is not None and bar.title == "step" and list(bar.labels) == [str(100 * k) for k in range(12)]


def test_arithmetics_have_their_digits(profile: Profile) -> None:
    curves = [curve for curve in profile.views("relative_residual") if curve.variant == "san"]
    chart = arithmetics_chart(curves)
    assert set(lines_of(chart)) == {"deviation", "float64"} and len(chart.panels) == 2
    lost = lines_of(chart)["deviation"]
    assert 10 ** lost.y[-1] == pytest.approx(-curves[0].log10[-1])


def test_spectra_have_a_panel_a_variant_and_a_line_a_layer() -> None:
    chart = spectrum_chart(spectra(NETS, X))
    assert [panel.heading for panel in chart.panels] == list(NETS)
    assert [len(panel.marks) for panel in chart.panels] == [6, 6]
    for panel in chart.panels:
        assert [line.colour for line in panel.marks] == [f"order {k / 5:.2f}" for k in range(6)]  # type: ignore[union-attr]


def test_the_cloud_has_the_same_axes_in_every_panel_and_a_frame_a_layer() -> None:
    table = cloud(NETS, X)
    for magnified in (False, True):
        chart = cloud_chart(table, magnified)
        assert [frame.name for frame in chart.frames] == [str(k) for k in range(6)]
        assert len({panel.x.range for panel in chart.panels} | {panel.y.range for panel in chart.panels}) == 1
        first: Any = chart.frames[0].points
        assert np.array_equal(first[0], first[1])  # both variants begin with the same tokens
        spread = [float(np.square(frame.points[0][0]).sum()) for frame in chart.frames]
        assert magnified or spread[-1] < 1e-12 * spread[0]  # pure attention falls together


def test_the_cloud_of_a_network_that_ends_earlier_stays_where_it_ended() -> None:
    chart = cloud_chart(cloud({"deep": NET.variant(layers=7), "short": NET.variant(layers=3)}, X))
    across = [np.asarray(frame.points[1][0]) for frame in chart.frames]
    assert len(across) == 8 and all(np.array_equal(across[3], across[k]) for k in (4, 7))
    assert not np.array_equal(across[2], across[3]) and np.isfinite(across[7]).all() and len(across[7]) == 9
    headings = [frame.headings[1] for frame in chart.frames]
    assert "layer" not in headings[3] and "layer 3" in headings[7]


def test_the_cloud_shows_where_tokens_begin_however_long_they_are_one() -> None:
    line = torch.zeros_like(X)
    line[:, :, 0] = X[:, :, 0]  # on one axis: half of all coordinates are zero
    chart = cloud_chart(cloud({"san": NET.variant("san").variant(layers=60)}, line))
    assert chart.panels[0].x.range is not None
    assert chart.panels[0].x.range[1] > 0.3 * float(np.abs(chart.frames[0].points[0][0]).max()) > 0


def test_every_token_of_the_cloud_is_drawn_and_those_beyond_the_edge_are_counted() -> None:
    tokens = torch.randn(1, 100, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens[0, 7] *= 40.0
    chart = cloud_chart(cloud({name: NET.variant(name, layers=1) for name in ("transformer", "san+skip")}, tokens))
    assert chart.panels[0].x.range is not None
    for frame in chart.frames:
        for (x, y), heading in zip(frame.points, frame.headings, strict=True):
            places = np.abs([x, y])
            assert places.shape == (2, 100) and places.max() < chart.panels[0].x.range[1]
            assert ("1 beyond the edge" in heading) == (places.max() > 0.95 * chart.panels[0].x.range[1])
    assert "1 beyond the edge" in chart.frames[0].headings[0]


def test_six_variants_have_a_cloud_each() -> None:
    names = ("transformer", "san", "transformer-mlp", "transformer-norm", "san+skip", "san+mlp")
    chart = cloud_chart(cloud({name: NET.variant(name) for name in names}, X))
    assert [panel.heading for panel in chart.panels] == list(names)
