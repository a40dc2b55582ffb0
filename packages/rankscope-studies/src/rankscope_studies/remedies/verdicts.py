"""Published claims (each remedy's own file has them), held against what was measured: what came out, with the
spread over seeds, and one of four words.

Sizes are a thousandth of the published ones and below, tasks are others: that a claim does not come out here
is no verdict on the claim at its own size, and that it does is no proof. What can be told is what a remedy
does to tokens and to a short training, on the same weights and texts as all the others.

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
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import polars as pl

from rankscope.figures import power
from rankscope.remedies import REMEDIES, Claim
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import BARE, THRESHOLD, depth_reached, depths_text
from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.study import Comparison
from rankscope_studies.trial import NONE, SIGMA, TrialSizes

AGREES, NOT, NOTHING, UNTOLD = "agrees", "does not", "does nothing here", "cannot be told"
LEAST = 0.5  # Of what seeds differ by without a remedy: a smaller effect is none, though every seed should show it
NOT_RUN = "not run: rankscope remedies --train"
PLAIN_CLAIM = Claim("without skips collapse is doubly exponential", "Dong et al. 2021: rate 3", "order")
SIGMA_CLAIM = Claim(
    "attention's entropy does not collapse in training", "Zhai et al. 2023", "spread_out", ("pre", "post")
)
"""Claims of what is no remedy of a network: of none, and of a parametrisation."""


class Verdict(NamedTuple):
    """What came out of a claim here: numbers, one of the four words, and a reason."""

    ours: str
    word: str
    because: str = ""


def claims() -> dict[str, tuple[Claim, ...]]:
    """Published claims by remedy, none first."""
    return {
        NONE: (PLAIN_CLAIM,),
        **{name: kind.claims for name, kind in REMEDIES.shipped.items()},
        SIGMA: (SIGMA_CLAIM,),
    }


def comparisons(tables: RemedyMeasurements) -> list[Comparison]:
    """Every claim on a remedy of these tables, with its verdict."""
    known = {*tables.remedies, *tables.trained["remedy"].unique()}
    rows = []
    for remedy, published in claims().items():
        for claim in published if remedy in known else ():
            quantity = (claim.quantity,) if claim.quantity else ()
            ours, word, because = TESTS[claim.test](tables, remedy, *quantity, *claim.settings)
            agrees = {AGREES: True, NOT: False, NOTHING: False}.get(word)
            rows.append(Comparison(f"{remedy}: {claim.what}", claim.published, ours, agrees, because, word))
    return rows


def lower(tables: RemedyMeasurements, remedy: str, quantity: str, *settings: str, sign: int = -1) -> Verdict:
    """Judge whether after training a quantity is lower than without the remedy (higher: `sign=1`), seed by
    seed and depth by depth."""
    table = tables.trained
    apart: dict[str, dict[int, float]] = {}
    noise: dict[str, float] = {}
    refusals = (results.refusal(table, remedy, setting) for setting in settings)
    for setting in settings:
        for depth in results.depths(table, setting, remedy):
            mine, plain = (results.values(table, name, setting, depth, quantity) for name in (remedy, NONE))
            if both := {seed: mine[seed] - plain[seed] for seed in mine if seed in plain}:
                apart[f"{setting} {depth}"] = both
                noise[f"{setting} {depth}"] = max(plain.values()) - min(plain.values())
    return weighed(apart, noise, sign, quantity.replace("_", " "), next(filter(None, refusals), None))


def learns(tables: RemedyMeasurements, remedy: str, *settings: str) -> Verdict:
    """Judge whether networks of all depths that were trained learn with the remedy, in every setting."""
    lines, met = [], set[bool]()
    for setting in settings:
        mine, plain = (results.learns(tables.trained, name, setting) for name in (remedy, NONE))
        if mine is not None:
            without = "" if plain is None else f", {plain.layers or 'none'} without"
            lines.append(f"{setting}: {mine.layers or 'none'} layers{without}")
            met.add(mine.at_limit)
    if not lines:
        return Verdict(NOT_RUN, UNTOLD)
    return Verdict(f"the deepest that learn, {'; '.join(lines)}", AGREES if met == {True} else NOT)


def lasting(tables: RemedyMeasurements, remedy: str, quantity: str, setting: str) -> Verdict:
    """Judge whether from the shallowest networks to the deepest a quantity, whose log10 the tables have,
    falls by two decades or more without the remedy, and by less than one with it."""

    def fall(name: str) -> results.SeedSpread | None:
        depths = results.depths(tables.trained, setting, name) or [0]
        first, last = (results.values(tables.trained, name, setting, at, quantity) for at in (depths[0], depths[-1]))
        return results.spread_of(first[seed] - last[seed] for seed in first if seed in last)

    mine, plain = fall(remedy), fall(NONE)
    if mine is None or plain is None or mine.seeds < 2:
        return Verdict(NOT_RUN, UNTOLD)
    ours = f"{setting}: falls by {mine.said('.2f')} decades to the deepest, {plain.said('.2f')} without"
    if plain.low < 2:
        return Verdict(ours, UNTOLD, "without it they do not vanish either")
    return Verdict(ours, AGREES if mine.high < 1 else NOT if mine.low > 1 else UNTOLD)


def spread_out(tables: RemedyMeasurements, remedy: str, *settings: str) -> Verdict:
    """Judge whether entropy of attention falls below a tenth of that of even attention without the remedy,
    and not with it."""

    def lowest(name: str) -> float | None:
        entropies = tables.trained.filter(pl.col("setting").is_in(settings), remedy=name, quantity="entropy")["value"]
        return min(entropies.drop_nulls().drop_nans(), default=None)

    mine, plain = lowest(remedy), lowest(NONE)
    if mine is None or plain is None:
        return Verdict(NOT_RUN, UNTOLD)
    tokens = TrialSizes().context
    bound = 0.1 * math.lgamma(tokens + 1) / tokens
    ours = f"the lowest entropy is {mine:.2f} nats, {plain:.2f} without"
    if plain > bound:
        return Verdict(ours, UNTOLD, f"without it entropy stays above {bound:.2f} as well")
    return Verdict(ours, AGREES if mine > bound else NOT)


def deeper(tables: RemedyMeasurements, remedy: str, *settings: str) -> Verdict:
    """Judge whether at initialisation the residual of the deepest networks stays above the threshold for more
    layers than without the remedy; where both never fall, their ends are compared."""
    lines, ways = [], set[str]()
    for setting in settings:
        mine, plain = (tables.curves(name, setting) for name in (remedy, NONE))
        if not mine:
            continue
        depths = [[depth_reached(curve) for curve in curves] for curves in (mine, plain)]
        lines.append(f"{setting}: {depths_text(depths[0])} layers, {depths_text(depths[1])} without")
        if all(depth.at_limit for reached in depths for depth in reached):
            ends = (power(statistics.median(curve[-1] for curve in curves)) for curves in (mine, plain))
            lines[-1] += f" (at the end {' and '.join(ends)})"
        pairs = [
            (a.layers - b.layers) or (x[-1] - y[-1] if a.at_limit and b.at_limit else 0)
            for a, b, x, y in zip(*depths, mine, plain, strict=False)
        ]
        ways.add(_way(pairs, 1))
    if not lines:
        return Verdict("it does not go there, or leaves nothing", UNTOLD)
    ours = f"{'; '.join(lines)} (residual above {THRESHOLD:g}, {tables.deepest} layers)"
    return Verdict(ours, _word(ways))


def order(tables: RemedyMeasurements, remedy: str) -> Verdict:
    """Judge whether without skips the fall is doubly exponential (m > 1)."""
    row = tables.laws.filter(remedy=remedy, law="order")
    if row.is_empty() or row["measured"][0] is None:
        return Verdict(str(row["said"][0] if len(row) else "not measured"), UNTOLD)
    low, high, m = (float(row[name][0]) for name in ("low", "high", "measured"))
    ours = f"the log of the residual times {m:.3f} in each layer ({low:.3f}–{high:.3f})"
    return Verdict(ours, AGREES if low > 1.5 else NOT)


def slower(tables: RemedyMeasurements, remedy: str) -> Verdict:
    """Judge whether without skips more is left after 12 layers than with softmax attention."""
    mine, plain = (tables.known.get((name, "post", BARE, 12), []) for name in (remedy, NONE))
    if not mine or not plain:
        return Verdict("not measured", UNTOLD)
    ends = [[curve[-1] for curve in curves] for curves in (mine, plain)]
    pairs = [a - b for a, b in zip(*ends, strict=False)]
    left, softmax = map(statistics.median, ends)
    apart = f"exponents apart by {min(pairs):.3g} to {max(pairs):.3g}"
    return Verdict(f"after 12 layers 1e{left:.4g}, softmax 1e{softmax:.4g}; {apart}", _word({_way(pairs, 1)}))


TESTS: dict[str, Callable[..., Verdict]] = {  # By the name that a `Claim` has of its test
    "order": order, "slower": slower, "deeper": deeper, "lower": lower, "higher": partial(lower, sign=1),
    "learns": learns, "lasting": lasting, "spread_out": spread_out,
}  # fmt: skip


def weighed(
    apart: dict[str, dict[int, float]], noise: dict[str, float], sign: int, what: str, refusal: str | None = None
) -> Verdict:
    """The verdict on differences to no remedy, by network and seed, that are claimed to have the sign."""
    if not apart:
        return Verdict(NOT_RUN, UNTOLD) if refusal is None else Verdict("it does not go there", UNTOLD, refusal)
    lines, ways, small = [], set[str](), True
    for key, by_seed in apart.items():
        pairs = list(by_seed.values())
        ends = results.SeedSpread.of(pairs)
        small &= abs(ends.median) <= noise[key]
        idle = abs(ends.median) <= LEAST * noise[key]
        lines.append(f"{key}: {ends.said('+.3f')}")
        ways.add(NOTHING if idle else _way(pairs, sign))
    fewest = min(map(len, apart.values()))
    if fewest < 2:
        return Verdict(f"{what} {'; '.join(lines)}", UNTOLD, "one seed has no spread")
    word = NOTHING if ways <= {"", NOTHING} and small else _word(ways)
    return Verdict(f"{what} {'; '.join(lines)}", word, f"the fewest seeds: {fewest}" if fewest < 3 else "")


def _way(pairs: list[float], sign: int) -> str:
    """The word if all agree on it, else nothing."""
    if all(pair * sign > 0 for pair in pairs):
        return AGREES
    return NOT if all(pair * sign < 0 for pair in pairs) else NOTHING if not any(pairs) else ""


def _word(ways: set[str]) -> str:
    left = ways - {"", NOTHING} or ways
    return left.pop() or UNTOLD if len(left) == 1 else UNTOLD
