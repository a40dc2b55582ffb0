"""Charts for pages: pure functions from our tables to figures of plotly as plain data.

Nothing here imports plotly: a figure is a dict that JSON can hold, and `static/draw.js` draws it.

    figure = charts.curves(profile, "relative_residual", log=True)
    {"data": [...], "layout": {...}, "table": {column: [...]}, "alt": "...", "panels": 1}

In the page, after plotly's script and `draw.js`:

    rankscope.draw(element, figure)                    one figure; again to put another in its place
    rankscope.choose(element, [{label, figure}, ...])  several, one at a time, with a choice above them
    rankscope.later(element, [{label, figure}, ...])   the same, drawn when it comes near the screen
    rankscope.waiting()                                how many of these are not drawn yet
    rankscope.csv(figure)                              its data as text
    rankscope.retheme()                                after `data-theme` of the root element has changed
"""

from rankscope.charts.arithmetics import arithmetics
from rankscope.charts.bounds import bounds
from rankscope.charts.cloud import cloud
from rankscope.charts.curves import curves
from rankscope.charts.escaping import Figure, escaped, plain, script_json
from rankscope.charts.heads import heads
from rankscope.charts.lengths import lengths
from rankscope.charts.scripts import draw_script, plotly_script, style_sheet
from rankscope.charts.spectrum import spectrum

__all__ = [
    "Figure",
    "arithmetics",
    "bounds",
    "cloud",
    "curves",
    "draw_script",
    "escaped",
    "heads",
    "lengths",
    "plain",
    "plotly_script",
    "script_json",
    "spectrum",
    "style_sheet",
]
