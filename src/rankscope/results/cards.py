"""How an object shows itself: in a notebook a card with a figure and a small table, in a terminal a few lines.

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
from textwrap import wrap
from typing import TYPE_CHECKING

from rankscope.extras import installed

if TYPE_CHECKING:
    from rankscope.figures import Figure

ROWS = 12  # Lines of a table at most; the rest is counted
LONGEST = 60  # Characters of a cell at most
TEXT_LINES, WIDTH, ROWS_KEPT = 12, 96, 6  # Lines of text at most, characters of one, and lines that rows keep
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


def lines(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    sentences: Sequence[str] = (),
    most: int | None = None,
    longest: int = LONGEST,
) -> str:
    """The plain text for a terminal: a title, sentences, and a table in aligned lines.

    Args:
        title: The first line; none if it is empty.
        headings: Of the table's columns; no line of them if all are empty.
        rows: Its rows; `most` of them, or as many as make a dozen lines with all else.
        sentences: What is said above the table, cut where a few rows would find no room.
        most: Rows at most.
        longest: Characters of a cell at most.
    """
    sentence_lines = [line for sentence in sentences for line in wrap(sentence, WIDTH, break_on_hyphens=False)]
    head = [headings] if any(headings) else []
    room = TEXT_LINES - 1 - min(len(head) + len(rows), ROWS_KEPT)
    if len(sentence_lines) > room:
        sentence_lines = [*sentence_lines[: room - 1], f"{sentence_lines[room - 1][: WIDTH - 1]}…"]
    if most is None:
        most = TEXT_LINES - 1 - len(sentence_lines) - len(head)
        most -= len(rows) > most  # the line that counts the rest
    shown = [[short(cell, longest) for cell in row] for row in [*head, *rows[:most]]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    more = [f"... and {len(rows) - most} more"] if len(rows) > most else []
    return "\n".join([*([title] if title else []), *(f"  {line}" for line in [*sentence_lines, *text, *more])])


def whole(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of a table of which nothing is cut: aligned, or where that is too wide, a paragraph for each row."""
    aligned = lines(title, headings, rows, most=len(rows), longest=10**6).splitlines()
    if all(len(line) <= width for line in aligned):
        return aligned
    paragraphs = [title] if title else []
    for row in rows:
        named = [f"{heading} {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell]
        text = f"{row[0]}: {'; '.join(named)}"
        indents = {"initial_indent": "  ", "subsequent_indent": "    "}
        paragraphs += wrap(text, width, break_on_hyphens=False, **indents)  # type: ignore[arg-type]
    return paragraphs


def short(text: str, longest: int = LONGEST) -> str:
    """The text on one line, cut to the length of a cell.

    >>> short("a" * 100) == "a" * 59 + "…"
    True
    """
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


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
    from rankscope.figures import SHARPNESS, png, rendered

    image = rendered(figure)
    images: list[str] = []
    columns, bottom = _columns(figure, image.width), image.height
    parts = [(left, 0, right, bottom) for left, right in columns]
    if figure.legends and len(columns) > 1:  # one legend below all panels: an image of its own, so that none cuts it
        scale = image.width / figure.bbox.width
        boxes = [legend.get_window_extent() for legend in figure.legends]
        top = max(0, round(bottom - max(box.y1 for box in boxes) * scale) - MARGIN)
        ends = min(box.x0 for box in boxes) * scale - MARGIN, max(box.x1 for box in boxes) * scale + MARGIN
        parts = [(left, 0, right, top) for left, right in columns]
        parts.append((max(0, round(ends[0])), top, min(image.width, round(ends[1])), bottom))
    for box in parts:
        part = image.crop(box)
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
