"""Figure 2: BERT, untrained and trained, five variants under four masks.

Each network keeps its weights; parts are taken out (`VARIANTS`) and the mask is changed (`MASKS`). mu is
drawn by layer as in the paper, and beside it mu / ||X||_F: at BERT's initialisation values and outputs
together multiply tokens by about 0.3 a layer, so that mu falls without any averaging. Every network is
run as it is used, in deviation arithmetic, and as it is trained, with dropout of 0.1 in float64.
"""

import math

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope.figures import MARKERS, PALETTE, power
from rankscope.nets import Transformer
from rankscope.sources import fresh
from rankscope.studies.study import Comparison, Outcome, Setup, Study
from rankscope.studies.wu2024.drawing import by_layer, geometric, grid, key, powers_of_ten, title
from rankscope.studies.wu2024.networks import (
    COLLAPSE,
    MASKS,
    MISSING,
    VARIANTS,
    collapse,
    excerpts,
    last,
    part,
    said_of,
    tokens_of,
    trained,
)

UNTRAINED = "BERT untrained"
EQUAL = -2.0
"""log10 of mu / ||X||_F below which tokens are said to have become the same."""
TEX = {"mu": r"$\mu(X)$", "relative_mu": r"$\mu(X)\,/\,\|X\|_F$"}


def _run(setup: Setup) -> Outcome:
    number = 200 if setup.full else 2
    models = trained(setup)
    nets = {UNTRAINED: fresh("bert-base", device=setup.device), **models}
    found = pl.concat([curves(setup, name, net, number) for name, net in nets.items()])
    figures = {part(name).lower(): figure_of(found.filter(network=name), name) for name in nets}
    comparisons = [each for name in nets for each in _compared(found.filter(network=name), name)]
    notes = [
        f"{number} excerpts of 128 tokens. Lines are geometric means over them. {said_of(models)}",
        MISSING,
        "Dropout off: deviation arithmetic, which resolves any mu. Dropout on: 0.1, float64, one fixed draw.",
    ]
    return Outcome(figures, {"collapse": found}, comparisons, notes)


def curves(setup: Setup, name: str, net: Transformer, number: int) -> pl.DataFrame:
    """Every variant under every mask, with and without dropout."""
    X = tokens_of(net, excerpts(number))
    tables = [
        setup.kept(
            part(name, variant, mask, "dropout" if dropout else ""),
            lambda v=variant, m=mask, d=dropout: collapse(net, X, v, m, dropout=d),
            excerpts=number,
        )
        for variant in VARIANTS
        for mask in MASKS
        for dropout in (False, True)
    ]
    return pl.concat(tables).select(pl.lit(name).alias("network"), pl.all())


def figure_of(found: pl.DataFrame, name: str, lowest: float = -math.inf) -> Figure:
    """mu above, mu / ||X||_F below; a column for each variant, a line for each mask."""
    figure, axes = grid(2, len(VARIANTS), width=3.0, height=2.9)
    for row, measured in enumerate(COLLAPSE):
        for column, variant in enumerate(VARIANTS):
            panel = axes[row][column]
            draw(panel, found.filter(variant=variant, metric=measured), lowest)
            if row == 0:
                title(panel, variant)
            if column == 0:
                panel.set_ylabel(TEX[measured])
    key(figure, axes[0][0], name, {"dropout off": "-", "dropout on": "--"})
    return figure


def draw(axes: Axes, found: pl.DataFrame, lowest: float) -> None:
    """One metric of one variant by layer, a line for each mask."""
    depth = int(found["layer"].max())  # type: ignore[arg-type]
    for number, mask in enumerate(MASKS):
        for dropout in (False, True):
            rows = found.filter(mask=mask, dropout=dropout).sort("sample", "layer")
            if not len(rows):
                continue
            logs = rows["log10"].to_numpy().reshape(-1, depth + 1)
            axes.plot(
                range(depth + 1),
                geometric(logs),
                color=PALETTE[number],
                linewidth=1.1 if dropout else 1.7,
                linestyle="--" if dropout else "-",
                marker=None if dropout else MARKERS[number],
                markersize=3.5,
                markevery=max(1, depth // 12),
                label=None if dropout else mask,
                zorder=2 if dropout else 3,
            )
    powers_of_ten(axes, lowest)
    by_layer(axes, depth)


def _compared(found: pl.DataFrame, name: str) -> list[Comparison]:
    depth = int(found["layer"].max())  # type: ignore[arg-type]
    off = found.filter(~pl.col("dropout"))
    ends = {m: last(off, "mu", variant="SAN", mask=m) for m in MASKS}
    shares = {m: last(off, "relative_mu", variant="SAN", mask=m) for m in MASKS}
    begin = float(found.filter(metric="mu", layer=0, dropout=False)["log10"].mean())  # type: ignore[arg-type]
    order = sorted(MASKS, key=lambda mask: shares[mask])
    fallen = all(end < begin - 2 for end in ends.values())
    return [
        Comparison(
            f"{name}: SAN collapses under every mask",
            "mu falls exponentially (Thm 1)",
            f"mu from {power(begin)} to {_each(ends)} at layer {depth}; relative: {_each(shares)}",
            fallen,
            "criterion: mu falls a hundredfold. "
            + (
                "Relative to ||X||_F local masks have hardly begun: what falls is mostly the tokens' size"
                if fallen
                else f"{depth} layers are few for these masks, and trained values do not shrink tokens"
            ),
        ),
        Comparison(
            f"{name}: local masks are slower",
            "different masks have different rates, local ones smaller (Thm 1)",
            f"relative mu at layer {depth}, smallest first: {', '.join(order)}",
            order[:2] == ["complete", "causal"],
        ),
        _plateau(found, name, depth),
        _kept_apart(off, name, depth),
    ]


def _each(logs: dict[str, float]) -> str:
    return ", ".join(f"{mask} {power(log)}" for mask, log in logs.items())


def _plateau(found: pl.DataFrame, name: str, depth: int) -> Comparison:
    """The published plateau of SAN + LN belongs to dropout."""
    which = {"variant": "SAN + LN", "mask": "complete"}
    off = last(found, "relative_mu", **which, dropout=False)
    on = last(found, "relative_mu", **which, dropout=True) if found["dropout"].any() else math.nan
    ours = f"relative mu at layer {depth}: {power(off)} with dropout off, {power(on)} with dropout on"
    why = ""
    if off <= EQUAL:
        why = (
            "the plateau is dropout's: it makes tokens different in every layer. Without it LN alone does "
            "not stop the collapse under the complete mask"
        )
    if name != UNTRAINED:
        said = "LN prevents the collapse together with other parts"
        return Comparison(f"{name}: SAN + LN, complete mask", said, ours, off <= EQUAL, why)
    said = "with LN alone mu no longer goes to zero"
    return Comparison(f"{name}: SAN + LN, complete mask", said, ours, off > EQUAL, why)


def _kept_apart(off: pl.DataFrame, name: str, depth: int) -> Comparison:
    """With skips nothing collapses at this depth."""
    chosen = [variant for variant in VARIANTS if "skip" in variant or variant == "transformer"]
    least = {v: min(last(off, "relative_mu", variant=v, mask=m) for m in MASKS) for v in chosen}
    return Comparison(
        f"{name}: variants with a skip",
        "drawn, and no number given",
        f"smallest relative mu of any mask at layer {depth}: {_each(least)}",
        None,
        "none of them collapses" if all(x > EQUAL for x in least.values()) else "",
    )


FIG2 = Study(
    "wu2024",
    "fig2",
    "BERT, five variants under four masks, dropout off and on (Figure 2)",
    _run,
    seconds=62.0,
)
