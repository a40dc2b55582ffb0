"""Curves as a figure: a line per variant, what lies about it, its floor, and hollow marks where it is noise.

A log axis has the powers of ten as its numbers, so that 1e-4000 can be drawn; where they span over `DEEP`
decades it is logarithmic in them, and a doubly exponential fall is a straight line.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankscope.figures import (
    Axes,
    Figure,
    FuncFormatter,
    ListedColormap,
    MaxNLocator,
    Normalize,
    ScalarMappable,
    colormaps,
    panels,
)
from rankscope.looks import FAINT, INK, LISTED, MARKERS, PALETTE, in_sequence, label, tick
from rankscope.metrics import symbol_of
from rankscope.profiles.views import Band, CurveView, Layers, digits_lost, looks, span

DEEP = 40
"""Decades over which the axis of powers of ten becomes logarithmic itself."""


def plot_curves(curves: Sequence[CurveView], log: bool | None = None) -> Figure:
    """A metric by layer. `log=None` takes a log axis where the values span over two decades."""
    figure, (axes,) = panels()
    draw_curves(axes, curves, log)
    return figure


def draw_curves(
    axes: Axes, curves: Sequence[CurveView], log: bool | None = None, legend: bool = True
) -> None:
    """Draw into given axes."""
    decades = span(curves)
    log = decades > 2 if log is None else log
    strength = min(1.0, 4 / len(curves))  # many bands upon each other would hide the lines
    steps = in_sequence([curve.label for curve in curves])
    for place, (number, curve) in enumerate(zip(looks(curves), curves, strict=True)):
        ink: Any = PALETTE[number % len(PALETTE)]
        if steps is not None:
            ink = _order(len(steps))[sorted(steps).index(steps[place])]
        centre, bands = curve.drawn(log)
        for band in bands:
            _band(axes, band, ink, 0.15 * strength)
        _trace(axes, centre, curve.noise, number, curve.label, ink)
    if log:
        _draw_floors(axes, curves)
    _dress(axes, curves[0].metric, decades if log else None)
    if legend:
        draw_key(axes, curves)


def draw_key(axes: Axes, curves: Sequence[CurveView], beside: bool = False) -> bool:
    """Which line is which: a bar of colours for a long sequence, as steps of a training are, else a legend,
    which stands beside the figure where there are many lines. `beside`: the bar alone. Whether it drew."""
    names = [curve.label for curve in curves]
    steps = in_sequence(names)
    if steps is not None and len(steps) > LISTED:
        _scale(axes, [name for _, name in sorted(zip(steps, names, strict=True))])
        return True
    if not beside:
        where: dict[str, Any] = {}
        if len(names) > LISTED:
            where = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
        axes.legend(fontsize=9, frameon=False, ncols=1 + len(names) // 25, **where)
    return not beside


def _order(number: int) -> list[tuple[float, ...]]:
    """So many colours in an order, dark to light, all of which stand out from white."""
    return [colormaps["viridis"](0.82 * k / max(1, number - 1)) for k in range(number)]


def _scale(axes: Axes, names: list[str]) -> None:
    number = len(names)
    colours = ScalarMappable(Normalize(-0.5, number - 0.5), ListedColormap(_order(number)))
    bar = axes.get_figure(root=True).colorbar(colours, ax=axes, pad=0.02)  # type: ignore[union-attr]
    shown = range(0, number, -(-number // 7))
    bar.set_ticks(list(shown), labels=[label(names[k]) for k in shown])
    bar.outline.set_visible(False)


def _dress(axes: Axes, metric: str, decades: float | None) -> None:
    """Name the axes. `decades` is how many a log axis shows, None for a linear one."""
    if decades is None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    else:
        if decades > DEEP:
            axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_xlabel("layer")
    axes.set_ylabel(f"${symbol_of(metric, tex=True)}$")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_arithmetics(fall: Axes, slope: Axes, curves: Sequence[CurveView]) -> None:
    """Arithmetics of one variant side by side: how many digits the metric has lost, and the ratio of its log
    from layer to layer. Under the doubly exponential law the first grows as 3^l and the second tends to 3."""
    for number, curve in enumerate(curves):
        lost, ratio = digits_lost(curve)
        _trace(fall, lost, curve.noise, number, curve.arithmetic, PALETTE[number])
        _trace(slope, ratio, curve.noise, number, curve.arithmetic, PALETTE[number])
    fall.set_yscale("log")
    fall.set_ylabel(f"$-\\log_{{10}}\\,{symbol_of(curves[0].metric, tex=True)}$")
    slope.set_ylabel("$\\log r_l\\,/\\,\\log r_{l-1}$,  $r_l$ the value at layer $l$")
    slope.axhline(3.0, color=FAINT, linewidth=1.0, linestyle="--")
    slope.annotate("3", (0, 3.0), xytext=(3, 3), textcoords="offset points", color=INK)
    slope.set_ylim(0, 6)
    for axes in (fall, slope):
        axes.set_xlabel("layer $l$")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    fall.legend(fontsize=9, title=label(curves[0].variant), frameon=False)


def _trace(axes: Axes, centre: Layers, noise: Layers, number: int, name: str, colour: Any) -> None:
    """A line by layer; where it is only noise it is hollow."""
    turned = number + number // len(PALETTE)  # colours come again, each time with another mark
    marker = MARKERS[turned % len(MARKERS)]
    layers = np.arange(len(centre))
    axes.plot(layers, np.where(noise, np.nan, centre), color=colour, linewidth=1.8, label=label(name),
              marker=marker, markersize=5)  # fmt: skip
    # Into the noise, and within it: thin and dotted, with hollow marks.
    tail = noise | np.roll(noise, -1) & (layers < len(layers) - 1)
    axes.plot(layers, np.where(tail, centre, np.nan), color=colour, linewidth=0.9, linestyle=":")
    axes.plot(layers[noise], centre[noise], linestyle="none", color=colour, marker=marker, markersize=4,
              markerfacecolor="white", zorder=3)  # fmt: skip


def _band(axes: Axes, band: Band, colour: Any, strength: float) -> None:
    """What lies about a line, in its colour."""
    axes.fill_between(np.arange(len(band[0])), *band, color=colour, alpha=strength, linewidth=0)


def _draw_floors(axes: Axes, curves: Sequence[CurveView]) -> None:
    """log10 of each floor by layer, once: ratios have one per arithmetic, absolute values one per variant."""
    drawn: set[tuple[str, bytes]] = set()
    named: set[str] = set()
    for curve in curves:
        key = (curve.arithmetic, curve.floor.round(6).tobytes())
        if np.isfinite(curve.floor).any() and key not in drawn:
            name = None if curve.arithmetic in named else f"floor of {curve.arithmetic}"
            axes.plot(curve.floor, color=FAINT, linestyle=":", linewidth=1.2, label=name, zorder=1)
            drawn.add(key)
            named.add(curve.arithmetic)
