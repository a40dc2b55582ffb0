"""Figures as a user asks for them: axes and sizes of their own, rcParams, many lines, journals' fonts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from rankscope import Profile, certify, decompose, measure
from rankscope.errors import FigureError
from rankscope.figures import save
from rankscope.nets import Architecture, Transformer
from rankscope.theory import collapse_depth
from tests.raising import raises

NET = Transformer.random(Architecture(layers=3, width=8, heads=2), init="xavier")
X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ONE = measure(NET, X, metrics="mu", check=False)
SAN = NET.variant("san")


def many(names: list[str]) -> Profile:
    """A network by many names."""
    return Profile.join([
        measure(NET.variant(skip=0.1 * k), X, metrics="mu", variant=name, check=False)
        for k, name in enumerate(names)
    ])  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("made", "panels"),
    [
        (lambda: ONE, 1),
        (lambda: decompose(NET, X).by_length(), 2),
        (lambda: certify(SAN, 0.1 * X, theorems="dong2021-2.3"), 1),
        (lambda: certify(SAN, 0.1 * X, theorems=["dong2021-2.3", "dobrushin"]), 2),
        (lambda: collapse_depth(SAN, 0.1 * X, theorems="dong2021-2.3"), 1),
    ],
)
def test_every_plot_takes_axes_or_a_size(made: Callable[[], Any], panels: int) -> None:
    found = made()
    assert tuple(found.plot(figsize=(3.5, 2.5)).get_size_inches()) == (3.5, 2.5)
    own = Figure()
    axes = own.subplots(1, panels, squeeze=False)
    assert found.plot(ax=axes[0, 0] if panels == 1 else axes) is own
    assert all(each.has_data() for each in axes.flat) and len(own.axes) == panels
    with raises(FigureError, subject="ax"):
        found.plot(ax=Figure().subplots(1, 3))
    with raises(FigureError, subject="figsize"):
        found.plot(ax=axes, figsize=(3.0, 2.0))


def test_what_the_user_has_set_stands() -> None:
    ours = ONE.plot()
    assert ours.axes[0].lines[0].get_linewidth() == 1.8 and not ours.axes[0].spines["top"].get_visible()
    own: dict[Any, Any] = {"lines.linewidth": 3.0, "legend.fontsize": 5.0, "figure.figsize": (2.0, 2.0)}
    with rc_context({**own, "axes.prop_cycle": "cycler('color', ['#123456', '#654321'])"}):
        theirs = ONE.plot()
    line, legend = theirs.axes[0].lines[0], theirs.axes[0].get_legend()
    assert line.get_linewidth() == 3.0 and line.get_color() == "#123456"
    assert legend is not None and legend.get_texts()[0].get_fontsize() == 5.0
    assert tuple(theirs.get_size_inches()) == (2.0, 2.0)
    assert not theirs.axes[0].spines["top"].get_visible()  # which they had not set


def test_fonts_of_a_pdf_are_type_42(tmp_path: Path) -> None:
    ONE.plot().savefig(tmp_path / "one.pdf")
    assert [path.suffix for path in save(ONE.plot(), tmp_path / "two", ["pdf"])] == [".pdf"]
    for name in ("one.pdf", "two.pdf"):
        text = (tmp_path / name).read_bytes()
        assert b"/Type3" not in text and b"/FontFile2" in text


def test_many_numbered_lines_have_a_colour_bar_in_place_of_a_legend() -> None:
    figure = many([f"step {100 * k}" for k in range(12)]).plot()
    axes, bar = figure.axes
    assert axes.get_legend() is None and bar.get_ylabel() == "step"
    lines = [line for line in axes.lines if line.get_linestyle() == "-"]
    light = [np.dot(line.get_color()[:3], (0.2126, 0.7152, 0.0722)) for line in lines]
    assert len(light) == 12 and light == sorted(light)
    assert [each.get_text() for each in bar.get_yticklabels()] == ["0", "200", "400", "600", "800", "1000"]


@pytest.mark.slow
def test_many_other_lines_have_a_legend_beside_the_axes() -> None:
    figure = many([f"variant {name}" for name in "abcdefghijklmnopqrstuvwxyzäöü"]).plot()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None and len(legend.get_texts()) == 29
    figure.draw_without_rendering()
    box, inside, whole = legend.get_window_extent(), axes.get_window_extent(), figure.bbox
    assert box.x0 >= inside.x1 and box.x1 <= whole.x1 and box.y0 >= whole.y0
    shown = {
        (line.get_color(), line.get_marker(), str(line.get_linestyle()))
        for line in axes.lines if not str(line.get_label()).startswith("_")
    }  # fmt: skip
    assert len(shown) == 29


@pytest.mark.slow
def test_a_depth_axis_is_linear() -> None:
    for found in (ONE, certify(SAN, 0.1 * X), collapse_depth(SAN, 0.1 * X)):
        assert all(axes.get_xscale() == "linear" for axes in found.plot().axes)
