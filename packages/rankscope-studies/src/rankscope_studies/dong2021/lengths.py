"""Path-length distributions: how long the paths of the usual architectures are.

A network of L layers and H heads with skips has `C(L, k) H^k` paths of length k, of `(1 + H)^L`: a binomial
distribution with chance `H / (1 + H)`. Most paths are nearly as long as the network is deep, and, as figure 4
shows, carry next to nothing.
"""

from typing import Any

import polars as pl

from rankscope.figures import MARKERS, PALETTE, Figure, panels
from rankscope.paths import path_counts, path_shares
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, published


def _run(setup: Setup) -> StudyResult:
    del setup  # counted, not sampled: one size does for all
    theirs = published("dong2021")["path_length_distribution"]
    rows = [
        {"architecture": name, "layers": layers, "heads": heads, "length": k, "paths": str(count), "share": share}
        for name, layers, heads, _ in theirs["modes"]
        for k, (count, share) in enumerate(zip(path_counts(layers, heads), path_shares(layers, heads), strict=True))
    ]
    table = pl.DataFrame(rows)
    comparisons = [_mode(table, *mode) for mode in theirs["modes"]]
    counts, ours = theirs["H=2 L=6 counts"], path_counts(6, 2)
    comparisons.append(Comparison("paths by length, H = 2, L = 6", str(counts), str(ours), ours == counts))
    return StudyResult({"lengths": _figure(table)}, {"lengths": table}, comparisons)


def _mode(table: pl.DataFrame, name: str, layers: int, heads: int, theirs: str) -> Comparison:
    """The most frequent lengths, with their share, as the paper's figure has them."""
    part = table.filter(architecture=name)
    most = float(part["share"].max())  # type: ignore[arg-type]
    modes = part.filter(pl.col("share") > most * (1 - 1e-9))["length"].to_list()
    suffix = " each)" if len(modes) > 1 else ")"
    ours = " and ".join(map(str, modes)) + f" ({most:.3f}".replace("0.", ".") + suffix
    what = f"most frequent length, {name} (L = {layers}, H = {heads})"
    return Comparison(what, theirs, ours, theirs == ours)


def _figure(table: pl.DataFrame) -> Figure:
    figure, (axes,) = panels(width=7.2)
    networks = table.group_by("architecture", "layers", "heads", maintain_order=True)
    for k, ((name, layers, heads), part) in enumerate(networks):
        label = f"{name} (L = {layers}, H = {heads})"
        style: dict[str, Any] = {"color": PALETTE[k], "marker": MARKERS[k], "markersize": 4, "linewidth": 1.4}
        axes.plot(part["length"] / layers, part["share"], label=label, **style)
    axes.set(xlabel="length of the path / depth of the network", ylabel="share of all paths")
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    return figure


STUDY = Study("dong2021", "lengths", "path-length distributions", _run, seconds=5.0)
