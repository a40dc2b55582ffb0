"""Curves as a figure: a line per variant, what lies about it, its floor, and hollow marks where it is noise.

A log axis has the powers of ten as its numbers, so that 1e-4000 can be drawn; where they span over `DEEP`
decades it is logarithmic in them, and a doubly exponential fall is a straight line.

Lines that are numbered (training steps) are coloured in their order. Where there are many, those have a
colour bar, and others a legend beside the axes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rankscope.figures.matplotlib import (
    Axes,
    AxesLike,
    Figure,
    FuncFormatter,
    ListedColormap,
    MaxNLocator,
    Normalize,
    ScalarMappable,
    colormaps,
    palette,
    panels,
    rcParams,
    styled,
)
from rankscope.figures.style import FAINT, INK, LISTED, MARKERS, NUMBER, in_sequence
from rankscope.figures.text import label, tick
from rankscope.metrics import symbol_of
from rankscope.profiles.views import CurveView, Layers, digits_lost, looks, span

DEEP = 40
"""Decades over which the axis of powers of ten becomes logarithmic itself."""


TALL = 24
"""Names in a column of a legend beside the axes."""
DASHES = ("-", (0, (5, 2)), (0, (5, 2, 1, 2)), (0, (8, 3)))
"""Of lines whose colour comes again."""


@styled
def plot_curves(
    curves: Sequence[CurveView],
    log: bool | None = None,
    ax: AxesLike | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """A metric by layer. `log=None` takes a log axis where the values span over two decades."""
    beside = len(curves) > LISTED and in_sequence([curve.label for curve in curves]) is None
    figure, (axes,) = panels(width=6.4 + beside * _columns(curves) * _breadth(curves), ax=ax, figsize=figsize)
    draw_curves(axes, curves, log)
    return figure


def _columns(curves: Sequence[CurveView]) -> int:
    return math.ceil(len(curves) / TALL)


def _breadth(curves: Sequence[CurveView]) -> float:
    """Inches of a column of their names."""
    return 0.5 + 0.065 * max(len(label(curve.label)) for curve in curves)


@styled
def draw_curves(
    axes: Axes, curves: Sequence[CurveView], log: bool | None = None, legend: bool = True
) -> None:
    """Draw into given axes."""
    decades = span(curves)
    log = decades > 2 if log is None else log
    strength = min(1.0, 4 / len(curves))  # many bands upon each other would hide the lines
    many = len(curves) > LISTED
    steps = in_sequence([curve.label for curve in curves])
    for place, (number, curve) in enumerate(zip(looks(curves), curves, strict=True)):
        look = Look.of(number)
        if steps is not None:
            colour = _order(len(steps))[sorted(steps).index(steps[place])]
            look = Look(colour, None if many else look.marker, "-")
        centre, bands = curve.drawn(log)
        for band in bands if steps is None or not many else ():
            layers = np.arange(len(band[0]))
            axes.fill_between(layers, *band, color=look.colour, alpha=0.15 * strength, linewidth=0)
        _trace(axes, centre, curve.noise, look, None if steps is not None and many else curve.label)
    if log:
        _draw_floors(axes, curves)
    _dress(axes, curves[0].metric, decades if log else None)
    if legend:
        draw_key(axes, curves)


@styled
def draw_key(axes: Axes, curves: Sequence[CurveView], beside: bool = False) -> bool:
    """Which line is which: a bar of colours for a long sequence, as steps of a training are, else a legend,
    which stands beside the axes where there are many lines; floors are named in any case. `beside`: the bar
    alone. Whether it drew."""
    names = [curve.label for curve in curves]
    steps = in_sequence(names)
    if steps is not None and len(names) > LISTED:
        _scale(axes, sorted(steps), label(NUMBER.sub("", names[0]).strip(" _:=-") or "number"))
        if axes.get_legend_handles_labels()[0] and not beside:
            axes.legend()
        return True
    if beside:
        return False
    if len(names) <= LISTED:
        axes.legend()
    else:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, ncols=_columns(curves),
            fontsize=7 if len(curves) > TALL else rcParams["legend.fontsize"],
        )  # fmt: skip
    return True


def _order(number: int) -> list[tuple[float, ...]]:
    """So many colours in an order, dark to light, all of which stand out from white."""
    return [colormaps["viridis"](0.82 * k / max(1, number - 1)) for k in range(number)]


def _scale(axes: Axes, steps: list[float], what: str) -> None:
    number = len(steps)
    colours = ScalarMappable(Normalize(-0.5, number - 0.5), ListedColormap(_order(number)))
    bar = axes.get_figure(root=True).colorbar(colours, ax=axes, pad=0.02, label=what)  # type: ignore[union-attr]
    shown = range(0, number, -(-number // 7))
    bar.set_ticks(list(shown), labels=[f"{steps[k]:g}" for k in shown])
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


@styled
def draw_arithmetics(fall: Axes, slope: Axes, curves: Sequence[CurveView]) -> None:
    """Arithmetics of one variant side by side: how many digits the metric has lost, and the ratio of its log
    from layer to layer. Under the doubly exponential law the first grows as 3^l and the second tends to 3."""
    for number, curve in enumerate(curves):
        lost, ratio = digits_lost(curve)
        _trace(fall, lost, curve.noise, Look.of(number), curve.arithmetic)
        _trace(slope, ratio, curve.noise, Look.of(number), curve.arithmetic)
    fall.set_yscale("log")
    fall.set_ylabel(f"$-\\log_{{10}}\\,{symbol_of(curves[0].metric, tex=True)}$")
    slope.set_ylabel("$\\log r_l\\,/\\,\\log r_{l-1}$,  $r_l$ the value at layer $l$")
    slope.axhline(3.0, color=FAINT, linewidth=1.0, linestyle="--")
    slope.annotate("3", (0, 3.0), xytext=(3, 3), textcoords="offset points", color=INK)
    slope.set_ylim(0, 6)
    for axes in (fall, slope):
        axes.set_xlabel("layer $l$")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    fall.legend(title=label(curves[0].variant))


class Look(NamedTuple):
    """How a line is drawn."""

    colour: Any
    marker: str | None
    dash: Any

    @classmethod
    def of(cls, number: int) -> "Look":
        """Of the line of that number: colours come again, each time with another mark and dash."""
        colours = palette()
        turn = number // len(colours)
        marker = MARKERS[(number + turn) % len(MARKERS)]
        return cls(colours[number % len(colours)], marker, DASHES[turn % len(DASHES)])


def _trace(axes: Axes, centre: Layers, noise: Layers, look: Look, name: str | None) -> None:
    """A line by layer; where it is only noise it is hollow."""
    colour, marker, dash = look
    layers, width, size = np.arange(len(centre)), rcParams["lines.linewidth"], rcParams["lines.markersize"]
    axes.plot(layers, np.where(noise, np.nan, centre), color=colour, linestyle=dash,
              label=None if name is None else label(name), marker=marker)  # fmt: skip
    # Into the noise, and within it: thin and dotted, with hollow marks.
    tail = noise | np.roll(noise, -1) & (layers < len(layers) - 1)
    axes.plot(layers, np.where(tail, centre, np.nan), color=colour, linewidth=width / 2, linestyle=":")
    axes.plot(layers[noise], centre[noise], linestyle="none", color=colour, marker=marker or "o",
              markersize=0.8 * size, markerfacecolor="white", zorder=3)  # fmt: skip


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
