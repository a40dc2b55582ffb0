"""Theory beside measurement: which theorems a remedy takes out, and laws whose numbers can be predicted.

| law       | of              | predicted                                                                  |
|-----------|-----------------|----------------------------------------------------------------------------|
| order     | no skips        | m of `r' = k r^m` (`TheoryNote`)                                            |
| identity  | whole           | the residual after the last layer is that of the input                     |
| fall      | whole, post     | decades a layer: `log10(1 + b^2 w^2) / 2`                                   |
| variance  | whole, pre      | of the tokens after the last layer: `v_0 + sum_l w_l^2 v_l`                 |

Of the fall: a post-norm layer divides by the length of `X + w B`; where tokens are nearly the same and what
the branch B adds is common and of b times their length, deviations shrink by `sqrt(1 + b^2 w^2)`. b is taken
from the network without a remedy, w is the branch's weight beside its skip. Of the variance: v_l is what
layer l adds without a remedy. Both leave out that a remedy changes B itself: they are right to a factor.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

from rankscope.errors import ArchitectureError
from rankscope.remedies import REMEDIES, TheoryNote
from rankscope.theory import certify, outside
from rankscope_studies.remedies.at_initialisation import BARE, PLACES, THRESHOLD, WHOLE, Curves, curves, inputs, network
from rankscope_studies.trial import NONE

REFUSALS = {"remedy": pl.String, "network": pl.String, "theorem": pl.String, "held": pl.Boolean, "why": pl.String}
LAWS = {
    "remedy": pl.String, "law": pl.String, "predicted": pl.Float64, "measured": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "said": pl.String,
}  # fmt: skip
NETWORKS = {"pure attention": "san", "with skips": "san+skip", "whole": "transformer"}
"""On which theorems are asked: each of them holds on one of these at least, or on none that is random."""
LAYERS, WORDS = 2, 6
NEAR = -2.0  # log10 of a residual below which tokens are nearly the same, so that laws for small r apply
NONE_NOTE = TheoryNote(
    3,
    "Without skips the log of the residual triples in every layer; a skip makes the fall exponential "
    "at most, as the branch adds what tokens have in common.",
    "Dong et al. 2021; derived here",
    layer_weight=lambda layer, depth: 1.0,
)


def note_of(remedy: str) -> TheoryNote | None:
    """What theory says of none, or of a remedy as `contranorm:s=0.1` has it, whatever its numbers; None of a
    remedy that is not built in."""
    name = remedy.partition(":")[0]
    return NONE_NOTE if name == NONE else REMEDIES.shipped[name].theory if name in REMEDIES.shipped else None


def refusals(remedy: str) -> pl.DataFrame:
    """Which theorems hold on small random networks with a remedy, and the reason each refuses with."""
    X, padding = inputs(1, WORDS)
    rows: list[dict[str, Any]] = []
    for norm_place in PLACES:
        try:
            net = network(remedy, norm_place, LAYERS, 0)
        except ArchitectureError:
            continue
        for name, variant in NETWORKS.items():
            labels = {"remedy": remedy, "network": f"{norm_place}, {name}"}
            changed = net.variant(variant)
            if reason := outside(changed.arch):
                rows.append(labels | {"theorem": "all", "held": False, "why": reason})
                continue
            for row in certify(changed, 0.1 * X, padding).summary().iter_rows(named=True):
                rows.append(labels | {"theorem": row["theorem"], "held": row["met_to"] > 0, "why": row["why"]})
    return pl.DataFrame(rows, schema=REFUSALS)


def taken_out(table: pl.DataFrame, remedy: str) -> tuple[list[str], str]:
    """(theorems that hold somewhere without the remedy and nowhere with it, the reason most of them give)."""
    before = table.filter(remedy=NONE).filter("held")
    mine = table.filter(remedy=remedy)
    still = set(mine.filter("held")["theorem"])
    lost = [name for name in before["theorem"].unique(maintain_order=True) if name not in still]
    whys = mine.filter(~pl.col("held"), pl.col("theorem").is_in([*lost, "all"]), pl.col("why").is_not_null())["why"]
    usual = {reason for why in table.filter(remedy=NONE)["why"].drop_nulls() for reason in why.split("; ")}
    reasons = [reason for why in whys for reason in why.split("; ") if reason not in usual]
    return lost, statistics.mode(reasons) if reasons and lost else ""


def variances(remedy: str, depth: int, seed: int) -> pl.DataFrame:
    """The mean square of the tokens' entries after each layer, of a pre-norm network."""
    net = network(remedy, "pre", depth, seed)
    X, padding = inputs()
    sizes = [float(state.square().mean()) for state in net.run(X.to(net.dtype), padding).states]
    labels = {"remedy": pl.lit(remedy), "depth": pl.lit(depth), "seed": pl.lit(seed)}
    return pl.DataFrame({"layer": range(depth + 1), "variance": sizes}).with_columns(**labels)


def laws(table: pl.DataFrame, sizes: pl.DataFrame | None = None) -> pl.DataFrame:
    """Every law that says something of a remedy, its number beside what was measured, by the deepest
    networks; `low` and `high` are the range over seeds."""
    depth = int(table["depth"].max())  # type: ignore[arg-type]
    initial = curves(table)
    rows: list[dict[str, Any]] = []
    for remedy in table["remedy"].unique(maintain_order=True):
        note = note_of(remedy)
        if note is None or ":" in remedy:  # predictions are for the published numbers
            continue
        rows.append({"remedy": remedy, "law": "order", "predicted": note.order, **_order(initial, remedy, depth)})
        with_skips = [curve for norm in PLACES for curve in initial.get((remedy, norm, WHOLE, depth), [])]
        if note.order is None and with_skips:
            changes = [curve[-1] - curve[0] for curve in with_skips]
            rows.append({"remedy": remedy, "law": "identity", "predicted": 0.0, **_spread(changes)})
        rows += _fall(initial, remedy, note.branch_weight(depth), depth) if note.branch != "1" else []
        rows += [] if sizes is None or note.layer_weight is None else _variance(sizes, remedy, note.layer_weight)
    return pl.DataFrame(rows, schema=LAWS)


def order_of(curve: list[float]) -> float | None:
    """m: how the step of log r grows from layer to layer, the median over layers where tokens are nearly the
    same; None of a curve that does not get there, or ends at once.

    >>> order_of([0.0, -3.0, -9.0, -27.0, -81.0])
    3.0
    """
    triples = zip(curve, curve[1:], curve[2:], strict=False)
    ratios = [(c - b) / (b - a) for a, b, c in triples if NEAR > b > c and b < a and math.isfinite(c)]
    return statistics.median(ratios) if len(ratios) > 1 else None


def _order(initial: Curves, remedy: str, depth: int) -> dict[str, Any]:
    given = [curve for norm in PLACES for curve in initial.get((remedy, norm, BARE, depth), [])]
    orders = [m for curve in given if (m := order_of(curve)) is not None]
    if not given:
        return {"said": "every token is zero"}
    return _spread(orders) if len(orders) == len(given) else {"said": "no fall to take it from"}


def _fall(initial: Curves, remedy: str, weight: float, depth: int) -> Iterator[dict[str, Any]]:
    plain, mine = (initial.get((name, "post", WHOLE, depth), []) for name in (NONE, remedy))
    base = statistics.median(map(_slope, plain)) if plain else math.nan
    if mine and base > 0:
        b2 = 10 ** (2 * base) - 1
        predicted = math.log10(1 + b2 * weight**2) / 2
        spread = _spread([*map(_slope, mine)])
        apart = f"{spread['measured']:.2g}; tokens stay apart, the law is for tokens nearly the same"
        sentence = None if all(curve[-1] < math.log10(THRESHOLD) for curve in mine) else apart
        yield {"remedy": remedy, "law": "fall", "predicted": predicted, **spread, "said": sentence}


def _slope(curve: list[float]) -> float:
    """Decades a layer by which the residual falls, over the second half."""
    start = len(curve) // 2
    return (curve[start] - curve[-1]) / (len(curve) - 1 - start)


def _variance(sizes: pl.DataFrame, remedy: str, weight: Callable[[int, int], float]) -> Iterator[dict[str, Any]]:
    if remedy == NONE:
        return
    predicted, ends = [], []
    for _, group in sizes.filter(remedy=remedy).group_by("seed", "depth", maintain_order=True):
        plain = sizes.filter(remedy=NONE, seed=group["seed"][0], depth=group["depth"][0]).sort("layer")
        v, depth = plain["variance"].to_list(), len(plain) - 1
        steps = [weight(layer, depth) ** 2 * (v[layer] - v[layer - 1]) for layer in range(1, depth + 1)]
        predicted.append(v[0] + sum(steps))
        ends.append(group.sort("layer")["variance"][-1])
    if ends:
        yield {"remedy": remedy, "law": "variance", "predicted": statistics.median(predicted), **_spread(ends)}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"measured": statistics.median(values), "low": min(values), "high": max(values)}
