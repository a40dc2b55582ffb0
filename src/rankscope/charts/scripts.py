"""The scripts and the style that a page with charts needs, as text to be put into it."""

from functools import cache
from importlib.resources import files


@cache
def plotly_script() -> str:
    """plotly.js as the Python package carries it."""
    return files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


@cache
def draw_script() -> str:
    """`draw.js`: draws our figures, in the reader's theme (see `rankscope.charts`)."""
    return files("rankscope.charts").joinpath("static/draw.js").read_text(encoding="utf-8")


@cache
def style_sheet() -> str:
    """`draw.css`: colours by theme as custom properties, and the look of what `draw.js` puts around a
    figure."""
    return files("rankscope.charts").joinpath("static/draw.css").read_text(encoding="utf-8")
