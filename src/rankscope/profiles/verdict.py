"""What becomes of the tokens, in words: the curve of a residual as a sentence, and several side by side.

Called by the terminal, the report and the explorer, so that they cannot disagree: `sentence` of one curve,
`listing` and `disagreement` of several, `agreement` of a second pass. All start from `views.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import polars as pl

from rankscope.figures import power
from rankscope.metrics import direction_of, is_share
from rankscope.profiles.views import CurveView, digits_lost, since

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""
STAYS = {"apart": "stay apart", "closing": "are nearly the same, though not uniform"}
NAMED = 8  # networks that a sentence names, at most
LISTED = {
    "apart": "tokens stay apart",
    "closing": "tokens are nearly the same",
    "uniform": "tokens are the same",
    "hidden": "tokens are as close as can be told",
    "broken": "there is no number, for an overflow or a NaN,",
}

MARGIN = 0.02  # decades by which two values must differ for one to be larger: five per cent

Ends = Mapping[str, Mapping[str, float]]  # of each metric, log10 at the end of each network by name


@dataclass(frozen=True)
class Ending:
    """What becomes of the tokens of one variant."""

    group: str  # apart, closing, uniform; hidden: below a floor that lies above the threshold; broken: no number
    layer: int  # uniform: the layer from which on it is below the threshold; broken: the first without a number
    value: str  # the number at that layer, or the floor that it lies beneath
    end: str  # the number at the last layer, or from where on it is noise
    depth: int  # the last layer
    arithmetic: str

    @property
    def uniform(self) -> str:
        """How uniform, and by which layer."""
        if self.layer == self.depth:
            return f"uniform to {self.value} at layer {self.depth}"
        if self.end.endswith(f" from layer {self.layer}"):
            return f"uniform to {self.value} from layer {self.layer}"
        return f"uniform to {self.value} by layer {self.layer} and {self.at_end}"

    @property
    def at_end(self) -> str:
        """The number at the end, in words that follow "uniform"."""
        return self.end if "from layer" in self.end else f"to {self.end} at layer {self.depth}"

    @property
    def sentence(self) -> str:
        """The ending in a sentence, but for its full stop."""
        if self.group == "broken":
            return f"There is no number from layer {self.layer} on: an overflow, or a NaN in what was given"
        if self.group == "hidden":
            return f"Tokens come as close as {self.arithmetic} can tell: {self.end}. A finer arithmetic can see further"
        if self.group == "uniform" and self.layer == 0:
            return "Tokens are the same from the input on: there is nothing to hold apart"
        if self.group == "uniform":
            return f"Tokens become the same: {self.uniform}"
        return f"Tokens {STAYS[self.group]} ({self.end} of their size at layer {self.depth})"


def ending(curve: CurveView, threshold: float = UNIFORM) -> Ending:
    """What a curve of a relative residual comes to."""
    logs, depth, last, low = curve.log10, curve.depth, float(curve.log10[-1]), math.log10(threshold)

    def of(group: str, layer: int, value: str, end: str) -> Ending:
        return Ending(group, layer, value, end, depth, curve.arithmetic)

    if math.isnan(last):
        broken = since(logs != logs) or 0
        return of("broken", broken, "–", f"no number from layer {broken}")
    end = power(last)
    if curve.floor_from is not None:
        what = "rounding noise" if curve.arithmetic == "deviation" else f"at {curve.arithmetic}'s floor"
        end = f"{what} from layer {curve.floor_from}"
        if curve.floor[-1] > low:
            return of("hidden", depth, end, end)
    below = curve.uniform_from(threshold)
    if below is None:
        return of("apart" if last > math.log10(APART) else "closing", depth, end, end)
    value = f"{curve.arithmetic}'s floor" if curve.noise[below] else power(float(logs[below]))
    return of("uniform", below, value, end)


def sentence(curve: CurveView) -> str:
    """What becomes of the tokens of one network; where each layer cubes the difference, that too."""
    end = ending(curve)
    lost, ratios = digits_lost(curve)
    last = ratios[(lost > 1) & ~curve.noise & (ratios == ratios)][-2:]
    cubes = end.group == "uniform" and len(last) and ((last > 2.6) & (last < 3.6)).all()
    return f"{end.sentence}{': each layer cubes the difference' if cubes else ''}."


def listing(curves: Sequence[CurveView], threshold: float = UNIFORM) -> str:
    """Which networks keep tokens apart, which make them the same, and by which layer; the longest apart come first."""
    if not is_share(curves[0].metric):
        return _largest(curves)
    depths = {curve.depth for curve in curves}
    groups: dict[str, dict[str, list[str]]] = {group: {} for group in LISTED}
    for curve in sorted(curves, key=lambda c: (-(c.uniform_from(threshold) or 0), -c.log10[-1])):
        end = ending(curve, threshold)
        below = f"below {threshold:g} from layer {end.layer}, " if end.group == "uniform" else ""
        where = f" at layer {end.depth}" if len(depths) > 1 and "from layer" not in end.end else ""
        groups[end.group].setdefault(f"{below}{end.end}{where}", []).append(curve.name)
    listed = "; ".join(f"{LISTED[group]} in {_named(ends)}" for group, ends in groups.items() if ends)
    return f"{f'At layer {depths.pop()}' if len(depths) == 1 else 'At the last layer of each'} {listed}."


def _named(ends: Mapping[str, Sequence[str]]) -> str:
    """Networks by how they end, each with its ending; of many the first and the last."""
    count, (first, *_, last) = sum(map(len, ends.values())), [*ends.items(), *ends.items()]
    if count <= NAMED:
        return ", ".join(f"{', '.join(names)} ({end})" for end, names in ends.items())
    return f"{count} networks, from {first[1][0]} ({first[0]}) to {last[1][-1]} ({last[0]})"


def _largest(curves: Sequence[CurveView]) -> str:
    """Of a metric that is no share: where it ends largest, and where smallest."""
    ends = {curve.name: float(curve.log10[-1]) for curve in curves}
    noise = {curve.name: curve.floor_from for curve in curves if curve.floor_from is not None}
    known = sorted((log, name) for name, log in ends.items() if log == log and name not in noise)
    lost = [name for name, log in ends.items() if log != log]
    broken = f" T{LISTED['broken'][1:]} in {', '.join(lost)}." if lost else ""
    if noise:
        named = ", ".join(f"{name} (from layer {layer})" for name, layer in noise.items())
        broken = f" It is rounding noise, at or below its floor, in {named}.{broken}"
    if not known:
        return f"{curves[0].metric}:{broken}" if noise else broken.strip()
    (low, least), (high, most) = known[0], known[-1]
    note = f"At the last layer {curves[0].metric} is {power(high)} in {most}"
    if len(known) > 1:
        note = f"At the last layer {curves[0].metric} is largest in {most} ({power(high)}) and smallest in "
        note += f"{least} ({power(low)})"
    return f"{note}.{broken}"


def undecided(logs: Mapping[str, np.ndarray], paired: bool) -> str:
    """A sentence on networks that follow each other in the order of a metric although the texts do not decide between
    them; empty if there are none.

    The order of two is decided if the difference of their means is larger than its standard deviation over texts.

    Args:
        logs: log10 of the metric at the last layer, for each text, by network.
        paired: True if all networks read the same texts: then the difference is taken text by text.

    >>> undecided({"a": np.array([-1.0, -1.2]), "b": np.array([-1.1, -1.0])}, paired=True)
    'The 2 texts do not decide between b and a: they differ more from text to text than on the mean.'
    """
    known = {name: values for name, values in logs.items() if np.isfinite(values).all()}
    ordered = sorted(known, key=lambda name: -float(known[name].mean()))
    fewest = min(map(len, known.values()), default=0)
    if len(ordered) < 2:
        return ""
    if fewest < 2:
        return "This order is of one text, and may be another on the next."
    pairs = []
    for name_a, name_b in pairwise(ordered):
        a, b = known[name_a], known[name_b]
        same_texts = paired and len(a) == len(b)
        spread = (a - b).std(ddof=1) if same_texts else math.hypot(a.std(ddof=1), b.std(ddof=1))
        if a.mean() - b.mean() <= spread:
            pairs.append(f"{name_a} and {name_b}")
    if not pairs:
        return ""
    more = f", nor between {len(pairs) - NAMED} other pairs" if len(pairs) > NAMED else ""
    named = ", nor between ".join(pairs[:NAMED]) + more
    return f"The {fewest} texts do not decide between {named}: they differ more from text to text than on the mean."


def agreement(table: pl.DataFrame, confirm: bool = False) -> list[str]:
    """A sentence on how far a second pass agrees with the readings; none where all is well."""
    checked = table.drop_nulls("digits")
    marked, least = int(checked["below_floor"].sum()), checked["digits"].min()
    if not len(checked) or not isinstance(least, float):
        return []
    of_all = f"{marked} of {len(checked)} readings {'is' if marked == 1 else 'are'} marked"
    if confirm:
        enough = int((checked["digits"] >= 9).sum())
        rest = f"; {of_all}, since 32 digits are not enough for them" if marked else ""
        return [
            f"In doubled precision {enough} of {len(checked)} readings agree with float64's to nine digits "
            f"or more, the least to {least:.0f}; those of doubled precision are shown{rest}."
        ]
    if not marked:
        return []
    return [f"{of_all}: a second pass, rounded otherwise, does not agree on them; --confirm may resolve them."]


def disagreement(ends: Ends) -> str:
    """A sentence on two metrics that rank two networks differently, so that nobody reads one number alone;
    empty where all agree. The first metric goes before others, and shares before sizes.

    >>> ends = {"relative_mu": {"a": -1.0, "b": -2.0}, "mu": {"a": 0.0, "b": 1.0}}
    >>> disagreement(ends)  # doctest: +ELLIPSIS
    'Metrics rank them differently: by relative_mu tokens are further apart in a (0.1) than in b (0.01), ...'
    """
    known = [metric for metric in ends if direction_of(metric)]
    conflicts = []
    for metric, rival in combinations(known, 2):
        for a, b in combinations([name for name in ends[metric] if name in ends[rival]], 2):
            gaps = [direction_of(name) * (ends[name][a] - ends[name][b]) for name in (metric, rival)]
            sure = min(map(abs, gaps))
            if gaps[0] * gaps[1] < 0 and MARGIN < sure < math.inf:
                order = (metric == known[0], is_share(metric) and is_share(rival), sure)
                conflicts.append((order, metric, rival, (a, b) if gaps[0] > 0 else (b, a)))
    if not conflicts:
        return ""
    _, metric, rival, (far, near) = max(conflicts)
    first, second = ([power(ends[name][network]) for network in (far, near)] for name in (metric, rival))
    why = ""
    if is_share(metric) != is_share(rival):
        size = rival if is_share(metric) else metric
        why = f": {size} grows with the size of the tokens, which a share leaves out"
    return (
        f"Metrics rank them differently: by {metric} tokens are further apart in {far} ({first[0]}) than in "
        f"{near} ({first[1]}), by {rival} in {near} ({second[1]} against {second[0]}){why}."
    )


def ends_of(curves: Mapping[str, Sequence[CurveView]]) -> dict[str, dict[str, float]]:
    """The log10 at which each curve ends, by metric and network, but for what ends in rounding noise."""
    return {
        metric: {
            curve.name: float(curve.log10[-1])
            for curve in of_metric
            if curve.floor_from is None and math.isfinite(curve.log10[-1]) and curve.value[-1] > 0
        }
        for metric, of_metric in curves.items()
    }
