"""`CurveView`: one variant in one arithmetic by layer, as every output shows it.

Made by `Profile` (`of_samples`) and `Summary` (`of_quantiles`); `verdict.py` puts it into words, and
`figures.py` and the terminal draw it.

The centre of a profile is the mean over samples and heads, of logs the geometric mean; of a corpus it is the
median. A value of exactly zero has no log: it is left out of the geometric mean, and `left_out` counts it;
where all are zero, so is the mean. "At the floor from k" means from layer k on to the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankscope.figures import numbered

Layers = np.ndarray  # a number for each layer, layer 0 the input
Band = tuple[Layers, Layers]


@dataclass(frozen=True, eq=False)
class CurveView:
    """One variant in one arithmetic, by layer."""

    metric: str
    variant: str
    arithmetic: str
    label: str  # the variant, and its arithmetic where there are several
    statistic: str  # what the centre is, in words
    log10: Layers  # the centre of logs: -inf where all values are zero, NaN where there is none
    value: Layers
    log10_bands: list[Band]
    """What lies about it, the widest first: the range of samples, or of a corpus nine tenths and a half."""
    value_bands: list[Band]
    noise: Layers  # True where it is only rounding noise
    floor: Layers  # log10 of the floor, NaN where there is none
    left_out: Layers  # values of exactly zero among others, of which the geometric mean is taken
    values: int  # samples, and heads of each, at a layer

    @property
    def name(self) -> str:
        """The variant as a sentence names it, with its arithmetic where there are several."""
        return self.variant if self.label == self.variant else f"{self.variant} in {self.arithmetic}"

    @property
    def depth(self) -> int:
        """The index of the last layer."""
        return len(self.log10) - 1

    @property
    def first(self) -> int:
        """The first layer that has a number: there is no attention at layer 0."""
        return int(np.argmax(~np.isnan(self.log10)))

    @property
    def ends(self) -> list[float]:
        """log10 at the first layer, in the middle and at the last."""
        middle = (self.first + len(self.log10)) // 2
        return [float(self.log10[layer]) for layer in (self.first, middle, self.depth)]

    @property
    def floor_from(self) -> int | None:
        """The layer from which on it is noise to the last; None where it ends above its floor."""
        return since(self.noise)

    def uniform_from(self, threshold: float) -> int | None:
        """The layer from which on it stays at or below the threshold; None where it ends above it."""
        return since(self.log10 <= np.log10(threshold))

    def on_axis(self, log: bool) -> tuple[Layers, list[Band]]:
        """Centre and bands as an axis can show them. A log axis has no zero: it is drawn at its floor."""
        if not log:
            return self.value, self.value_bands

        def shown(logs: Layers) -> Layers:
            return np.where(np.isposinf(logs), np.nan, np.where(np.isneginf(logs), self.floor, logs))

        return shown(self.log10), [(shown(low), shown(high)) for low, high in self.log10_bands]


class LineName(NamedTuple):
    """What a line is of, and its label: the first fields of a `CurveView`."""

    metric: str
    variant: str
    arithmetic: str
    label: str


def of_samples(line: LineName, columns: Mapping[str, np.ndarray], noise: Layers) -> CurveView:
    """The view of a profile's line. `columns` are `log10`, `value` and `floor`, each `[sample, layer]` or
    `[sample, layer, head]`; `noise` says by layer whether all values are rounding noise."""
    flat = {name: np.moveaxis(values, 1, 0).reshape(values.shape[1], -1) for name, values in columns.items()}
    logs, values, floor = flat["log10"], flat["value"], flat["floor"]
    zero = np.isneginf(logs)
    with np.errstate(divide="ignore"):
        floors = mean(np.log10(np.where(floor > 0, floor, np.nan)))
    several = logs.shape[1] > 1
    return CurveView(*line,
        f"geometric mean over samples{' and heads' * (columns['log10'].ndim == 3)}",
        geometric(logs), mean(values), [extent(logs)] if several else [], [extent(values)] if several else [],
        noise, floors, np.where((zero | np.isnan(logs)).all(1), 0, zero.sum(1)), logs.shape[1])  # fmt: skip


def of_quantiles(line: LineName, columns: Mapping[str, Layers], noise: Layers, excerpts: int) -> CurveView:
    """The view of a summary's line. `columns` are quantiles of values and of their logs (zeros are -inf), and
    `floor`; `noise` says by layer whether the median is rounding noise."""
    log10_bands, value_bands = (
        [(columns[f"{of}q05"], columns[f"{of}q95"]), (columns[f"{of}q25"], columns[f"{of}q75"])]
        for of in ("log10_", "")
    )
    floor = np.log10(np.where(columns["floor"] > 0, columns["floor"], np.nan))
    return CurveView(
        *line, f"median of {excerpts} excerpt{'s' * (excerpts != 1)}",
        columns["log10_q50"], columns["q50"], log10_bands, value_bands, noise, floor,
        np.zeros(len(floor), int), excerpts)  # fmt: skip


def geometric(logs: np.ndarray) -> Layers:
    """The mean over the last axis of the logs there are; -inf where all values are zero, NaN without any."""
    zero = np.isneginf(logs)
    centre = mean(np.where(zero, np.nan, logs))
    return np.where(np.isnan(centre) & zero.any(-1), -np.inf, centre)


def mean(values: np.ndarray) -> Layers:
    """Over the last axis, of those that are numbers; NaN where none is."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(-1)
    return np.divide(total, known.sum(-1), out=np.full(total.shape, np.nan), where=known.any(-1))


def extent(values: np.ndarray) -> Band:
    """The least and the largest finite value over the last axis."""
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf).min(-1), np.where(finite, values, -np.inf).max(-1)
    return np.where(finite.any(-1), low, np.nan), np.where(finite.any(-1), high, np.nan)


def since(true: Sequence[bool] | np.ndarray) -> int | None:
    """From where on to the end all are true; None where the last is not.

    >>> since([True, False, True, True]), since([True, False])
    (2, None)
    """
    false = np.flatnonzero(~np.asarray(true, dtype=bool))
    start = int(false[-1]) + 1 if len(false) else 0
    return start if start < len(true) else None


def span(curves: Sequence[CurveView]) -> float:
    """Decades between the least and the largest that is drawn on a log axis."""
    shown = [curve.on_axis(True) for curve in curves]
    parts = [[centre, *(side for band in bands for side in band)] for centre, bands in shown]
    known = np.concatenate([np.zeros(0), *(np.ravel(part) for part in parts)])
    known = known[np.isfinite(known)]
    return float(np.ptp(known)) if len(known) else 0.0


def digits_lost(curve: CurveView) -> tuple[Layers, Layers]:
    """-log10 where that is positive, and its ratio from layer to layer: 3 where each cubes a residual."""
    logs = curve.on_axis(True)[0]
    lost = np.where(logs < 0, -logs, np.nan)
    ratio = np.full(len(lost), np.nan)
    np.divide(lost[1:], lost[:-1], out=ratio[1:], where=lost[:-1] > 0.5)
    return lost, ratio


def zeros_note(curves: Sequence[CurveView]) -> str:
    """A sentence on values left out of geometric means; empty where none are."""
    most = {curve.name: f"{curve.left_out.max()} of {curve.values}" for curve in curves if curve.left_out.any()}
    if not most:
        return ""
    listed = ", ".join(f"{count} values of {name}" for name, count in most.items())
    return f"Exactly zero, and so left out of the geometric mean: {listed}."


def line_numbers(curves: Sequence[CurveView]) -> list[int]:
    """The number of each line, which its colour and marker follow: by variant, or in order where arithmetics differ."""
    if len({curve.arithmetic for curve in curves}) > 1:
        return list(range(len(curves)))
    of = numbered(curve.variant for curve in curves)
    return [of[curve.variant] for curve in curves]
