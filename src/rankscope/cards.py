"""How an object shows itself in a notebook: a card with a figure and a small table.

A card is plain HTML with its styles inside it and a PNG for each panel of its figure: no script, style sheet or
address. So it looks the same in a live cell, in a notebook that nobody trusts, in editors that sanitise what they
show, in an exported page, and without a network. Text and table take the page's colours; figures stand on white.

The card's size is bounded however large the object is, and all text from a run is escaped: a variant named
`<script>` stays a name.
"""

import base64
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from rankscope.extras import installed

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

ROWS = 12  # Lines of a table at most; the rest is counted
LONGEST = 60  # Characters of a cell at most
MARGIN = 8  # Pixels of white around a panel

EDGE = 4  # Pixels around an image, in which its tile is seen
LINE = "rgba(128,128,128,.45)"  # Seen on white and on black
_CARD = (
    f"background:transparent;color:inherit;border:1px solid {LINE};border-radius:6px;padding:12px 16px;"
    "display:inline-block;max-width:100%;box-sizing:border-box;overflow-x:auto;"
    "font:13px/1.45 system-ui,sans-serif"
)
_PIECE = "display:inline-block;vertical-align:top;max-width:100%;margin:0 16px 8px 0"
"""Images and the table stand side by side as far as there is room."""
_IMAGE = f"{_PIECE};height:auto;box-sizing:border-box;padding:{EDGE}px;background:#fff;border-radius:4px"
_TABLE = "border-collapse:collapse;margin:0;background:transparent;color:inherit;font-size:12.5px"
_CELL = "padding:2px 12px 2px 0;border:0;background:transparent;color:inherit;white-space:nowrap;text-align:"


def card(
    title: str,
    draw: "Callable[[], Figure] | None",
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> str:
    """The HTML: a title, the figure that `draw` gives as images of its own (none without matplotlib), a
    table, and sentences. The first column is words, the others are numbers."""
    parts = [f'<div style="{_CARD}">', f'<div style="font-weight:600">{escape(title)}</div>']
    parts.append('<div style="margin-top:6px">')
    if draw is not None and installed("matplotlib", "PIL"):
        parts += _images(draw(), title)
    if rows:
        parts.append(_table(headings, rows))
    parts.append("</div>")
    note_style = "color:inherit;opacity:.8;margin-top:6px;max-width:860px"
    parts += [f'<div style="{note_style}">{escape(note)}</div>' for note in notes]
    return "\n".join([*parts, "</div>"])


def lines(title: str, rows: Sequence[Sequence[str]]) -> str:
    """The plain text for a terminal: a title, and a few aligned lines beneath."""
    shown = [[short(cell) for cell in row] for row in rows[:ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    more = [f"... and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return "\n  ".join([title, *text, *more])


def short(text: str) -> str:
    """The text on one line, cut to the length of a cell.

    >>> short("a" * 100) == "a" * 59 + "…"
    True
    """
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural unless it is one.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str], style: str) -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        inside = (
            f'<{tag} style="{_CELL}{side};{style}">{escape(short(cell))}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = [line("td", row, "") for row in rows[:ROWS]]
    if len(rows) > ROWS:
        rest = f"… and {len(rows) - ROWS} more"
        body.append(f'<tr><td colspan="{len(headings)}" style="{_CELL}left">{rest}</td></tr>')
    head = line("th", headings, "font-weight:500;opacity:.75")
    table = f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div style="{_PIECE};overflow-x:auto">{table}</div>'


def _images(figure: "Figure", title: str) -> list[str]:
    """The figure, an image for each panel."""
    from rankscope.figures.matplotlib import SHARPNESS, png, rendered

    image = rendered(figure)
    images: list[str] = []
    for left, right in _columns(figure, image.width):
        part = image.crop((left, 0, right, image.height))
        data = base64.b64encode(png(part)).decode()
        alt = escape(f"{title}, panel {len(images) + 1}" if images else title)
        width = part.width // SHARPNESS + 2 * EDGE
        images.append(f'<img alt="{alt}" width="{width}" style="{_IMAGE}" src="data:image/png;base64,{data}">')
    return images


def _columns(figure: "Figure", width: int) -> list[tuple[int, int]]:
    """From where to where, in pixels, each panel reaches; all of it where they do not stand in one row."""
    boxes = [subplot.get_tightbbox() for subplot in figure.axes if subplot.get_subplotspec() is not None]
    scale = width / figure.bbox.width
    reach = sorted((box.x0 * scale, box.x1 * scale) for box in boxes if box is not None)
    if len(reach) < 2 or any(this[1] > following[0] for this, following in pairwise(reach)):
        return [(0, width)]
    return [(max(0, round(left) - MARGIN), min(width, round(right) + MARGIN)) for left, right in reach]
