"""Figures of a decomposition: which lengths carry the output, and what each head does."""

from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import polars as pl

from rankscope.figures.matplotlib import Axes, AxesLike, Figure, panels, styled
from rankscope.figures.style import FAINT, INK, PALETTE
from rankscope.paths.views import LengthView, head_means, length_views

SHOWN = {"embedding": PALETTE[0], "bias": PALETTE[4]}
SAID = {"embedding": "from the embedding", "bias": "from biases"}


@styled
def plot_lengths(
    table: pl.DataFrame, ax: AxesLike | None = None, figsize: tuple[float, float] | None = None
) -> Figure:
    """Left: the share of the output by length, apart by where paths start, with the number of paths. Right:
    the relative residual of the sum of each length's terms; dots are samples, hollow where they are noise."""
    figure, (left, right) = panels(2, ax=ax, figsize=figsize)
    lengths = length_views(table)
    _shares(left, lengths)
    _residuals(right, table, lengths)
    return figure


@styled
def plot_heads(by_head: pl.DataFrame) -> Figure:
    """Layer by head: what share of the output passes through each, and by how much each contracts."""
    figure, axes = panels(2, width=5.4)
    titles = {"share": "share of the output", "contraction": r"contraction, $\mu(P_h Z W_h)\,/\,\mu(Z)$"}
    means = head_means(by_head)
    layers, heads = means["layer"].n_unique(), means["head"].n_unique()
    for each, (column, title) in zip(axes, titles.items(), strict=True):
        grid = means[column].to_numpy().reshape(layers, heads)
        signed = column == "share"
        seen = np.abs(grid[np.isfinite(grid)])
        limit = float(seen.max(initial=0.0)) or 1.0
        image = each.imshow(
            grid, aspect="auto", origin="lower", cmap="RdBu_r" if signed else "viridis",
            vmin=-limit if signed else 0.0, vmax=limit,
        )  # fmt: skip
        each.set(title=title, xlabel="head", ylabel="layer")
        each.set_xticks(range(0, heads, max(1, heads // 12)))
        each.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
        each.grid(False)
        figure.colorbar(image, ax=each, shrink=0.9)
    return figure


def _shares(axes: Axes, lengths: Sequence[LengthView]) -> None:
    at = np.arange(len(lengths))
    biased = any(each.bias_norm > 0 for each in lengths)
    shares = {"embedding": [each.share for each in lengths], "bias": [each.from_biases for each in lengths]}
    starts = ["embedding", "bias"] if biased else ["embedding"]
    width = 0.8 / len(starts)
    for place, start in enumerate(starts):
        middle = at + (place - (len(starts) - 1) / 2) * width
        name = SAID[start] if biased else None
        axes.bar(middle, shares[start], width, color=SHOWN[start], label=name, zorder=2)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set(xlabel="length of the path (heads in it)", ylabel="share of the output")
    axes.set_xticks(_thinned(at))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.16 * (high - low))
    for length in _thinned(at):
        axes.annotate(
            _count(lengths[length].paths), (float(length), 1.0), xycoords=("data", "axes fraction"),
            ha="center", va="top", fontsize=7, color=INK, rotation=0,
        )  # fmt: skip
    axes.set_title("number of paths above each length", fontsize=9, color=FAINT)
    if biased:
        axes.legend(loc="best")


def _residuals(axes: Axes, table: pl.DataFrame, lengths: Sequence[LengthView]) -> None:
    rows = table.filter((pl.col("start") == "embedding") & (pl.col("norm") > 0))
    for noise in (False, True):
        part = rows.filter(below_floor=noise)
        axes.scatter(
            part["length"], part["relative_residual"], s=22, zorder=2, edgecolors=PALETTE[0],
            facecolors="none" if noise else PALETTE[0], alpha=0.8,
        )  # fmt: skip
    there = [each for each in lengths if each.norm > 0]
    means = [10**each.log10_residual for each in there]
    axes.plot([each.length for each in there], means, color=PALETTE[0], linewidth=1.4)
    _log_if_wide(axes, rows["relative_residual"].to_numpy())
    axes.set(
        xlabel="length of the path (heads in it)",
        ylabel=r"$\|\mathrm{res}\,T\|_{1,\infty}\,/\,\|T\|_{1,\infty}$",
    )
    axes.set_title("relative residual of each length's sum T", fontsize=9, color=FAINT)
    axes.set_xticks(_thinned(np.arange(len(lengths))))


@styled
def plot_single(residuals: pl.DataFrame) -> Figure:
    """The relative residual of single paths against their length; hollow where it is noise."""
    figure, (axes,) = panels()
    arithmetic = residuals["arithmetic"][0]
    for noise in (False, True):
        part = residuals.filter(pl.col("log10").is_finite(), below_floor=noise)
        axes.scatter(
            part["length"], part["log10"], s=14, zorder=2, edgecolors=PALETTE[1], alpha=0.6,
            facecolors="none" if noise else PALETTE[1],
        )  # fmt: skip
    middle = residuals.group_by("length").agg(pl.col("log10").median()).sort("length")
    axes.plot(middle["length"], middle["log10"], color=PALETTE[1], linewidth=1.4)
    ratio = r"$\log_{10}\,\|\mathrm{res}\,T\|_{1,\infty}\,/\,\|T\|_{1,\infty}$"
    axes.set(xlabel="length of the path (heads in it)", ylabel=ratio)
    axes.set_title(f"single paths, {arithmetic} arithmetic", fontsize=9, color=FAINT)
    axes.set_xticks(_thinned(np.arange(int(residuals["length"].to_numpy().max()) + 1)))
    return figure


def _log_if_wide(axes: Axes, values: np.ndarray) -> None:
    """A log axis where values span more than a decade; from zero where they do not."""
    known = values[values > 0]
    if len(known) and known.max() > 10 * known.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * float(values.max()) if len(values) else 1.0)


def _thinned(lengths: np.ndarray) -> list[int]:
    step = max(1, len(lengths) // 13)
    return [int(length) for length in lengths[::step]]


def _count(number: int) -> str:
    """A whole number in little room.

    >>> _count(144), _count(23298085122481)
    ('144', '2.3e13')
    """
    if number < 10**4:
        return str(number)
    return f"{Decimal(number):.1e}".replace("+", "")
