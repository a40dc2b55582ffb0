"""Bounds and measurement in one figure: a panel per quantity, what is guaranteed drawn to where it holds."""

import math

import numpy as np
import polars as pl

from rankscope.errors import TheoremError
from rankscope.figures.matplotlib import Axes, AxesLike, Figure, FuncFormatter, MaxNLocator, panels, styled
from rankscope.figures.style import FAINT, INK, MARKERS, PALETTE
from rankscope.figures.text import label, tick
from rankscope.theory.views import DepthView, plotted_quantities, quantity

DEEP = 40
"""Decades over which the axis of powers of ten becomes logarithmic itself."""
LOWEST = -1e300
"""Bounds of fewer decades are drawn here: an axis has no numbers beyond."""


@styled
def plot_certificates(
    every: pl.DataFrame,
    sample: int = 0,
    ax: AxesLike | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """By layer, on an axis of powers of ten: the measurement in black, tokens' own size grey, upper bounds
    solid, lower bounds dashed; open marks where a bound is vacuous, and no line where its hypotheses fail."""
    samples = every["sample"].unique().to_list()
    if sample not in samples:
        raise TheoremError(f"sample must lie in 0..{len(samples) - 1}; got {sample}")
    table = every.filter(sample=sample)
    shown = plotted_quantities(table)
    if not shown:
        raise TheoremError("a figure needs a bound of residual, mu or diameter; ranks alone were certified")
    figure, axes = panels(len(shown), width=5.8, height=4.4, ax=ax, figsize=figsize)
    number = 0
    for each, name in zip(axes, shown, strict=True):
        number = _panel(each, table.filter(quantity=name), name, number)
    return figure


@styled
def plot_depth(
    depth: DepthView, ax: AxesLike | None = None, figsize: tuple[float, float] | None = None
) -> Figure:
    """A line per theorem that proves something of every sample: blue to the right from where tokens are
    proved uniform, red up to where that is excluded; dotted, where each sample is measured to be uniform."""
    proved, measured = depth.proved, sorted({layer for layer in depth.measured if layer is not None})
    end = max([layer for *_, layer in proved] + measured, default=1) + 1
    figure, (axes,) = panels(height=1.3 + 0.32 * max(len(proved), 1), ax=ax, figsize=figsize)
    for place, (_, kind, layer) in enumerate(proved):
        start, stop = (layer, end) if kind == "upper" else (0, layer)
        axes.barh(place, stop - start, left=start, height=0.5, color=PALETTE[0 if kind == "upper" else 1])
    for layer in measured:
        axes.axvline(layer, color=INK, linestyle=":", linewidth=1.6)
    axes.plot([], [], color=INK, linestyle=":", label="measured uniform")
    for number, said in ((0, "proved uniform"), (1, "proved apart")):
        axes.barh([0], [0], color=PALETTE[number], label=said)
    axes.set_yticks(range(len(proved)), [label(name) for name, _, _ in proved])
    axes.invert_yaxis()
    axes.set(xlabel="layer", xlim=(0, end))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", visible=False)
    if ax is None:
        figure.legend(loc="outside upper left", ncols=3, fontsize=8)
    else:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=8)
    return figure


def _panel(axes: Axes, table: pl.DataFrame, bounded: str, number: int) -> int:
    one = table.filter(theorem=table["theorem"][0]).sort("layer")
    layers = one["layer"].to_numpy()
    lines = [_log(one["log10_measured"]), _log(one["log10_size"])]
    axes.plot(layers, lines[1], color=FAINT, linestyle=":", linewidth=1.4, label="tokens' own size")
    for name in table["theorem"].unique(maintain_order=True):
        rows = table.filter(theorem=name).sort("layer")
        if not rows["met"].any():
            continue
        bound, vacuous = _log(rows["log10_bound"]), rows["vacuous"].to_numpy()
        colour, marker = PALETTE[number % 6], MARKERS[number % len(MARKERS)]
        style = "-" if rows["kind"][0] == "upper" else "--"
        axes.plot(layers, bound, color=colour, linestyle=style, linewidth=1.3, zorder=2)
        for empty in (False, True):
            here = vacuous == empty
            axes.plot(
                layers[here], bound[here], linestyle="none", marker=marker, markersize=4.5, color=colour,
                markerfacecolor="white" if empty else colour, zorder=3,
            )  # fmt: skip
        said = label(f"{name} (vacuous)" if vacuous[rows["met"].to_numpy()].all() else name)
        axes.plot([], [], color=colour, linestyle=style, marker=marker, markersize=4.5, label=said,
                  markerfacecolor="white" if "vacuous" in said else colour)  # fmt: skip
        lines.append(bound)
        number += 1
    axes.plot(
        layers, lines[0], color=INK, linewidth=2.2, marker="o", markersize=4, label="measured", zorder=4
    )
    _dress(axes, np.concatenate(lines), bounded)
    return number


def _dress(axes: Axes, values: np.ndarray, bounded: str) -> None:
    known = values[np.isfinite(values)]
    span = float(np.ptp(known)) if len(known) else 0.0
    if span > DEEP:
        axes.set_yscale("symlog", linthresh=1.0)
        low, high = (float(known.min()), float(known.max()))
        axes.set_ylim(_wider(low, -1), _wider(high, 1))
    narrow = span < 3
    axes.yaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{10**k:.3g}" if narrow else tick(k)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_title(quantity(bounded).tex, loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="best")


def _wider(log10: float, side: int) -> float:
    """A limit of a symlog axis a little beyond a value."""
    if abs(log10) <= 1:
        return log10 + 0.5 * side
    room = 1.6 * abs(log10) ** 0.02  # the longer the axis, the larger a factor is a little
    return log10 * (room if log10 * side > 0 else 1 / room)


def _log(column: pl.Series) -> np.ndarray:
    """log10 by layer, NaN where there is none or it is infinite."""
    values = np.array([math.nan if each is None else each for each in column.to_list()], dtype=float)
    return np.where(np.isfinite(values), np.maximum(values, LOWEST), np.nan)
