"""How an object shows itself in a notebook: a card with a figure and a small table.

The card is white with dark ink under any theme, its size is bounded however large the object is, and all text
that came from a run is escaped: a variant named `<script>` stays a name.
"""

import base64
import io
from collections.abc import Sequence
from html import escape

from matplotlib import rc_context
from matplotlib.figure import Figure

from rankscope.figures import FAINT, INK, STYLE

ROWS = 12
"""Lines of a table at most; the rest is counted."""
LONGEST = 60
"""Characters of a cell at most."""

_CARD = (
    f"background:#fff;color:{INK};border:1px solid #e0e0e0;border-radius:6px;padding:12px 16px;"
    "max-width:min(900px,100%);width:fit-content;box-sizing:border-box;overflow-x:auto;"
    "font:13px/1.45 system-ui,sans-serif"
)
_TABLE = f"border-collapse:collapse;margin:6px 0 0;background:#fff;color:{INK};font-size:12.5px"
_CELL = f"padding:2px 12px 2px 0;border:0;background:#fff;color:{INK};white-space:nowrap;text-align:"


def card(
    title: str,
    figure: Figure | None,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> str:
    """The HTML: a title, the figure as an image of its own, a table, and sentences. The first column is
    words, the others are numbers."""
    parts = [f'<div style="{_CARD}">', f'<div style="font-weight:600">{escape(title)}</div>']
    if figure is not None:
        parts.append(_image(figure, title))
    if rows:
        parts.append(_table(headings, rows))
    parts += [f'<div style="color:#555;margin-top:6px">{escape(note)}</div>' for note in notes]
    return "\n".join([*parts, "</div>"])


def lines(title: str, rows: Sequence[Sequence[str]]) -> str:
    """The plain text for a terminal: a title, and a few aligned lines beneath."""
    shown = [[short(cell) for cell in row] for row in rows[:ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    more = [f"... and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return "\n  ".join([title, *text, *more])


def short(text: str) -> str:
    """In little room.

    >>> short("a" * 100) == "a" * 59 + "…"
    True
    """
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
        said = f"… and {len(rows) - ROWS} more"
        body.append(f'<tr><td colspan="{len(headings)}" style="{_CELL}left">{said}</td></tr>')
    head = line("th", headings, f"font-weight:500;color:{FAINT}")
    return f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'


def _image(figure: Figure, title: str) -> str:
    """The figure as an image: ids of two figures in one page do not meet."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    style = "display:block;max-width:100%;height:auto;margin:6px 0"
    width = round(figure.get_figwidth() * 72)
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img alt="{escape(title)}" width="{width}" style="{style}" src="{source}">'
