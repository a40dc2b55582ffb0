"""At initialisation: the same random weights with each remedy, whole and without skips, at three depths.

What to choose a remedy by is how deep a network may be before its tokens are nearly the same. *Depth reached* is the
number of layers after which the relative residual is still at or above `THRESHOLD`, counted from the first up to the
one where it falls below for the first time. Of a network whose residual never does, only a lower limit is known, its
own depth: `at_limit` says so, and it is written `all 48`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import polars as pl
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, word_tokens
from rankscope_studies.trial import NONE

DEPTHS = (12, 48, 128)
WHOLE, BARE = "whole", "no skips"
VARIANTS = {WHOLE: "transformer", BARE: "transformer-skip"}
PLACES = ("post", "pre")  # Where norms stand: remedies were made for one or the other
WIDTH, HEADS, TOKENS, SAMPLES = 64, 4, 32, 2
INIT = "xavier"
METRIC = "relative_residual"
SCHEMA = {
    "remedy": pl.String, "norm_place": pl.String, "depth": pl.Int64, "variant": pl.String, "seed": pl.Int64,
    "layer": pl.Int64, "log10": pl.Float64, "marked": pl.Boolean, "arithmetic": pl.String,
    "refused": pl.String, "note": pl.String,
}  # fmt: skip
NETWORK = ("remedy", "norm_place", "variant", "depth")
SECONDS = 0.02  # A layer of one variant takes, on one core: what is said before, not what is promised
ZERO = "every token is zero: nothing is left that could differ"
THRESHOLD = 0.1  # Tokens that share nine tenths of their length. Excerpts of the bundled text begin at about 0.7


def depths(full: bool) -> tuple[int, ...]:
    """All three at full size, else the first two."""
    return DEPTHS if full else DEPTHS[:-1]


def network(remedy: str, norm_place: str, depth: int, seed: int) -> Transformer:
    """The random network of a seed, the same for all remedies, with one of them."""
    arch = Architecture(layers=depth, width=WIDTH, heads=HEADS, norm_place=norm_place)  # type: ignore[arg-type]
    net = Transformer.random(arch, seed=seed, init=INIT)
    return net if remedy == NONE else net.with_remedy(remedy)


def inputs(samples: int = SAMPLES, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Excerpts that random networks read, and their padding."""
    return word_tokens(bundled_excerpts(tokens)[:samples], WIDTH, tokens)


def measured(remedy: str, norm_place: str, depth: int, seed: int, device: str = "cpu") -> pl.DataFrame:
    """log10 of the relative residual after each layer, the mean over samples, in deviation arithmetic.
    `marked`: two passes that round otherwise differ on it in some sample. `refused` says why a remedy does
    not go onto this network, `note` what else a reader should know."""
    labels = {"remedy": remedy, "norm_place": norm_place, "depth": depth, "seed": seed}
    try:
        net = network(remedy, norm_place, depth, seed)
    except ArchitectureError as refused:
        return pl.DataFrame([labels | {"refused": str(refused)}], schema=SCHEMA)
    X, padding = inputs()
    rows: list[dict[str, object]] = []
    for name, variant in VARIANTS.items():
        changed = net.to(device=device).variant(variant)
        profile = measure(changed, X, padding, METRIC)
        curve = profile.curve(METRIC, "log10").mean(0).tolist()
        marks = profile.table.group_by("layer").agg(pl.col("below_floor").any()).sort("layer")["below_floor"]
        gone = math.isinf(curve[-1]) and not bool(changed.run(X.to(changed.dtype), padding).states[-1].any())
        rows += [
            labels | {"variant": name, "layer": layer, "log10": log10, "marked": bool(marked),
                     "arithmetic": profile.arithmetics[0], "note": ZERO if gone and layer else None}
            for layer, (log10, marked) in enumerate(zip(curve, marks, strict=True))
        ]  # fmt: skip
    return pl.DataFrame(rows, schema=SCHEMA)


Curves = dict[tuple[str, str, str, int], list[list[float]]]
"""By remedy, norm_place, variant and depth: of each seed log10 of the residual, layer after layer. Not there
where the remedy does not go, or all tokens are zero."""


def curves(table: pl.DataFrame) -> Curves:
    """The curves in a table of parts."""
    rows = table.filter(pl.col("refused").is_null() & pl.col("note").is_null().all().over(NETWORK))
    by_network: Curves = {}
    by_seed = rows.sort("seed", "layer").group_by(*NETWORK, "seed", maintain_order=True)
    for (remedy, norm_place, variant, depth, _), curve in by_seed:
        key = (str(remedy), str(norm_place), str(variant), int(depth))
        by_network.setdefault(key, []).append(curve["log10"].to_list())
    return by_network


class DepthReached(NamedTuple):
    """A depth, and whether it is all that there was."""

    layers: float
    at_limit: bool

    def __str__(self) -> str:
        return f"all {self.layers:g}" if self.at_limit else f"{self.layers:g}"


def depth_reached(log10: Sequence[float], threshold: float = THRESHOLD) -> DepthReached:
    """The depth that a curve of log10 of the relative residual reaches, the input first. A curve that ends in
    what is not a number, where tokens overflow, is known up to there.

    >>> depth_reached([0.0, -0.5, -1.5, -0.2]), depth_reached([0.0, -0.5])
    (DepthReached(layers=1, at_limit=False), DepthReached(layers=1, at_limit=True))
    """
    known = 0
    for layer, residual in enumerate(log10):
        if math.isnan(residual):
            return DepthReached(known, False)
        if layer and residual < math.log10(threshold):
            return DepthReached(layer - 1, False)
        known = layer
    return DepthReached(known, True)


def over_seeds(reached: Sequence[DepthReached]) -> DepthReached:
    """The median of several networks; `at_limit` where that is one that never fell."""
    middle = statistics.median(depth.layers for depth in reached)
    return DepthReached(middle, all(depth.at_limit for depth in reached if depth.layers >= middle))


def depths_text(reached: Sequence[DepthReached]) -> str:
    """The median, and the range over seeds where they differ.

    >>> depths_text([DepthReached(8, False), DepthReached(9, False), DepthReached(12, True)])
    '9 (8–12)'
    """
    layers = [depth.layers for depth in reached]
    between = "" if min(layers) == max(layers) else f" ({min(layers):g}–{max(layers):g})"
    return f"{over_seeds(reached)}{between}"
