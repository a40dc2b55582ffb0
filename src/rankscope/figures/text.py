"""Text of figures and pages: numbers, names that stay text wherever they come from, curves in block letters.

Tokens, names and titles come from models and texts: any of them may read `<script>`. A page's own text is
escaped by its template; what goes into a figure passes through `escaped`, as plotly reads a little HTML in
every label, or through `label` for matplotlib; and what goes into a script element passes through `script_json`.

A sparkline has a character for each value: for text, where a picture has no place. Heights are linear from 0 where
values span less than two decades, else logarithmic, and logarithmic in the exponent where that spans too much.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import numpy as np

T = TypeVar("T")
LABEL = 60  # Characters of a name in a legend at most
LONG = 1e6  # Exponents from here on are written as powers
CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0xFFFE, 0xFFFF} - {ord(space) for space in "\t\n\r"}
"""What neither a page nor a picture in SVG may hold."""
TURNS = dict.fromkeys((*CONTROLS, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
"""Marks that turn the direction of all text after them, ours too: shown, not obeyed."""
LONGEST = 160  # Characters of a label at most: a name may be of any length
BLOCKS = "▁▂▃▄▅▆▇█"


def label(name: str) -> str:
    """A name as a label of matplotlib, which sets what stands between dollars as a formula, and shows none
    that is empty or begins with an underscore.

    >>> label("san+skip"), label("$x$"), label("_mine")
    ('san+skip', '\\\\$x\\\\$', ' _mine')
    """
    shown = "".join(character if character.isprintable() else "\ufffd" for character in name[:LABEL])
    shown = (f"{shown[:-1]}…" if len(name) > LABEL else shown).replace("$", r"\$")
    return shown if shown[:1] not in ("", "_") else f" {shown}"


def power(log10: float) -> str:
    """A number from its log10, at any scale.

    >>> power(-0.3679767853), power(-3963.68), power(float("-inf"))
    ('0.429', '2.1e-3964', '0')
    """
    if math.isnan(log10):
        return "–"
    if math.isinf(log10):
        return "0" if log10 < 0 else "∞"
    if -3 <= log10 < 4:
        return f"{10**log10:.3g}"
    exponent = math.floor(log10)
    if abs(exponent) > 10**9:
        return f"10^{log10:.3g}"
    digits = f"{10 ** (log10 - exponent):.1f}"
    return f"1.0e{exponent + 1:+03d}" if digits == "10.0" else f"{digits}e{exponent:+03d}"


def tick(log10: float, _: object = None) -> str:
    """The label of a power of ten on an axis of powers; a long exponent is a power itself.

    >>> tick(-1e4), tick(0.5), tick(-1e12), tick(-2.5e7)
    ('$10^{-10000}$', '$10^{0.5}$', '$10^{-10^{12}}$', '$10^{-2.5 \\\\cdot 10^{7}}$')
    """
    if abs(log10) >= LONG:
        digits, exponent = f"{log10:.3e}".split("e")
        factor = digits.rstrip("0").rstrip(".")
        factor = factor.removesuffix("1") if factor in ("1", "-1") else rf"{factor} \cdot "
        return f"$10^{{{factor}10^{{{int(exponent)}}}}}$"
    return f"$10^{{{log10:.0f}}}$" if log10 == round(log10) else f"$10^{{{log10:.6g}}}$"


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


def sparkline(values: Sequence[float | None], limits: tuple[float, float] | None = None) -> str:
    """One character per value, from the lowest (or 0) to the highest; a gap where there is none.

    >>> sparkline([1.0, 0.5, 0.0])
    '█▅▁'
    """
    low, high = limits or _limits(values)
    span = high - low or 1.0
    return "".join(BLOCKS[round((value - low) / span * 7)] if _is_finite(value) else " " for value in values)


def sparklines(*logs: Sequence[float | None]) -> list[str]:
    """Several curves of log10 on one scale.

    >>> sparklines([0.0, -4.0], [0.0, -2.0])
    ['█▁', '█▅']
    """
    curves = [thinned(curve) for curve in logs]
    flat = [value for curve in curves for value in curve]
    heights = _heights(flat)
    limits, rest = _limits(heights), iter(heights)
    return [sparkline([*islice(rest, len(curve))], limits) for curve in curves]


def _limits(values: Sequence[float | None]) -> tuple[float, float]:
    known = [0.0, *filter(_is_finite, values)]
    return min(known), max(known)


def thinned(values: Sequence[T], most: int = 13) -> Sequence[T]:
    """At most `most` of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def _heights(logs: Sequence[float | None]) -> list[float]:
    """Heights for a sparkline: values over up to two decades, logs over up to fifty, else logs of logs."""
    heights = [k if _is_finite(k) else math.nan for k in logs]
    known = [k for k in heights if math.isfinite(k)]
    span = max(known) - min(known) if known else 0.0
    if span < 2:
        top = max(known, default=0.0)  # a sparkline has no unit: values beyond floating point are drawn too
        return [10.0 ** (k - top) for k in heights]
    if span < 50:
        return heights
    return [math.copysign(math.log1p(abs(k)), k) for k in heights]


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
