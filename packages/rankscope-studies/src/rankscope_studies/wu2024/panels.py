"""What the figures of this paper share: styles of lines, legends, and axes of powers of ten that reach any depth."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, Literal

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from rankscope.figures import DEEP, INK, MARKERS, PALETTE, Axes, Figure
from rankscope.shapes import Float

Dash = Literal["-", "--"]
TEX = {"mu": r"$\mu(X)$", "relative_mu": r"$\mu(X)\,/\,\|X\|_F$"}


def title(axes: Axes, text: str, **labels: Any) -> None:
    """A panel's name, at its left, and what its axes are."""
    axes.set_title(text, loc="left", fontsize=11)
    axes.set(**labels)


def line_style(index: int, markersize: float = 5, linewidth: float = 1.4) -> dict[str, Any]:
    """Colour, marker and sizes of a line, by its index among the lines of a panel."""
    colour, marker = PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": markersize, "linewidth": linewidth}


def legend_below(figure: Figure, axes: Axes, name: str, dashes: Mapping[str, Dash] | None = None) -> None:
    """One legend for all panels, below them: the lines of one, then what dashes mean."""
    dashes = dashes or {}
    lines, labels = axes.get_legend_handles_labels()
    dashed = [Line2D([], [], color=INK, linewidth=1.4, linestyle=dash) for dash in dashes.values()]
    lines, labels = [Line2D([], [], linestyle="none"), *lines, *dashed], [f"{name}:", *labels, *dashes]
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)


def geometric(logs: Float[np.ndarray, "sample layer"]) -> Float[np.ndarray, " layer"]:
    """The mean over samples of powers of ten, where any is finite: exact zeros have none and stay out."""
    finite = np.isfinite(logs)
    total = np.where(finite, logs, 0.0).sum(0)
    return np.divide(total, finite.sum(0), out=np.full(logs.shape[1], np.nan), where=finite.any(0))


def by_layer(axes: Axes, depth: int) -> None:
    """Layers on a log axis as in the paper, with layer 0, which a log axis proper has no place for."""
    axes.set_xscale("symlog", linthresh=1.0, base=2)
    ticks = [0, *(2**k for k in range(10) if 2**k <= 0.75 * depth), depth]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda layer, _: f"{layer:g}")
    axes.set_xlim(0, depth * 1.04)
    axes.set_xlabel("layer")


def powers_of_ten(axes: Axes, lowest: float = -math.inf) -> None:
    """The vertical axis holds powers of ten: plain numbers where they are few, and over `DEEP` decades
    logarithmic in them. It never shows less than half a decade: what hardly moves must look so. It ends at
    `lowest`, and says how far down the data go."""
    bottom, top = axes.dataLim.y0, axes.dataLim.y1
    if bottom < lowest:
        down = power_of_ten(-(10.0 ** round(math.log10(-bottom))))
        axes.annotate(f"down to {down}", (0.97, 0.03), xycoords="axes fraction", ha="right", fontsize=8)
        bottom = lowest
    top += 0.06 * min(top - bottom, DEEP)
    bottom = min(bottom, top - 0.5)
    axes.yaxis.set_minor_formatter(NullFormatter())
    if top - bottom > DEEP:
        axes.set_yscale("symlog", linthresh=1.0)
        decades = math.floor(math.log10(-bottom))
        every = max(1, math.ceil(decades / 5))
        ticks = [-(10.0**k) for k in range(decades - decades % every, -1, -every)]
        axes.yaxis.set_major_locator(FixedLocator([*ticks, 0.0]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom * 1.6, max(top, 2.0))
    else:
        bottom -= 0.04 * (top - bottom)
        axes.set_ylim(bottom, top)
        if top - bottom < 3:
            axes.yaxis.set_major_locator(FixedLocator(_plain_ticks(bottom, top)))
            axes.yaxis.set_major_formatter(lambda k, _: f"{float(f'{10**k:.3g}'):g}")
            return
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(lambda k, _: power_of_ten(k))


def _plain_ticks(bottom: float, top: float) -> list[float]:
    """log10 of round numbers in between: the fewest kinds that give three of them."""
    levels: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), range(1, 10)):
        decades = range(math.floor(bottom), math.ceil(top) + 1)
        levels = [k + math.log10(digit) for k, digit in product(decades, digits)]
        levels = [level for level in levels if bottom <= level <= top]
        if len(levels) >= 3:
            break
    return levels


def power_of_ten(k: float) -> str:
    """`10^k` as a figure has it, k itself a power of ten where it is large.

    >>> power_of_ten(-4.0), power_of_ten(-1e6)
    ('$10^{-4}$', '$10^{-10^{6}}$')
    """
    if k == 0:
        return "$1$"
    if abs(k) >= 1000 and math.log10(abs(k)) % 1 < 1e-9:
        sign = "-" if k < 0 else ""
        return f"$10^{{{sign}10^{{{round(math.log10(abs(k)))}}}}}$"
    return f"$10^{{{k:.6g}}}$"
