"""Charts for pages: a `Chart` as a figure of plotly in plain data, and the scripts that draw it.

Nothing here imports plotly: `page_figure` gives a dict that JSON can hold, `static/draw.js` draws it in the
reader's theme. The report puts it into its page, the explorer sends it.

    {"data": [...], "layout": {...}, "table": {column: [...]}, "alt": "...", "panels": 1[, "frames": [...]]}

All text of a chart passes through `escaped`: plotly reads a little HTML in every label. Colours that follow
the reader's theme are written `@ink`, `@faint`, `@paper` and `@order 0.3`.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from rankscope.figures import description as fig
from rankscope.figures.style import ALARM, NEGATIVE, POSITIVE, VIRIDIS, line_style
from rankscope.figures.text import escaped, plain

SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
NAMED = {"dot": "circle", "ring": "circle", "bar": "line-ew", "at most": "arrow-down", "at least": "arrow-up"}
SIZES = {"dot": 5, "index": 8}
DASHES = ("solid", "dash", "dashdot", "longdash", "5px,2px", "longdashdot", "8px,3px,2px,3px", "solid")
HOVER = "%{text}<extra></extra>"  # Our own words alone, without what plotly adds


def page_figure(chart: fig.Chart) -> dict[str, Any]:
    """The chart as JSON can hold it. `layout.height` is that of one row of panels: `draw.js` multiplies it,
    and stacks panels on a narrow screen."""
    data: list[dict[str, Any]] = []
    headed = any(panel.heading for panel in chart.panels)
    layout: dict[str, Any] = {
        "height": chart.height,
        "margin": {"l": 64, "r": 16, "t": 46 if headed else 30, "b": 48},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"},
    }
    columns = chart.columns or len(chart.panels)
    groups: set[str] = set()
    annotations: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for index, panel in enumerate(chart.panels):
        for mark in panel.marks:
            data += [{**item, **_place(index)} for item in _traces(mark, panel, groups)]
        end = suffix(index)
        layout[f"xaxis{end}"], layout[f"yaxis{end}"] = _axis(panel.x), _axis(panel.y)
        if index % columns and panel.y == chart.panels[index - 1].y:
            layout[f"yaxis{end}"]["title"]["text"] = ""  # that of the panel before is its own
        if panel.square:
            layout[f"yaxis{end}"] |= {"scaleanchor": f"x{end}", "zeroline": True}
            layout[f"xaxis{end}"] |= {"zeroline": True}
        if panel.heading:
            annotations.append(_heading(f"<b>{_words(panel.heading)}</b>", index))
        for flag in panel.flags:
            line, sign = _flag(flag, index, bool(panel.heading))
            shapes, annotations = [*shapes, line], [*annotations, sign]
    if chart.colour_bar is not None:
        data.append(_colour_bar(chart.colour_bar))
    layout |= {"annotations": annotations} if annotations else {}
    layout |= {"shapes": shapes} if shapes else {}
    layout |= {"uirevision": chart.kept} if chart.kept else {}
    layout |= {} if chart.legend else {"showlegend": False}
    if len(chart.panels) > 1:
        layout["grid"] = {"rows": -(-len(chart.panels) // columns), "columns": columns,
                          "pattern": "independent", "xgap": 0.18, "ygap": 0.32}  # fmt: skip
    figure: dict[str, Any] = {"data": data, "layout": layout, "table": chart.table, "alt": chart.alt}
    figure |= {"panels": len(chart.panels)} | ({} if chart.least is None else {"panel": chart.least})
    if chart.frames:
        layout["margin"] |= {"l": 48, "t": 76}  # headings of two lines
        figure["frames"] = [
            {
                "name": frame.name,
                "data": [{"x": _short(x), "y": _short(y)} for x, y in frame.points],
                "layout": {"annotations": [_heading(_two_lines(text), k) for k, text in enumerate(frame.headings)]},
            }
            for frame in chart.frames
        ]
        layout["annotations"] = figure["frames"][0]["layout"]["annotations"]
    json_figure: dict[str, Any] = plain(figure)
    return json_figure


def suffix(panel: int) -> str:
    """How plotly numbers the axes of a panel: none, 2, 3, ..."""
    return "" if panel == 0 else str(panel + 1)


def _place(panel: int) -> dict[str, str]:
    return {"xaxis": f"x{suffix(panel)}", "yaxis": f"y{suffix(panel)}"}


def _traces(mark: Any, panel: fig.Panel, groups: set[str]) -> list[dict[str, Any]]:
    """What plotly draws of a mark. The first of a group is in the legend, for all of it."""
    if isinstance(mark, fig.Line):
        return _line(mark, panel, groups)
    if isinstance(mark, fig.Points):
        edge = {"ring": {"width": 2, "color": "#ffffff"}, "bar": {"width": 3}}
        marker: dict[str, Any] = {
            "size": mark.size,
            "opacity": mark.opacity,
            "color": _colour(mark.colour) if isinstance(mark.colour, str) else list(map(_colour, mark.colour)),
            "symbol": _symbols(NAMED[mark.marker], mark.hollow, "-open" if mark.marker == "bar" else ""),
            "line": edge.get(mark.marker, {"width": 0.6, "color": "@paper"} if mark.hollow is None else {}),
        }
        clip = {"cliponaxis": False} if mark.marker == "ring" else {}  # also at the edge of a map
        return [{**_trace(mark, panel), "mode": "markers", "marker": marker, "showlegend": False, **clip}]
    if isinstance(mark, fig.Bars):
        group = f"{mark.name}, {mark.colour}"  # bars of one name and colour have one entry in the legend
        named: dict[str, Any] = {"name": escaped(mark.name), "showlegend": bool(mark.name) and group not in groups}
        named |= {"legendgroup": group} if mark.name else {}
        groups.add(group)
        bar = {"type": "bar", "x": mark.x, "y": mark.heights, "textposition": "none", **_hover(mark.hover)}
        return [{**bar, **named, "marker": {"color": _colour(mark.colour)}}]
    if isinstance(mark, fig.Spans):
        lengths = np.subtract(mark.ends, mark.starts)
        span = {"type": "bar", "orientation": "h", "y": mark.rows, "x": lengths, "base": mark.starts}
        return [{**span, "name": escaped(mark.name), "width": 0.5, "marker": {"color": _colour(mark.colour)}}]
    return _heatmap(mark)


def _trace(mark: fig.Line | fig.Points, panel: fig.Panel, y: np.ndarray | None = None) -> dict[str, Any]:
    """A line or marks where the axes of its panel have them."""
    values = np.asarray(mark.y if y is None else y, dtype=float)
    points, powers = isinstance(mark, fig.Points), panel.y.powers
    shown = _short(values) if points and powers is None else _placed(values, powers)
    return {"type": "scatter", "x": _short(mark.x) if points else list(mark.x), "y": shown, **_hover(mark.hover)}


def _line(line: fig.Line, panel: fig.Panel, groups: set[str]) -> list[dict[str, Any]]:
    """Bands, the tail into the noise, and the line; one entry of the legend hides all of them."""
    ink, style = _colour(line.colour), line_style(line.index)
    group: dict[str, Any] = {"legendgroup": line.group, "legendrank": line.index} if line.group else {}
    traces: list[dict[str, Any]] = []
    x, y = np.asarray(line.x), np.asarray(line.y, dtype=float)
    for low, high in line.bands:
        known = np.isfinite(low) & np.isfinite(high)
        both = [*_placed(low[known], panel.y.powers), *reversed(_placed(high[known], panel.y.powers))]
        traces.append({
            "type": "scatter", "mode": "lines", "x": [*x[known], *x[known][::-1]], "y": both,
            "fill": "toself", "opacity": 0.16 * line.strength, "fillcolor": ink,
            "line": {"width": 0, "color": ink}, "hoverinfo": "skip", "showlegend": False, **group,
        })  # fmt: skip
    look: dict[str, Any] = {"mode": "lines" if line.marker is None else "lines+markers", **group}
    marker: dict[str, Any] = {"size": SIZES.get(line.marker or "", 9), "color": ink}
    symbol = SYMBOLS[style.marker] if line.marker == "index" else NAMED.get(line.marker or "dot", "circle")
    noise = np.zeros(len(y), bool) if line.noise is None else line.noise
    if noise.any():
        tail = noise | np.append(noise[1:], False)
        edge = {"size": np.where(noise, marker["size"], 0), "symbol": f"{symbol}-open", "line": {"width": 1.5}}
        trace = _trace(line, panel, np.where(tail, y, np.nan))
        dotted = {"line": {"width": 1, "dash": "dot", "color": ink}, "showlegend": False}
        traces.append({**trace, **look, **dotted, "marker": {**marker, **edge}})
        y = np.where(noise, np.nan, y)
    always = "-open" if line.marker in ("at most", "at least") else ""
    marker["symbol"] = _symbols(symbol, line.hollow, always)
    dash = DASHES[style.marker] if line.dash == "index" else line.dash
    named: dict[str, Any] = {"showlegend": False}
    if line.name is not None:
        named = {"name": escaped(line.name), "showlegend": not line.group or line.group not in groups}
        groups.add(line.group)
    stroke = {"width": line.width, "dash": dash, "color": ink}
    return [*traces, {**_trace(line, panel, y), **look, "line": stroke, "marker": marker, **named}]


def _heatmap(mark: fig.Heatmap) -> list[dict[str, Any]]:
    """The squares by their numbers, and those that are noise in grey."""
    values, bar = np.asarray(mark.values, dtype=float), dict[str, Any](thickness=10, outlinewidth=0)
    low, high = mark.range or (float(np.nanmin(values)), float(np.nanmax(values)))
    if mark.title:
        bar["title"] = {"text": _words(mark.title), "side": "right"}
    if mark.powers is not None:
        bar |= _ticks(mark.powers)
        low, high = (mark.powers.place([k])[0] or 0.0 for k in (low, high))
        values = np.array([mark.powers.place(row) for row in values], dtype=float)
    else:
        bar["tickformat"] = "~%" if mark.signed else ".2~g"
    scale = [[0.0, NEGATIVE], [0.5, "@paper"], [1.0, POSITIVE]] if mark.signed else _scale(VIRIDIS)
    noise = np.zeros(values.shape, bool) if mark.noise is None else mark.noise
    trace: dict[str, Any] = {
        "type": "heatmap", "x": mark.x, "y": mark.y, "z": np.where(noise, np.nan, values), "colorscale": scale,
        "zmin": low, "zmax": high, "colorbar": bar, "hovertemplate": HOVER,
        "text": [[_sentence(item) for item in row] for row in mark.hover or []],
    }  # fmt: skip
    if mark.numbers:
        plain = "%{z:.2f}" if high >= 0.1 else "%{z:.3f}" if high >= 0.01 else "%{z:.0e}"
        form = plain if not mark.signed else "%{z:+.1%}" if high >= 0.01 else "%{z:+.2%}"
        trace |= {"xgap": 1, "ygap": 1, "texttemplate": form, "textfont": {"size": 10}}
    grey = {
        "type": "heatmap", "x": mark.x, "y": mark.y, "z": np.where(noise, 0.0, np.nan), "showscale": False,
        "colorscale": [[0.0, "@faint"], [1.0, "@faint"]], "hoverinfo": "skip",
    }  # fmt: skip
    return [trace, grey] if noise.any() else [trace]


def _scale(colours: Sequence[str]) -> list[list[Any]]:
    return [[k / (len(colours) - 1), colour] for k, colour in enumerate(colours)]


def _colour_bar(bar: fig.ColourBar) -> dict[str, Any]:
    """A bar of colours beside the figure, in place of a legend of many lines that are in an order."""
    last = len(bar.labels) - 1
    shown = list(range(0, last + 1, -(-(last + 1) // 7)))
    side = {"thickness": 10, "outlinewidth": 0, "title": {"text": escaped(bar.title), "side": "right"}}
    ticks = {"tickvals": shown, "ticktext": [escaped(bar.labels[k]) for k in shown]}
    marker = {
        "color": [0, last], "cmin": 0, "cmax": last, "showscale": True,
        "colorscale": _scale([f"@order {k / 14:.2f}" for k in range(15)]),
        "colorbar": {**side, **ticks},
    }  # fmt: skip
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker,
            "showlegend": False, "hoverinfo": "skip", **_place(0)}  # fmt: skip


def _axis(axis: fig.Axis) -> dict[str, Any]:
    layout: dict[str, Any] = {"title": {"text": _words(axis.title)}, "zeroline": False}
    if axis.powers is not None:
        return {**layout, "range": axis.powers.range, **_ticks(axis.powers)}
    if axis.labels is not None:
        names = [escaped(name) for name in axis.labels.values()]
        layout |= {"tickvals": list(axis.labels), "ticktext": names, "automargin": True}
    elif axis.last is not None:
        ends = [-0.03 * axis.last - 0.15, 1.03 * axis.last + 0.15]
        layout |= {"dtick": max(1, -(-axis.last // 12)), "tick0": 0, "range": ends}
    elif axis.steps:
        layout |= {"nticks": 5, "tickangle": 0, "separatethousands": True}
    else:
        layout |= {"exponentformat": "power"}
    layout |= {"tickformat": "~%"} if axis.percent else {}
    layout |= {"rangemode": "tozero"} if axis.from_zero else {}
    layout |= {} if axis.range is None else {"range": axis.range}
    return layout if axis.grid else {**layout, "showgrid": False}


def _ticks(powers: fig.Powers) -> dict[str, Any]:
    labels = [re.sub(r"10\^(.+)", r"10<sup>\1</sup>", powers.label(k)).replace("-", "−") for k in powers.ticks]
    return {"tickvals": powers.place(powers.ticks), "ticktext": labels}


def _heading(text: str, panel: int) -> dict[str, Any]:
    """The title of a panel, above it on the left; it follows the panel where that goes."""
    return {
        "text": text, "showarrow": False, "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "yshift": 4,
        "align": "left", "xref": f"x{suffix(panel)} domain", "yref": f"y{suffix(panel)} domain",
    }  # fmt: skip


def _two_lines(text: str) -> str:
    first, _, second = map(escaped, text.partition("\n"))
    return f"<b>{first}</b><br>{second}"


def _flag(flag: fig.Flag, panel: int, headed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dotted line over the panel, and a mark on top of it: inside a panel that has a heading."""
    at = {"xref": f"x{suffix(panel)}", "yref": f"y{suffix(panel)} domain"}
    line = {**at, "type": "line", "x0": flag.x, "x1": flag.x, "y0": 0, "y1": 1,
            "line": {"color": "@faint", "width": 1, "dash": "dot"}}  # fmt: skip
    anchor, shift = ("top", 3) if headed else ("bottom", -3)
    sign = {**at, "x": flag.x, "y": 1, "yanchor": anchor, "yshift": shift, "showarrow": False, "text": "▼",
            "font": {"size": 11, "color": ALARM}, "hovertext": _lines(flag.text)}  # fmt: skip
    return line, sign


def _colour(name: str) -> str:
    kind, _, index = name.partition(" ")
    if kind == "line":
        colour = line_style(int(index)).colour
        return "@ink" if colour == "#000000" else colour
    return name if name.startswith("#") else f"@{name}"


def _symbols(symbol: str, hollow: np.ndarray | None, always: str = "") -> str | list[str]:
    if hollow is None:
        return f"{symbol}{always}"
    return [f"{symbol}-open" if item else symbol for item in hollow]


def _placed(values: Sequence[float] | np.ndarray, powers: fig.Powers | None) -> list[float | None]:
    if powers is not None:
        return powers.place(values)
    return [float(value) if math.isfinite(value) else None for value in values]


def _short(values: Any) -> list[float | None]:
    """In five digits: there are many, and no eye sees more."""
    known = [math.nan if value is None else float(value) for value in values]
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in known]


def _hover(hover: Sequence[fig.Hover] | None) -> dict[str, Any]:
    if hover is None:
        return {"hoverinfo": "skip"}
    return {"text": [_sentence(item) for item in hover], "hovertemplate": HOVER}


def _sentence(hover: fig.Hover) -> str:
    before, index, after = map(_lines, hover)
    return f"{before}<b>{index}</b>{after}" if index else f"{before}{after}"


def _lines(text: str) -> str:
    return "<br>".join(map(escaped, text.split("\n")))


def _words(title: fig.Formula | str) -> str:
    """A title as plotly sets it, with the indices of norms lowered."""
    if isinstance(title, str):
        return escaped(title)
    return escaped(title.text).replace("₁,∞", "<sub>1,∞</sub>").replace("_F", "<sub>F</sub>")


@cache
def plotly_script() -> str:
    """plotly.js as the Python package carries it."""
    return files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


@cache
def static_file(name: str) -> str:
    """`draw.js`, which draws figures of `page_figure` in the reader's theme, or `draw.css`: colours by theme as
    custom properties, and the look of what `draw.js` puts around a figure."""
    return files("rankscope.figures").joinpath("static", name).read_text(encoding="utf-8")
