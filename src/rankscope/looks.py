"""How lines and numbers look, in figures, pages and terminals alike: colours, markers, powers of ten."""

import math
import re
from collections.abc import Iterable, Sequence

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's colours, told apart by colour-blind readers and in grey print by their markers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LABEL = 60
"""Characters of a name in a legend at most."""
LONG = 1e6
"""Exponents from here on are written as powers."""
VARIANTS = (
    "transformer",
    "transformer-attention_skip",
    "transformer-mlp",
    "transformer-norm",
    "transformer-skip",
    "san",
    "san+skip",
    "san+mlp",
    "san+norm",
)
"""Variants that are often drawn: each has its own look, the same in every figure."""
INK, FAINT = "#222222", "#8a8a8a"


def numbered(names: Iterable[str]) -> dict[str, int]:
    """The number of each line's look. A variant that is often drawn has its own, whatever stands beside it;
    others take those that are left.

    >>> numbered(["san", "mine", "transformer", "yours"])
    {'san': 5, 'mine': 1, 'transformer': 0, 'yours': 2}
    """
    found = {name: VARIANTS.index(name) if name in VARIANTS else -1 for name in names}
    left = (number for number in range(len(found)) if number not in set(found.values()))
    return {name: next(left) if number < 0 else number for name, number in found.items()}


NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?")
ORDERED = 4
"""Lines from which on those of a sequence have the colours of an order."""
LISTED = 10
"""Lines that a legend lists, at most; of more in a sequence, a scale says which is which."""


def in_sequence(names: Sequence[str]) -> list[float] | None:
    """The numbers of names that differ in one number alone, as steps of a training do; None of others, and of
    fewer than `ORDERED`. Lines of these are coloured in their order, dark to light.

    >>> in_sequence(["step 0", "step 500", "step 1,000", "step 2,000"])
    [0.0, 500.0, 1000.0, 2000.0]
    >>> in_sequence(["san", "san+skip", "san+mlp", "transformer"])
    """
    parts = [
        [float(part.replace(",", "").replace("_", "")) for part in NUMBER.findall(name)] for name in names
    ]
    if len(names) < ORDERED or len({NUMBER.sub("#", name) for name in names}) > 1:
        return None
    varied = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return list(varied[0]) if len(varied) == 1 and len(set(varied[0])) == len(names) else None


def label(name: str) -> str:
    """A name as a label of matplotlib, which sets what stands between dollars as a formula, and shows none
    that is empty or begins with an underscore.

    >>> label("san+skip"), label("$x$"), label("_mine")
    ('san+skip', '\\\\$x\\\\$', ' _mine')
    """
    shown = "".join(each if each.isprintable() else "\ufffd" for each in name[:LABEL])
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
