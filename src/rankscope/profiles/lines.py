"""What a figure draws of a metric, whoever draws it: a line by layer, what lies about it, and its floor."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rankscope.figures import numbered
from rankscope.profiles.profile import Profile
from rankscope.profiles.statistics import QUANTILES
from rankscope.profiles.summary import Summary

Curve = Float[np.ndarray, "sample layer"]


@dataclass(frozen=True, eq=False)
class Line:
    """One variant in one arithmetic, by layer."""

    variant: str
    arithmetic: str
    label: str
    centre: np.ndarray
    """The mean over samples (of logs: the geometric mean); of a corpus the median."""
    bands: list[tuple[np.ndarray, np.ndarray]]
    """What lies about it, the widest first: the range of samples, or of a corpus nine tenths and a half."""
    noise: np.ndarray
    """True where it is only rounding noise."""
    floor: np.ndarray
    """log10 of the floor, NaN where there is none."""


def lines_of(measured: Profile | Summary, metric: str, log: bool) -> list[Line]:
    """A line for each variant and arithmetic: of the metric, or with `log` of its log10."""
    found = []
    for variant, arithmetic in measured.lines(metric):
        name = (variant, arithmetic)
        noise = measured.at_floor(metric, variant=variant, arithmetic=arithmetic).numpy()
        label = variant if len(measured.arithmetics) == 1 else f"{variant}, {arithmetic}"
        if isinstance(measured, Summary):
            floor = summary_floor(measured, metric, name)
            of = summary_quantiles(measured, metric, name, log)
            centre = np.where(np.isfinite(of["q50"]), of["q50"], np.nan)
            bands = [(of["q05"], of["q95"]), (of["q25"], of["q75"])]
        else:
            floor = log_floor(measured, metric, name)
            curve = by_sample(measured, metric, "log10" if log else "value", name)
            centre, bands = mean(curve), [extent(curve)] if len(curve) > 1 else []
        found.append(Line(variant, arithmetic, label, centre, bands, noise, floor))
    return found


def looks(measured: Profile | Summary, metric: str) -> list[int]:
    """The number of the look of each line: by its variant, or in order where an arithmetic tells them
    apart."""
    lines = measured.lines(metric)
    if len(measured.arithmetics) > 1:
        return list(range(len(lines)))
    of = numbered(variant for variant, _ in lines)
    return [of[variant] for variant, _ in lines]


def by_sample(profile: Profile, metric: str, column: str, line: tuple[str, str]) -> Curve:
    """[sample, layer]; heads count as samples. A zero beneath a floor has the floor's log."""
    curve = profile.curve(metric, column, variant=line[0], arithmetic=line[1]).numpy()
    if column == "log10":
        floor = profile.curve(metric, "floor", variant=line[0], arithmetic=line[1]).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            curve = np.where(np.isneginf(curve) & (floor > 0), np.log10(floor), curve)
    return curve if curve.ndim == 2 else curve.transpose(0, 2, 1).reshape(-1, curve.shape[1])


def log_floor(profile: Profile, metric: str, line: tuple[str, str]) -> np.ndarray:
    """log10 of the floor by layer, mean over samples; NaN where there is none."""
    floor = by_sample(profile, metric, "floor", line)
    return mean(np.log10(np.where(floor > 0, floor, np.nan)))


def summary_floor(summary: Summary, metric: str, line: tuple[str, str]) -> np.ndarray:
    """The same of a corpus."""
    floor = _curve(summary, metric, "floor", line)
    return np.log10(np.where(floor > 0, floor, np.nan))


def summary_quantiles(
    summary: Summary, metric: str, line: tuple[str, str], log: bool
) -> dict[str, np.ndarray]:
    """By name. Of log10 a zero beneath a floor has the floor's; one without a floor has none."""
    if not log:
        return {name: _curve(summary, metric, name, line) for name in QUANTILES}
    floor = summary_floor(summary, metric, line)
    logs = {name: _curve(summary, metric, f"log10_{name}", line) for name in QUANTILES}
    return {name: np.where(np.isneginf(curve), floor, curve) for name, curve in logs.items()}


def mean(curve: Curve) -> np.ndarray:
    """Mean over samples that have a finite value; NaN where none has."""
    there = np.isfinite(curve)
    total = np.where(there, curve, 0.0).sum(0)
    return np.divide(total, there.sum(0), out=np.full(curve.shape[1], np.nan), where=there.any(0))


def extent(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest over samples."""
    there = np.isfinite(curve)
    low = np.where(there, curve, np.inf).min(0)
    high = np.where(there, curve, -np.inf).max(0)
    return np.where(there.any(0), low, np.nan), np.where(there.any(0), high, np.nan)


def _curve(summary: Summary, metric: str, column: str, line: tuple[str, str]) -> np.ndarray:
    return summary.curve(metric, column, variant=line[0], arithmetic=line[1]).numpy()
