"""What becomes of the tokens, in words: the curve of a residual as a sentence, and several side by side.

Terminal, report and explorer say it from here, so that they cannot disagree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from rankscope.figures.text import power
from rankscope.metrics import is_share
from rankscope.profiles.views import CurveView, digits_lost, since

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""
STAYS = {"apart": "stay apart", "closing": "are nearly the same, though not uniform"}
NAMED = 8
"""Networks that a sentence names, at most."""
LISTED = {
    "apart": "tokens stay apart",
    "closing": "tokens are nearly the same",
    "uniform": "tokens are the same",
    "hidden": "tokens are as close as can be told",
    "broken": "there is no number, for an overflow or a NaN,",
}


@dataclass(frozen=True)
class Ending:
    """What becomes of the tokens of one variant."""

    group: str
    """apart, closing, uniform; hidden: below a floor that lies above the threshold; broken: no number."""
    layer: int
    """uniform: the layer from which on it is below the threshold; broken: the first without a number."""
    there: str
    """The number at that layer, or the floor that it lies beneath."""
    end: str
    """The number at the last layer, or from where on it is noise."""
    depth: int
    """The last layer."""
    arithmetic: str

    @property
    def uniform(self) -> str:
        """How uniform, and by which layer."""
        if self.layer == self.depth:
            return f"uniform to {self.there} at layer {self.depth}"
        if self.end.endswith(f" from layer {self.layer}"):
            return f"uniform to {self.there} from layer {self.layer}"
        return f"uniform to {self.there} by layer {self.layer} and {self.at_end}"

    @property
    def at_end(self) -> str:
        """What it comes to, to follow "uniform"."""
        return self.end if "from layer" in self.end else f"to {self.end} at layer {self.depth}"

    @property
    def said(self) -> str:
        """A sentence, but for its full stop."""
        if self.group == "broken":
            return f"There is no number from layer {self.layer} on: an overflow, or a NaN in what was given"
        if self.group == "hidden":
            return (
                f"Tokens come as close as {self.arithmetic} can tell: {self.end}. A finer arithmetic can see "
                "further"
            )
        if self.group == "uniform" and self.layer == 0:
            return "Tokens are the same from the input on: there is nothing to hold apart"
        if self.group == "uniform":
            return f"Tokens become the same: {self.uniform}"
        return f"Tokens {STAYS[self.group]} ({self.end} of their size at layer {self.depth})"


def ending(curve: CurveView, threshold: float = UNIFORM) -> Ending:
    """What a curve of a relative residual comes to."""
    logs, depth, last, low = curve.log10, curve.depth, float(curve.log10[-1]), math.log10(threshold)

    def found(group: str, layer: int, there: str, end: str) -> Ending:
        return Ending(group, layer, there, end, depth, curve.arithmetic)

    if math.isnan(last):
        broken = since(logs != logs) or 0
        return found("broken", broken, "–", f"no number from layer {broken}")
    end = power(last)
    if curve.floor_from is not None:
        what = "rounding noise" if curve.arithmetic == "deviation" else f"at {curve.arithmetic}'s floor"
        end = f"{what} from layer {curve.floor_from}"
        if curve.floor[-1] > low:
            return found("hidden", depth, end, end)
    below = curve.uniform_from(threshold)
    if below is None:
        return found("apart" if last > math.log10(APART) else "closing", depth, end, end)
    there = f"{curve.arithmetic}'s floor" if curve.noise[below] else power(float(logs[below]))
    return found("uniform", below, there, end)


def sentence(curve: CurveView) -> str:
    """What becomes of the tokens of one network; where each layer cubes the difference, that too."""
    found = ending(curve)
    lost, ratios = digits_lost(curve)
    last = ratios[(lost > 1) & ~curve.noise & (ratios == ratios)][-2:]
    cubes = found.group == "uniform" and len(last) and ((last > 2.6) & (last < 3.6)).all()
    return f"{found.said}{': each layer cubes the difference' if cubes else ''}."


def listing(curves: Sequence[CurveView], threshold: float = UNIFORM) -> str:
    """Which networks keep their tokens apart, which make them the same, and by which layer: those first that
    keep them apart longest."""
    if not is_share(curves[0].metric):
        return _largest(curves)
    depths = {curve.depth for curve in curves}
    groups: dict[str, dict[str, list[str]]] = {group: {} for group in LISTED}
    for curve in sorted(curves, key=lambda each: (-(each.uniform_from(threshold) or 0), -each.log10[-1])):
        found = ending(curve, threshold)
        below = f"below {threshold:g} from layer {found.layer}, " if found.group == "uniform" else ""
        of = f" at layer {found.depth}" if len(depths) > 1 and "from layer" not in found.end else ""
        groups[found.group].setdefault(f"{below}{found.end}{of}", []).append(curve.name)
    listed = "; ".join(f"{LISTED[group]} in {_named(found)}" for group, found in groups.items() if found)
    return f"{f'At layer {depths.pop()}' if len(depths) == 1 else 'At the last layer of each'} {listed}."


def _named(found: Mapping[str, Sequence[str]]) -> str:
    """Which networks, each with what is said of it; of many the first and the last."""
    number, (first, *_, last) = sum(map(len, found.values())), [*found.items(), *found.items()]
    if number <= NAMED:
        return ", ".join(f"{', '.join(names)} ({said})" for said, names in found.items())
    return f"{number} networks, from {first[1][0]} ({first[0]}) to {last[1][-1]} ({last[0]})"


def _largest(curves: Sequence[CurveView]) -> str:
    """Of a metric that is no share: where it ends largest, and where smallest."""
    ends = {curve.name: float(curve.log10[-1]) for curve in curves}
    known = sorted((log, name) for name, log in ends.items() if log == log)
    lost = [name for name, log in ends.items() if log != log]
    broken = f" T{LISTED['broken'][1:]} in {', '.join(lost)}." if lost else ""
    if not known:
        return broken.strip()
    (low, least), (high, most) = known[0], known[-1]
    said = f"At the last layer {curves[0].metric} is {power(high)} in {most}"
    if len(known) > 1:
        said = f"At the last layer {curves[0].metric} is largest in {most} ({power(high)}) and smallest in "
        said += f"{least} ({power(low)})"
    return f"{said}.{broken}"


def agreement(table: pl.DataFrame, confirm: bool = False) -> list[str]:
    """What a second pass said of the readings, in a sentence; nothing where all is well and nobody asked."""
    seen = table.drop_nulls("digits")
    marked, least = int(seen["below_floor"].sum()), seen["digits"].min()
    if not len(seen) or not isinstance(least, float):
        return []
    of_all = f"{marked} of {len(seen)} readings {'is' if marked == 1 else 'are'} marked"
    if confirm:
        enough = int((seen["digits"] >= 9).sum())
        rest = f"; {of_all}, since 32 digits are not enough for them" if marked else ""
        return [
            f"In doubled precision {enough} of {len(seen)} readings agree with float64's to nine digits or "
            f"more, the least to {least:.0f}; those of doubled precision are shown{rest}."
        ]
    if not marked:
        return []
    return [
        f"{of_all}: a second pass, rounded otherwise, does not agree on them; --confirm may resolve them."
    ]
