"""A profile as a figure: one line per variant, its floor, and hollow marks where it is only noise."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankscope.figures import FAINT, MARKERS, PALETTE, panels
from rankscope.metrics import metric as metric_named
from rankscope.profiles.profile import Profile


def plot_profile(profile: Profile, metric: str, log: bool | None = None) -> Figure:
    """The metric by layer. `log=None` takes a log axis where the values span over two decades."""
    figure, (axes,) = panels()
    draw_profile(axes, profile, metric, log)
    return figure


def draw_profile(axes: Axes, profile: Profile, metric: str, log: bool | None = None) -> None:
    """Draw into given axes: the mean over samples (on a log axis the geometric mean), and their range."""
    lines = [
        (variant, arithmetic)
        for variant in profile.variants
        for arithmetic in profile.arithmetics
        if len(profile.table.filter(variant=variant, arithmetic=arithmetic, metric=metric))
    ]
    if log is None:
        log = _wide(profile, metric)
    axes.set_yscale("log" if log else "linear")
    floors: dict[bytes, tuple[str, np.ndarray]] = {}
    for number, (variant, arithmetic) in enumerate(lines):
        value, floor = (
            _by_sample(profile.curve(metric, column, variant=variant, arithmetic=arithmetic).numpy())
            for column in ("value", "floor")
        )
        label = variant if len(profile.arithmetics) == 1 else f"{variant}, {arithmetic}"
        _line(axes, value, floor, number, label, log)
        mean = np.exp(_mean(np.log(np.where(floor > 0, floor, np.nan))))
        if log and np.isfinite(mean).any():
            # Ratios have one floor per arithmetic: draw it once.
            floors.setdefault(mean.round(25).tobytes(), (arithmetic, mean))
    named: set[str] = set()
    for arithmetic, floor in floors.values():
        name = None if arithmetic in named else f"floor of {arithmetic}"
        axes.plot(floor, color=FAINT, linestyle=":", linewidth=1.2, label=name, zorder=1)
        named.add(arithmetic)
    axes.set_xlabel("layer")
    axes.set_ylabel(f"${metric_named(metric).tex}$")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not log:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(fontsize=9)


def _line(axes: Axes, value: np.ndarray, floor: np.ndarray, number: int, label: str, log: bool) -> None:
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    shown = np.where(value > 0, value, np.nan) if log else value
    middle = np.exp(_mean(np.log(shown))) if log else _mean(shown)
    layers = np.arange(value.shape[1])
    noise = (value <= floor).any(0)
    axes.plot(layers, np.where(noise, np.nan, middle), color=colour, linewidth=1.8, label=label,
              marker=marker, markersize=5)  # fmt: skip
    # Into the noise, and within it: thin and dotted, with hollow marks.
    tail = noise | np.roll(noise, -1) & (layers < len(layers) - 1)
    axes.plot(layers, np.where(tail, middle, np.nan), color=colour, linewidth=0.9, linestyle=":")
    axes.plot(layers[noise], middle[noise], linestyle="none", color=colour, marker=marker, markersize=4,
              markerfacecolor="white", zorder=3)  # fmt: skip
    if len(value) > 1:
        axes.fill_between(layers, *_range(shown), color=colour, alpha=0.15, linewidth=0)


def _by_sample(curve: np.ndarray) -> np.ndarray:
    """[sample, layer]; heads count as samples."""
    return curve if curve.ndim == 2 else curve.transpose(0, 2, 1).reshape(-1, curve.shape[1])


def _mean(curve: np.ndarray) -> np.ndarray:
    """Mean over samples that have a value; NaN where none has."""
    there = np.isfinite(curve)
    total = np.where(there, curve, 0.0).sum(0)
    return np.divide(total, there.sum(0), out=np.full(curve.shape[1], np.nan), where=there.any(0))


def _range(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    there = np.isfinite(curve)
    low = np.where(there, curve, np.inf).min(0)
    high = np.where(there, curve, -np.inf).max(0)
    return np.where(there.any(0), low, np.nan), np.where(there.any(0), high, np.nan)


def _wide(profile: Profile, metric: str) -> bool:
    values = profile.table.filter(metric=metric)["value"].to_numpy()
    values = values[np.isfinite(values) & (values > 0)]
    return bool(len(values)) and bool(values.max() / values.min() > 100)
