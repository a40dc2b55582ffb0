"""Numbers and names as text: a number from its logarithm, a name as a label, for any scale and any name."""

import math

LABEL = 60  # Characters of a name in a legend at most
LONG = 1e6  # Exponents from here on are written as powers


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
