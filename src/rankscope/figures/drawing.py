"""Charts in print: `plot` draws a `Chart` with matplotlib, in the house style or the user's.

Lines that are in an order have a bar of colours where there are many; other legends stand in the panel,
beside it where they are long, or below all panels where these share one.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankscope.figures import description as fig
from rankscope.figures import matplotlib as mpl
from rankscope.figures.style import ALARM, FAINT, INK, LISTED, MARKERS, NEGATIVE, POSITIVE, line_style
from rankscope.figures.text import label, tick

MOST = 4  # Panels in a row, where a chart does not say
TALL = 24  # Names in a column of a legend beside the axes
DASHES = ("-", (0, (5, 2)), (0, (5, 2, 1, 2)), (0, (8, 3)))  # Of lines whose colour comes again
STYLES = {"solid": "-", "dot": ":", "dash": "--"}
NAMED = {"dot": "o", "ring": "o", "bar": "_", "at most": r"$\downarrow$", "at least": r"$\uparrow$"}
LONG = 34  # Characters of all labels of an axis from which on they are turned


@mpl.styled
def plot(*charts: fig.Chart, ax: mpl.AxesLike | None = None, figsize: tuple[float, float] | None = None) -> mpl.Figure:
    """The charts as a figure of matplotlib, below each other. `ax` are axes to draw into instead, one for
    each panel; `figsize` is the size of the whole in inches."""
    columns = max(
        min(len(chart.panels), chart.columns or MOST, MOST) if len(chart.panels) > MOST else len(chart.panels)
        for chart in charts
    )
    rows = [chart.panels[start : start + columns] for chart in charts for start in range(0, len(chart.panels), columns)]
    width, height = charts[0].size
    marks = [mark for panel in charts[0].panels for mark in panel.marks if isinstance(mark, fig.Line)]
    names = {mark.name for mark in marks if mark.name is not None}
    if len(names) > LISTED and charts[0].colour_bar is None and len(charts[0].panels) == 1:  # a legend beside
        width += math.ceil(len(names) / TALL) * (0.5 + 0.065 * max(len(label(name)) for name in names))
    figure, axes = mpl.panels(columns, width, height, rows=len(rows), ax=ax, figsize=figsize)
    for row, shown in enumerate(rows):
        subplots = axes[row * columns : (row + 1) * columns]
        for k, (subplot, panel) in enumerate(zip(subplots, shown, strict=False)):
            _draw(subplot, panel, k > 0 and _scale_of(panel.y) == _scale_of(shown[k - 1].y) is not None)
        for subplot in subplots[len(shown) :]:
            subplot.set_visible(False)
    first = 0
    for chart in charts:
        _explain(figure, axes[first : first + len(chart.panels)], chart, ax is not None)
        first += columns * -(-len(chart.panels) // columns)
    return figure


def _scale_of(axis: fig.Axis) -> object:
    """What two panels must share for one to go without numbers."""
    return axis.powers or axis.range


def _draw(axes: mpl.Axes, panel: fig.Panel, numbered_before: bool) -> None:
    many = [mark for mark in panel.marks if isinstance(mark, fig.Bars)]
    for mark in panel.marks:
        if isinstance(mark, fig.Line):
            _line(axes, mark)
        elif isinstance(mark, fig.Points):
            _points(axes, mark)
        elif isinstance(mark, fig.Spans):
            lengths = np.subtract(mark.ends, mark.starts)
            bars = axes.barh(mark.rows, lengths, left=mark.starts, height=0.5, color=_colour(mark.colour))
            bars.set_label(label(mark.name))
        elif isinstance(mark, fig.Heatmap):
            _heatmap(axes, mark)
        else:
            _bars(axes, mark, many)
    for flag in panel.flags:
        axes.axvline(flag.x, color=FAINT, linestyle=":", linewidth=1.0)
        axes.plot([flag.x], [1.0], marker="v", color=ALARM, transform=axes.get_xaxis_transform(), clip_on=False)
    _dress(axes, panel.x, "x")
    _dress(axes, panel.y, "y")
    heading = _words(panel.heading)
    if panel.counts:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.16 * (high - low))
        heading += " (above: how many)"
        for x, text in panel.counts.items():
            axes.annotate(text, (x, 1.0), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=7)
    if panel.square:
        axes.set_aspect("equal")
    if heading:
        axes.set_title(heading, loc="left", fontsize=10)
    if numbered_before:
        axes.tick_params("y", labelleft=False)
        axes.set_ylabel("")


def _line(axes: mpl.Axes, line: fig.Line) -> None:
    """A line with its bands; where it is only noise it is dotted, with hollow marks."""
    x, y, colour = np.asarray(line.x), np.asarray(line.y, dtype=float), _colour(line.colour)
    style = line_style(line.index, mpl.palette())
    marker = MARKERS[style.marker] if line.marker == "index" else NAMED.get(line.marker or "")
    dash: Any = DASHES[style.turn % len(DASHES)] if line.dash == "index" else STYLES[line.dash]
    width = mpl.rcParams["lines.linewidth"] * line.width / 2
    size = mpl.rcParams["lines.markersize"] * (0.6 if line.marker == "dot" else 1.0)
    for low, high in line.bands:
        axes.fill_between(x, low, high, color=colour, alpha=0.15 * line.strength, linewidth=0)
    noise = np.zeros(len(y), bool) if line.noise is None else line.noise
    hollow = noise if line.hollow is None else line.hollow
    empty = len(hollow) > 0 and bool(hollow[np.isfinite(y)].all()) and line.noise is None
    axes.plot(x, np.where(noise, np.nan, y), color=colour, linestyle=dash, linewidth=width, marker=marker,
              markersize=size, markerfacecolor="white" if empty else colour,
              label=None if line.name is None else label(line.name))  # fmt: skip
    if noise.any():
        tail = noise | np.append(noise[1:], False)
        axes.plot(x, np.where(tail, y, np.nan), color=colour, linewidth=width / 2, linestyle=":")
    if hollow.any():
        axes.plot(x[hollow], y[hollow], linestyle="none", color=colour, marker=marker or "o", zorder=3,
                  markersize=0.8 * size, markerfacecolor="white")  # fmt: skip


def _points(axes: mpl.Axes, points: fig.Points) -> None:
    x, y = (np.asarray(item, dtype=float) for item in (points.x, points.y))
    name = points.colour
    colour: Any = _colour(name) if isinstance(name, str) else list(map(_colour, name))
    hollow = np.zeros(len(x), bool) if points.hollow is None else points.hollow
    if points.marker == "bar":
        axes.scatter(x, y, s=500.0, marker="_", color=colour, linewidth=2.0, zorder=3)
        return
    size = (0.7 * points.size) ** 2
    axes.scatter(x[~hollow], y[~hollow], s=size, c=colour, alpha=points.opacity, zorder=2,
                 edgecolors="white" if points.marker == "ring" else "none")  # fmt: skip
    axes.scatter(x[hollow], y[hollow], s=size, facecolors="none", edgecolors=colour, zorder=2)


def _bars(axes: mpl.Axes, mark: fig.Bars, among: Sequence[fig.Bars]) -> None:
    width = 0.8 / len(among)
    middle = np.asarray(mark.x) + (among.index(mark) - (len(among) - 1) / 2) * width
    name = label(mark.name) if len(among) > 1 else None
    axes.bar(middle, mark.heights, width, color=_colour(mark.colour), label=name, zorder=2)
    axes.axhline(0, color=FAINT, linewidth=0.8)


def _heatmap(axes: mpl.Axes, mark: fig.Heatmap) -> None:
    values = np.ma.masked_invalid(np.asarray(mark.values, dtype=float))
    if mark.powers is not None:
        values = np.ma.masked_invalid(np.array([mark.powers.place(row) for row in values.filled(np.nan)], float))
    low, high = mark.range or (float(values.min()), float(values.max()))
    if mark.powers is not None:
        low, high = (mark.powers.place([k])[0] or 0.0 for k in (low, high))
    noise = np.zeros(values.shape, bool) if mark.noise is None else mark.noise
    values = np.ma.masked_where(noise, values)
    signs = mpl.LinearSegmentedColormap.from_list("signs", [NEGATIVE, "white", POSITIVE])
    image = axes.pcolormesh(mark.x, mark.y, values, shading="nearest", vmin=low, vmax=high,
                            cmap=signs if mark.signed else "viridis")  # fmt: skip
    if noise.any():
        grey = mpl.ListedColormap([FAINT])
        axes.pcolormesh(mark.x, mark.y, np.ma.masked_where(~noise, noise), shading="nearest", cmap=grey)
    bar = axes.get_figure(root=True).colorbar(image, ax=axes, shrink=0.9, label=_words(mark.title))  # type: ignore[union-attr]
    if mark.powers is not None:
        ticks = mark.powers.ticks
        places = np.array(mark.powers.place(ticks), dtype=float)
        bar.set_ticks(list(places), labels=[_power(mark.powers, k) for k in ticks])
        bar.ax.set_ylim(low, high)  # a tick beyond the colours would lengthen the bar by a strip of white
    elif mark.signed:
        bar.ax.yaxis.set_major_formatter(mpl.FuncFormatter(lambda share, _: f"{share:.3g}"))


def _dress(axes: mpl.Axes, axis: fig.Axis, side: str) -> None:
    """Name an axis, and say where its numbers stand."""
    ruler = axes.xaxis if side == "x" else axes.yaxis
    ruler.set_label_text(_words(axis.title))
    set_limits = axes.set_xlim if side == "x" else axes.set_ylim
    if axis.powers is not None:
        if axis.powers.deep:
            (axes.set_xscale if side == "x" else axes.set_yscale)("symlog", linthresh=1.0)
        set_limits(*axis.powers.limits)
        ruler.set_major_locator(PowersLocator())
        ruler.set_major_formatter(mpl.FuncFormatter(lambda k, _, powers=axis.powers: _power(powers, k)))
    elif axis.labels is not None:
        ruler.set_ticks(list(axis.labels), [label(name) for name in axis.labels.values()], fontsize=9)
        if side == "x" and max(map(len, axis.labels.values())) * len(axis.labels) > LONG:
            axes.tick_params("x", rotation=35)
    elif axis.last is not None:
        ruler.set_major_locator(mpl.MaxNLocator(integer=True))
    elif axis.steps:
        ruler.set_major_formatter(mpl.FuncFormatter(lambda step, _: f"{step:,.0f}"))
    elif axis.percent:
        ruler.set_major_formatter(mpl.FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    if axis.range is not None:
        set_limits(*axis.range)
    elif axis.from_zero:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    if not axis.grid:
        ruler.grid(False)


class PowersLocator(mpl.Locator):
    """The ticks of an axis of powers, wherever one has zoomed to."""

    def __call__(self) -> Sequence[float]:  # noqa: D102  matplotlib calls it
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """The ticks between the ends of the axis."""
        low, high = sorted((float(vmin), float(vmax)))
        return [k for k in fig.Powers([low, high]).ticks if low <= k <= high]


def _power(powers: fig.Powers, k: float) -> str:
    text = powers.label(k)
    digits, caret, _ = text.partition("10^")
    if not caret:
        return text
    return rf"${digits[:-1]} \cdot {tick(math.floor(k))[1:]}" if digits else tick(k)


def _explain(figure: mpl.Figure, axes: Sequence[mpl.Axes], chart: fig.Chart, borrowed: bool) -> None:
    """Which line is which: a bar of colours, a legend in each panel that has names, or one for all."""
    if chart.colour_bar is not None:
        _colour_bar(axes[-1], chart.colour_bar)
    if not chart.legend:
        return
    if chart.shared and chart.colour_bar is None:
        named: dict[str, Any] = {}
        for subplot in axes:
            for handle, name in zip(*subplot.get_legend_handles_labels(), strict=True):
                named.setdefault(name, handle)
        if named and borrowed:
            axes[0].legend(named.values(), named.keys(), loc="best")
        elif named:
            columns = min(len(named), 4)
            figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)
        return
    for subplot in axes:
        names = subplot.get_legend_handles_labels()[1]
        if len(names) > LISTED:
            subplot.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0,
                        ncols=math.ceil(len(names) / TALL),
                        fontsize=7 if len(names) > TALL else mpl.rcParams["legend.fontsize"])  # fmt: skip
        elif names:
            subplot.legend(loc="best")


def _colour_bar(axes: mpl.Axes, bar: fig.ColourBar) -> None:
    count = len(bar.labels)
    colours = mpl.ListedColormap([_colour(f"order {k / max(1, count - 1)}") for k in range(count)])
    places = mpl.ScalarMappable(mpl.Normalize(-0.5, count - 0.5), colours)
    scale = axes.get_figure(root=True).colorbar(places, ax=axes, pad=0.02, label=label(bar.title))  # type: ignore[union-attr]
    shown = list(range(0, count, -(-count // 7)))
    scale.set_ticks(shown, labels=[label(bar.labels[k]) for k in shown])
    scale.outline.set_visible(False)


def _colour(name: str) -> Any:
    kind, _, index = name.partition(" ")
    if kind == "line":
        return line_style(int(index), mpl.palette()).colour
    if kind == "order":
        return mpl.colormaps["viridis"](0.82 * float(index))  # all stand out from white
    return {"ink": INK, "faint": FAINT}.get(name, name)


def _words(title: fig.Formula | str) -> str:
    if isinstance(title, str):
        return label(title) if title else ""
    return f"${title.tex}$" if title.tex else label(title.text)
