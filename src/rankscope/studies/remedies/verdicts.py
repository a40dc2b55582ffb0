"""Ways to hold a claim against the tables: what came out, with the spread over seeds, and one of four words.

| word                | when                                                                              |
|---------------------|-----------------------------------------------------------------------------------|
| agrees              | in the claimed direction with every seed, wherever seeds agree on a direction and |
|                     | the effect is more than half of what seeds differ by without a remedy             |
| does not            | in the other direction, in the same way                                           |
| does nothing here   | nowhere is there such an effect, and medians differ by less than seeds do         |
| cannot be told      | depths disagree, fewer than two seeds, it was not run, or what it is to prevent   |
|                     | does not happen without it either                                                 |
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rankscope.figures.text import power
from rankscope.lab.trial import TrialSizes
from rankscope.studies.remedies import training_results as results
from rankscope.studies.remedies.at_initialisation import BARE, NONE
from rankscope.studies.remedies.depth_reached import THRESHOLD, depth_reached, spread
from rankscope.studies.remedies.measurements import RemedyMeasurements

AGREES, NOT, NOTHING, UNTOLD = "agrees", "does not", "does nothing here", "cannot be told"
LEAST = 0.5
"""Of what seeds differ by without a remedy: a smaller effect is none, though every seed should show it."""
NOT_RUN = "not run: rankscope remedies --train"


class Verdict(NamedTuple):
    """What came out."""

    ours: str
    verdict: str
    because: str = ""

    @property
    def agrees(self) -> bool | None:
        """As comparisons have it."""
        return {AGREES: True, NOT: False, NOTHING: False}.get(self.verdict)


Judge = Callable[[RemedyMeasurements], Verdict]


def lower(remedy: str, quantity: str, *settings: str, sign: int = -1) -> Judge:
    """After training the quantity is lower than without the remedy (higher: `sign=1`), seed by seed and depth
    by depth."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        found: dict[str, dict[int, float]] = {}
        noise: dict[str, float] = {}
        why = next(filter(None, (results.refusal(tables.trained, remedy, each) for each in settings)), None)
        for setting in settings:
            for depth in results.depths(tables.trained, setting, remedy):
                mine, plain = (
                    results.values(tables.trained, each, setting, depth, quantity) for each in (remedy, NONE)
                )
                if both := {seed: mine[seed] - plain[seed] for seed in mine if seed in plain}:
                    key = f"{setting} {depth}"
                    found[key] = both
                    noise[key] = max(plain.values()) - min(plain.values())
        return weighed(found, noise, sign, quantity.replace("_", " "), why)

    return judge


def higher(remedy: str, quantity: str, *settings: str) -> Judge:
    """The other way round."""
    return lower(remedy, quantity, *settings, sign=1)


def learns(remedy: str, *settings: str) -> Judge:
    """Networks of all depths that were trained learn with it, in every setting."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        said, met = [], set[bool]()
        for setting in settings:
            mine, plain = (results.learns(tables.trained, each, setting) for each in (remedy, NONE))
            if mine is not None:
                without = "" if plain is None else f", {plain.layers or 'none'} without"
                said.append(f"{setting}: {mine.layers or 'none'} layers{without}")
                met.add(mine.whole)
        if not said:
            return Verdict(NOT_RUN, UNTOLD)
        return Verdict(f"the deepest that learn, {'; '.join(said)}", AGREES if met == {True} else NOT)

    return judge


def lasting(remedy: str, quantity: str, setting: str) -> Judge:
    """From the shallowest networks to the deepest a quantity, whose log10 the tables have, falls by two
    decades or more without the remedy, and by less than one with it."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        falls = []
        for each in (remedy, NONE):
            ends = [
                results.values(tables.trained, each, setting, depth, quantity)
                for depth in results.depths(tables.trained, setting, each)
            ]
            falls.append(
                [ends[0][seed] - ends[-1][seed] for seed in ends[0] if seed in ends[-1]] if ends else []
            )
        mine, plain = (results.spread(dict(enumerate(each))) for each in falls)
        if mine is None or plain is None or mine.seeds < 2:
            return Verdict(NOT_RUN, UNTOLD)
        said = f"{setting}: falls by {mine.said('.2f')} decades to the deepest, {plain.said('.2f')} without"
        if plain.low < 2:
            return Verdict(said, UNTOLD, "without it they do not vanish either")
        return Verdict(said, AGREES if mine.high < 1 else NOT if mine.low > 1 else UNTOLD)

    return judge


def spread_out(remedy: str, *settings: str) -> Judge:
    """Entropy of attention falls below a tenth of that of even attention without the remedy, not with it."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        lowest = []
        for each in (remedy, NONE):
            found = [
                results.values(tables.trained, each, setting, depth, "entropy")
                for setting in settings
                for depth in results.depths(tables.trained, setting, each)
            ]
            lowest.append(min((value for one in found for value in one.values()), default=None))
        mine, plain = lowest
        if mine is None or plain is None:
            return Verdict(NOT_RUN, UNTOLD)
        tokens = TrialSizes().context
        bound = 0.1 * math.lgamma(tokens + 1) / tokens
        said = f"the lowest entropy is {mine:.2f} nats, {plain:.2f} without"
        if plain > bound:
            return Verdict(said, UNTOLD, f"without it entropy stays above {bound:.2f} as well")
        return Verdict(said, AGREES if mine > bound else NOT)

    return judge


def deeper(remedy: str, *settings: str) -> Judge:
    """At initialisation the residual of the deepest networks stays above the threshold for more layers than
    without the remedy; where both never fall, their ends are compared."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        said, ways = [], set[str]()
        for setting in settings:
            mine, plain = (tables.curves(each, setting) for each in (remedy, NONE))
            if not mine:
                continue
            depths = [[depth_reached(each) for each in some] for some in (mine, plain)]
            said.append(f"{setting}: {spread(depths[0])} layers, {spread(depths[1])} without")
            if all(one.whole for some in depths for one in some):
                ends = (power(statistics.median(each[-1] for each in some)) for some in (mine, plain))
                said[-1] += f" (at the end {' and '.join(ends)})"
            pairs = [
                (a.layers - b.layers) or (x[-1] - y[-1] if a.whole and b.whole else 0)
                for a, b, x, y in zip(*depths, mine, plain, strict=False)
            ]
            ways.add(_way(pairs, 1))
        if not said:
            return Verdict("it does not go there, or leaves nothing", UNTOLD)
        return Verdict(
            f"{'; '.join(said)} (residual above {THRESHOLD:g}, {tables.deepest} layers)", _word(ways)
        )

    return judge


def order(remedy: str, doubly: bool = True) -> Judge:
    """Without skips the fall is doubly exponential (m > 1), or is not."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        row = tables.laws.filter(remedy=remedy, law="order")
        if row.is_empty() or row["measured"][0] is None:
            why = row["said"][0] if len(row) else "not measured"
            return Verdict(str(why), UNTOLD if doubly or not len(row) else AGREES)
        low, high, m = (float(row[name][0]) for name in ("low", "high", "measured"))
        met = low > 1.5 if doubly else high < 1.5
        return Verdict(
            f"the log of the residual times {m:.3f} in each layer ({low:.3f}–{high:.3f})",
            AGREES if met else NOT,
        )

    return judge


def slower(remedy: str) -> Judge:
    """Without skips it collapses too, more slowly than softmax attention: after 12 layers more is left."""

    def judge(tables: RemedyMeasurements) -> Verdict:
        mine, plain = (tables.known.get((each, "post", BARE, 12), []) for each in (remedy, NONE))
        if not mine or not plain:
            return Verdict("not measured", UNTOLD)
        ends = [[each[-1] for each in some] for some in (mine, plain)]
        pairs = [a - b for a, b in zip(*ends, strict=False)]
        left, plainly = map(statistics.median, ends)
        return Verdict(
            f"after 12 layers 1e{left:.4g}, softmax 1e{plainly:.4g}; "
            f"exponents apart by {min(pairs):.3g} to {max(pairs):.3g}",
            _word({_way(pairs, 1)}),
        )

    return judge


def weighed(
    found: Mapping[str, Mapping[int, float]], noise: Mapping[str, float], sign: int, what: str,
    why: str | None = None,
) -> Verdict:  # fmt: skip
    """Differences to no remedy by place and seed: in the claimed direction where they have the sign."""
    if not found:
        return Verdict(NOT_RUN if why is None else "it does not go there", UNTOLD, "" if why is None else why)
    said, ways, small = [], set[str](), True
    for key, pairs in found.items():
        each = list(pairs.values())
        middle = statistics.median(each)
        small &= abs(middle) <= noise[key]
        idle = abs(middle) <= LEAST * noise[key]
        said.append(f"{key}: {results.SeedSpread(middle, min(each), max(each), len(each)).said('+.3f')}")
        ways.add(NOTHING if idle else _way(each, sign))
    fewest = min(map(len, found.values()))
    if fewest < 2:
        return Verdict(f"{what} {'; '.join(said)}", UNTOLD, "one seed has no spread")
    word = NOTHING if ways <= {"", NOTHING} and small else _word(ways)
    return Verdict(f"{what} {'; '.join(said)}", word, f"the fewest seeds: {fewest}" if fewest < 3 else "")


def _way(pairs: list[float], sign: int) -> str:
    """The word if all agree on it, else nothing."""
    if all(pair * sign > 0 for pair in pairs):
        return AGREES
    return NOT if all(pair * sign < 0 for pair in pairs) else NOTHING if not any(pairs) else ""


def _word(ways: set[str]) -> str:
    left = ways - {"", NOTHING} or ways
    return left.pop() or UNTOLD if len(left) == 1 else UNTOLD
