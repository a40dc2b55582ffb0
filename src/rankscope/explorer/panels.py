"""Figures of `charts` in the little room that the page has: one panel of several, or all in one row."""

from rankscope.charts import Figure
from rankscope.charts.style import suffix

ACROSS = 150
"""Pixels that a panel needs."""


def alone(figure: Figure, panel: int) -> Figure:
    """One panel of a figure as a figure of its own, without its heading."""
    layout = {
        key: value
        for key, value in figure["layout"].items()
        if not key.startswith(("xaxis", "yaxis")) and key not in ("grid", "annotations")
    }
    layout |= {axis: figure["layout"][f"{axis}{suffix(panel)}"] for axis in ("xaxis", "yaxis")}
    layout["margin"] = {**layout["margin"], "t": 20}
    own = [trace for trace in figure["data"] if trace["xaxis"] == f"x{suffix(panel)}"]
    data = [{**trace, "xaxis": "x", "yaxis": "y"} for trace in own]
    return {**figure, "data": data, "layout": layout, "panels": 1}


def beside(figure: Figure) -> Figure:
    """All panels of a figure in one row."""
    if "grid" in figure["layout"]:
        figure["layout"]["grid"].update(rows=1, columns=figure["panels"])
    return {**figure, "panel": ACROSS}


def unnamed(figure: Figure) -> None:
    """Without a legend, where there is but one line."""
    for trace in figure["data"]:
        trace["showlegend"] = False
