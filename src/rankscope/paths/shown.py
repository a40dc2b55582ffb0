"""What a decomposition shows of itself: a card in a notebook, a few lines in a terminal."""

from typing import TYPE_CHECKING

import polars as pl

from rankscope.cards import card, counted, lines
from rankscope.figures import power

if TYPE_CHECKING:
    from rankscope.paths.decompose import Decomposition
    from rankscope.paths.heaviest import Heaviest
    from rankscope.paths.lengths import ByLength

HEADINGS = ("length", "paths", "share", "from biases", "res / norm")


def lengths_title(found: "ByLength") -> str:
    """How many paths there are, and that they add up."""
    samples = counted(len(found.output), "sample")
    return (
        f"ByLength: {count(sum(found.counts))} paths of {counted(len(found.counts), 'length')}, {samples}, "
        f"closure {found.closure:.0e}"
    )


def lengths_repr(found: "ByLength") -> str:
    """Its size, and the share of each length."""
    return lines(
        lengths_title(found), [[f"length {row[0]}", row[1], f"share {row[2]}"] for row in length_rows(found)]
    )


def lengths_card(found: "ByLength", title: str | None = None) -> str:
    """Shares and residuals by length."""
    said = f"Mean over samples. The parts add up to the output within {found.closure:.0e} of it."
    return card(title or lengths_title(found), found.plot(), HEADINGS, length_rows(found), [said])


def decomposition_title(d: "Decomposition") -> str:
    """What was taken apart."""
    batch, n, _ = d.frozen.X.shape
    return (
        f"Decomposition: {counted(d.layers, 'layer')}, {counted(d.heads, 'head')}, "
        f"{counted(batch, 'sample')} of up to {counted(n, 'token')}"
    )


def heaviest_repr(found: "Heaviest") -> str:
    """Each path and its weight, and what is proved."""
    title = (
        f"Heaviest: {counted(len(found.paths), 'path')}, {found.proved} proved to be the heaviest; no other "
        f"weighs over {found.next_bound:.3g}"
    )
    heads = [
        "(" + ", ".join("–" if head is None else str(head) for head in path) + ")" for path in found.paths
    ]
    rows = [[path, f"{weight:.4g}"] for path, weight in zip(heads, found.weights, strict=True)]
    return lines(title, rows)


def length_rows(found: "ByLength") -> list[list[str]]:
    """For each length: its paths, its share, that of what starts at biases, and how uniform the sum is."""
    means = found.table.group_by("length", "start").agg(
        pl.col("share", "norm").mean(), pl.col("relative_residual").log10().mean()
    )
    rows = []
    for length, number in enumerate(found.counts):
        own, bias = (
            means.filter(length=length, start=start).row(0, named=True) for start in ("embedding", "bias")
        )
        rows.append(
            [
                str(length),
                count(number),
                f"{own['share']:+z.3f}" if own["norm"] > 0 else "–",
                f"{bias['share']:+z.3f}" if bias["norm"] > 0 else "",
                power(own["relative_residual"]) if own["norm"] > 0 else "–",
            ]
        )
    return rows


def count(number: int) -> str:
    """A whole number of any size, in little room.

    >>> count(2160), count(13**12)
    ('2,160', '2.33e+13')
    """
    return f"{number:,}" if number < 10**12 else f"{number:.2e}"
