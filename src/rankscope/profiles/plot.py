"""A profile as a figure: one line per variant, its floor, and hollow marks where it is only noise."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rankscope.figures import FAINT, INK, MARKERS, PALETTE, label, panels, tick
from rankscope.metrics import symbol_of
from rankscope.profiles.lines import Curve, by_sample, extent, log_floor, looks, mean
from rankscope.profiles.profile import Profile

DEEP = 40
"""Decades over which the axis of powers of ten becomes logarithmic itself."""


def plot_profile(profile: Profile, metric: str, log: bool | None = None) -> Figure:
    """The metric by layer. `log=None` takes a log axis where the values span over two decades."""
    figure, (axes,) = panels()
    draw_profile(axes, profile, metric, log)
    return figure


def draw_profile(axes: Axes, profile: Profile, metric: str, log: bool | None = None) -> None:
    """Draw into given axes: the mean over samples (on a log axis the geometric mean), and their range.

    A log axis has the powers of ten as its numbers, so that 1e-4000 can be drawn; where they span over
    `DEEP` decades it is logarithmic in them, and a doubly exponential fall is a straight line.
    """
    logs = {line: by_sample(profile, metric, "log10", line) for line in profile.lines(metric)}
    known = np.concatenate([curve[np.isfinite(curve)] for curve in logs.values()])
    span = float(np.ptp(known)) if len(known) else 0.0
    log = span > 2 if log is None else log
    for number, (line, curve) in zip(looks(profile, metric), logs.items(), strict=True):
        drawn = curve if log else by_sample(profile, metric, "value", line)
        noise = profile.at_floor(metric, variant=line[0], arithmetic=line[1]).numpy()
        name = line[0] if len(profile.arithmetics) == 1 else f"{line[0]}, {line[1]}"
        _line(axes, drawn, noise, number, name)
    if log:
        draw_floors(axes, {line: log_floor(profile, metric, line) for line in logs})
    dress(axes, metric, span if log else None)


def dress(axes: Axes, metric: str, span: float | None) -> None:
    """Name the axes. `span` is how many decades a log axis shows, None for a linear one."""
    if span is None:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    else:
        if span > DEEP:
            axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_xlabel("layer")
    axes.set_ylabel(f"${symbol_of(metric, tex=True)}$")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=9, frameon=False)


def draw_arithmetics(fall: Axes, slope: Axes, profile: Profile, metric: str, variant: str) -> None:
    """Arithmetics side by side: how many digits the metric has lost, and the ratio of its log from layer to
    layer. Under the doubly exponential law the first grows as 3^l and the second tends to 3."""
    for number, (name, arithmetic) in enumerate(profile.lines(metric)):
        if name != variant:
            continue
        curve = by_sample(profile, metric, "log10", (name, arithmetic))
        noise = profile.at_floor(metric, variant=name, arithmetic=arithmetic).numpy()
        lost = np.where(curve < 0, -curve, np.nan)
        _line(fall, lost, noise, number, arithmetic, middle=lambda c: 10 ** mean(np.log10(c)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where((lost[:, 1:] > 0) & (lost[:, :-1] > 0.5), lost[:, 1:] / lost[:, :-1], np.nan)
        first = np.full((len(ratio), 1), np.nan)
        _line(slope, np.concatenate([first, ratio], 1), noise, number, arithmetic)
    fall.set_yscale("log")
    tex = symbol_of(metric, tex=True)
    fall.set_ylabel(f"$-\\log_{{10}}\\,{tex}$")
    slope.set_ylabel("$\\log r_l\\,/\\,\\log r_{l-1}$,  $r_l$ the value at layer $l$")
    slope.axhline(3.0, color=FAINT, linewidth=1.0, linestyle="--")
    slope.annotate("3", (0, 3.0), xytext=(3, 3), textcoords="offset points", color=INK)
    slope.set_ylim(0, 6)
    for axes in (fall, slope):
        axes.set_xlabel("layer $l$")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    fall.legend(fontsize=9, title=label(variant), frameon=False)


def _line(
    axes: Axes,
    curve: Curve,
    noise: np.ndarray,
    number: int,
    name: str,
    middle: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    trace(axes, (middle or mean)(curve), noise, number, name)
    if len(curve) > 1:
        band(axes, *extent(curve), number, 0.15)


def trace(axes: Axes, centre: np.ndarray, noise: np.ndarray, number: int, name: str) -> None:
    """A line by layer; where it is only noise it is hollow."""
    turned = number + number // len(PALETTE)  # colours come again, each time with another mark
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[turned % len(MARKERS)]
    layers = np.arange(len(centre))
    axes.plot(layers, np.where(noise, np.nan, centre), color=colour, linewidth=1.8, label=label(name),
              marker=marker, markersize=5)  # fmt: skip
    # Into the noise, and within it: thin and dotted, with hollow marks.
    tail = noise | np.roll(noise, -1) & (layers < len(layers) - 1)
    axes.plot(layers, np.where(tail, centre, np.nan), color=colour, linewidth=0.9, linestyle=":")
    axes.plot(layers[noise], centre[noise], linestyle="none", color=colour, marker=marker, markersize=4,
              markerfacecolor="white", zorder=3)  # fmt: skip


def band(axes: Axes, low: np.ndarray, high: np.ndarray, number: int, strength: float) -> None:
    """What lies about a line, in its colour."""
    colour = PALETTE[number % len(PALETTE)]
    axes.fill_between(np.arange(len(low)), low, high, color=colour, alpha=strength, linewidth=0)


def draw_floors(axes: Axes, floors: Mapping[tuple[str, str], np.ndarray]) -> None:
    """log10 of each floor by layer, once: ratios have one per arithmetic, absolute values one per variant."""
    drawn: set[tuple[str, bytes]] = set()
    named: set[str] = set()
    for (_, arithmetic), floor in floors.items():
        key = (arithmetic, floor.round(6).tobytes())
        if np.isfinite(floor).any() and key not in drawn:
            name = None if arithmetic in named else f"floor of {arithmetic}"
            axes.plot(floor, color=FAINT, linestyle=":", linewidth=1.2, label=name, zorder=1)
            drawn.add(key)
            named.add(arithmetic)
