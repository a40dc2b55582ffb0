"""What the figures of this paper share: grids of panels, and axes of powers of ten that reach any depth."""

import math

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from rankscope.figures import STYLE
from rankscope.profiles.plot import DEEP

LAYERS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def grid(rows: int, columns: int, width: float = 3.1, height: float = 2.8) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels in rows, in the house style."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def title(axes: Axes, text: str) -> None:
    """A panel's name, at its left."""
    axes.set_title(text, loc="left", fontsize=11)


def geometric(logs: Float[np.ndarray, "sample layer"]) -> Float[np.ndarray, " layer"]:
    """The mean over samples of a power of ten, where any is finite: exact zeros have no power and stay out."""
    there = np.isfinite(logs)
    total = np.where(there, logs, 0.0).sum(0)
    return np.divide(total, there.sum(0), out=np.full(logs.shape[1], np.nan), where=there.any(0))


def by_layer(axes: Axes, depth: int) -> None:
    """Layers on a log axis as in the paper, with layer 0, which a log axis proper has no place for."""
    axes.set_xscale("symlog", linthresh=1.0, base=2)
    axes.xaxis.set_major_locator(FixedLocator([layer for layer in LAYERS if layer <= depth]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda layer, _: f"{layer:g}"))
    axes.set_xlim(0, depth * 1.04)
    axes.set_xlabel("layer")


def powers_of_ten(axes: Axes, lowest: float | None = None) -> None:
    """The vertical axis holds powers of ten; over `DEEP` decades it becomes logarithmic in them."""
    low, high = axes.get_ylim()
    if lowest is not None:
        low = lowest
    if high - low > DEEP:
        axes.set_yscale("symlog", linthresh=1.0)
        decades = math.floor(math.log10(-low))
        every = max(1, math.ceil(decades / 5))
        ticks = [-(10.0**k) for k in range(decades - decades % every, -1, -every) if k >= 0]
        axes.yaxis.set_major_locator(FixedLocator([*ticks, 0.0]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low, max(high, 1.0))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_ylim(low, high)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda k, _: power_of_ten(k)))


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
