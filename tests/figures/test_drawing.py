from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from rankscope.errors import MetricError
from rankscope.figures import plot, save
from rankscope.figures.description import Axis, Chart, ColourBar, Heatmap, Line, Panel, Powers, ordered_colour
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, arithmetics_chart, measure
from tests.raising import raises

NET = Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier")
X = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BOTH = Profile.join([measure(NET.variant(v), X, variant=v, arithmetic="float64") for v in ("san", "transformer")])


def labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]


def test_a_collapsing_profile_is_drawn_in_powers_of_ten_with_its_floor() -> None:
    (axes,) = BOTH.plot("relative_residual").axes
    assert labels(axes) == ["san", "transformer", "floor of float64"]
    floor = next(line for line in axes.lines if line.get_label() == "floor of float64")
    expected = BOTH.curve("relative_residual", "floor", variant="san")[0].log10()
    assert np.allclose(np.asarray(floor.get_ydata(), dtype=float), expected)
    assert axes.yaxis.get_major_formatter()(-5.0) == "$10^{-5}$"


def test_what_floating_point_cannot_hold_is_drawn() -> None:
    """1e-4000 and beyond, on an axis that is logarithmic in the power."""
    profile = measure(NET.variant(layers=9).variant("san"), X)
    (axes,) = profile.plot("relative_residual").axes
    assert axes.get_yscale() == "symlog"
    drawn = np.asarray(axes.lines[0].get_ydata(), dtype=float)
    assert np.allclose(drawn, profile.curve("relative_residual", "log10").mean(0).numpy())
    assert drawn.min() < -1000
    profile.plot("relative_residual").savefig("/dev/null", format="png")


def test_an_unmeasured_metric_is_a_sentence() -> None:
    with raises(MetricError, subject="metric"):
        measure(NET, X, metrics="mu").plot("relative_mu")
    assert measure(NET, X, metrics="mu").plot().axes


def test_values_at_the_floor_are_never_drawn_as_if_real() -> None:
    (axes,) = BOTH.plot("relative_residual").axes
    noise = BOTH.at_floor("relative_residual", variant="san").numpy()
    assert noise.any() and not noise.all()
    solid = next(line for line in axes.lines if line.get_label() == "san")
    assert np.array_equal(np.isnan(np.asarray(solid.get_ydata(), dtype=float)), noise)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert sum(len(np.atleast_1d(line.get_xdata())) for line in hollow) == noise.sum()


def test_a_quiet_profile_is_drawn_on_a_linear_axis_from_zero() -> None:
    (axes,) = measure(NET, X).plot("relative_mu").axes
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0


def test_the_bar_of_a_map_ends_where_its_colours_do() -> None:
    """Powers of ten at which ticks stand may lie outside of the values."""
    logs = np.array([[0.0, -5.4], [-1.0, -2.0]])
    cells = Heatmap([0, 1], [0, 1], logs, "size", Powers(logs.ravel()), (-5.4, 0.0))
    _, bar = plot(Chart([Panel(Axis("step"), Axis("layer"), [cells])], {}, "a map")).axes
    assert bar.get_ylim() == pytest.approx((-5.4, 0.0))


def test_the_line_is_the_mean_over_samples() -> None:
    (axes,) = measure(NET, X).plot("mu", log=False).axes
    curve = measure(NET, X).curve("mu").mean(0).numpy()
    assert np.allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), curve)


def test_attention_and_several_arithmetics_can_be_drawn() -> None:
    measure(NET, X, metrics=["dobrushin"]).plot("dobrushin").savefig("/dev/null", format="png")
    several = Profile.join([measure(NET, X, arithmetic=a) for a in ("float64", "bfloat16")])
    (axes,) = several.plot("mu", log=True).axes
    assert "as given, bfloat16" in labels(axes) and "floor of bfloat16" in labels(axes)


def test_arithmetics_side_by_side_show_the_law() -> None:
    """The slope of deviation arithmetic tends to 3; float64's stops at its floor, and is hollow there."""
    san = NET.variant(layers=9).variant("san")
    profile = Profile.join([measure(san, X, arithmetic=a, variant="san") for a in ("deviation", "float64")])
    figure = plot(arithmetics_chart(profile.views("residual")))
    fall, slope = figure.axes
    assert labels(fall) == ["deviation", "float64"]
    assert abs(np.asarray(slope.lines[0].get_ydata(), dtype=float)[-1] - 3) < 0.01
    digits = -profile.curve("residual", "log10", arithmetic="deviation").mean(0).numpy()[-1]
    assert np.asarray(fall.lines[0].get_ydata(), dtype=float)[-1] == pytest.approx(np.log10(digits))
    assert any(line.get_markerfacecolor() == "white" for line in fall.lines)
    figure.savefig("/dev/null", format="png")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["_mine", "$", "a $b$", r"$\frac{$", "--><x>", "a\x1b[31m\nb", "x" * 400, ""])
def test_a_variant_of_any_name_is_drawn_and_stands_in_the_legend(name: str, tmp_path: Path) -> None:
    both = Profile.join([measure(NET, X, variant=each) for each in (name, "plain")])
    figure = both.plot("relative_residual")
    first, second = labels(figure.axes[0])
    shown = first.strip().replace(r"\$", "$")
    assert second == "plain" and len(shown) <= 60
    assert shown == name or any(mark in shown for mark in "\ufffd…")
    _, drawing = save(figure, tmp_path / "drawn")
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_a_bar_of_colours_has_the_colours_of_the_lines_in_their_order() -> None:
    lines = [Line([0, 1], [k, k + 1.0], ordered_colour(k / 3), str(k)) for k in range(4)]
    chart = Chart([Panel(Axis(), Axis(), lines)], {}, "", colour_bar=ColourBar("length", list("0123")))
    axes, bar = plot(chart).axes
    drawn = [to_rgba(line.get_color()) for line in axes.lines]
    assert drawn == [pytest.approx(tuple(row), abs=0.01) for row in bar.collections[-1].cmap(np.arange(4))]
