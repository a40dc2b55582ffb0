"""What may go into a page: text that stays text, and JSON that no page mistakes for markup.

Tokens, names and titles come from models and texts: any of them may read `<script>`. A page's own text is
escaped by its template; what goes into a figure passes through `escaped`, as plotly reads a little HTML in
every label; and what goes into a script element passes through `script_json`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0xFFFE, 0xFFFF} - {ord(space) for space in "\t\n\r"}
"""What neither a page nor a picture in SVG may hold."""
TURNS = dict.fromkeys((*CONTROLS, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
"""Marks that turn the direction of all text after them, ours too: shown, not obeyed."""
LONGEST = 160  # Characters of a label at most: a name may be of any length


def escaped(text: object) -> str:
    """Text for a label of plotly, which reads tags and entities in it.

    >>> escaped("<b>AT&T</b>")
    '&lt;b>AT&amp;T&lt;/b>'
    """
    label = str(text)
    label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
    return label.translate(TURNS).replace("&", "&amp;").replace("<", "&lt;")


def plain(value: Any) -> Any:
    """Plain Python for JSON: numbers in eight digits, and null for NaN and infinity, which it does not know.

    >>> plain({"y": np.array([1.0, np.nan]), "n": np.int64(3)})
    {'y': [1.0, None], 'n': 3}
    """
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def script_json(value: Any) -> str:
    """JSON to stand between script tags: nothing in it can end the element, open a comment or a line.

    >>> script_json("</script><!--")
    '"\\\\u003c/script\\\\u003e\\\\u003c!--"'
    """
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    # Half a character cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")
