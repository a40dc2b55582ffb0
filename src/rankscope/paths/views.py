"""What a decomposition says, as every output shows it: a row for each length and head, and a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.figures import power
from rankscope.profiles import geometric

HEAD = ("norm", "share", "residual_share", "contraction", "averaging", "dobrushin")


@dataclass(frozen=True)
class LengthView:
    """All paths of one length, means over samples."""

    length: int
    paths: int  # those that start at the embedding
    bias_paths: int
    share: float  # of the output, of what starts at the embedding
    from_biases: float
    share_of_all: float
    norm: float
    bias_norm: float
    log10_residual: float  # of the relative residual of the terms' sum, the geometric mean without zeros, as in curves
    noise: bool  # every sample's residual lies at its floor

    @property
    def cells(self) -> dict[str, str]:
        """The row of a table."""
        nonzero, biased = self.norm > 0, self.bias_norm > 0
        residual = f"{power(self.log10_residual)}{' ○' if self.noise else ''}"
        return {
            "length": str(self.length),
            "paths": counted_paths(self.paths),
            "share": f"{self.share:+z.3f}" if nonzero else "–",
            "from biases": f"{self.from_biases:+z.3f}" if biased else "",
            "norm": power(math.log10(self.norm)) if nonzero else "–",
            "res / norm": residual if nonzero else "–",
        }


def length_views(table: pl.DataFrame) -> list[LengthView]:
    """One view per length, from `ByLength.table`."""
    means = table.group_by("length", "start").agg(
        pl.col("share", "norm").mean().fill_null(math.nan), pl.col("paths").first(),
        (pl.col("below_floor") & pl.col("relative_residual").is_not_nan()).all(), pl.col("relative_residual").log10(),
    )  # fmt: skip
    rows = {(row["length"], row["start"]): row for row in means.iter_rows(named=True)}
    nan = math.nan
    none = {"share": nan, "norm": 0.0, "paths": "0", "below_floor": False, "relative_residual": [nan]}
    views = []
    for length in sorted({length for length, _ in rows}):
        starts = ("embedding", "bias", "all")
        from_embedding, bias, both = (rows.get((length, start), none) for start in starts)
        residual = float(geometric(np.array(from_embedding["relative_residual"], dtype=float)))
        views.append(LengthView(
            length, int(from_embedding["paths"]), int(bias["paths"]), from_embedding["share"], bias["share"],
            both["share"], from_embedding["norm"], bias["norm"], residual, from_embedding["below_floor"],
        ))  # fmt: skip
    return views


def head_means(table: pl.DataFrame) -> pl.DataFrame:
    """`Decomposition.by_head()`, means over the samples that have a number; null where none has."""
    return table.group_by("layer", "head").agg(pl.col(*HEAD).fill_nan(None).mean()).sort("layer", "head")


def carried(lengths: Sequence[LengthView]) -> str:
    """Which length carries most of the output."""
    finite = [view for view in lengths if math.isfinite(view.share_of_all)]
    if not finite:
        return ""
    total = sum(view.paths for view in lengths)
    if not total:
        return "No path leads from the text to the output: what comes out starts at biases."
    largest = max(finite, key=lambda view: view.share_of_all)
    heads = {0: "no head", 1: "one head"}.get(largest.length, f"{largest.length} heads")
    what = "most of the output" if largest.share_of_all > 0.5 else "more of the output than any other length"
    share = f"{largest.share_of_all:.0%}" if largest.share_of_all < 10 else f"{largest.share_of_all:.3g} times"
    above = " It is more than all of it since other paths take some back: the shares of all add up to 100%."
    over = above if largest.share_of_all > 1.005 else ""
    return f"Of {counted_paths(total)} paths those through {heads} carry {what}: {share} of it.{over}"


def counted_paths(count: int) -> str:
    """A whole number of any size, in little room.

    >>> counted_paths(2160), counted_paths(13**12)
    ('2,160', '2.3e+13')
    """
    return f"{count:,}" if count < 10**12 else power(math.log10(count))
