"""Figure 6: 128 layers of untrained BERT, five variants under four masks.

The question is what is left at depth, so three things are told apart that mu alone confuses: tokens that
become equal (mu / ||X||_F), tokens that shrink (mu), and an arithmetic that gives up (float32 beside
deviation arithmetic). The quick size is a narrower network, whose weights are made larger so that each
matrix multiplies as much as BERT-base's.
"""

import math
from dataclasses import replace
from typing import Any

import polars as pl

from rankscope.figures.text import power
from rankscope.nets import Transformer
from rankscope.sources.fresh import preset, untrained
from rankscope.studies.study import Comparison, Setup, Study, StudyResult
from rankscope.studies.wu2024 import networks
from rankscope.studies.wu2024.fig2 import figure_of
from rankscope.studies.wu2024.networks import MASKS, last, powers

DEPTH = 128
EQUAL = -10.0
"""log10 of mu / ||X||_F from which tokens are said to be the same."""


def _run(setup: Setup) -> StudyResult:
    samples, length, width = (4, 128, 768) if setup.full else (1, 64, 192)
    net = deep(width, setup.device)
    X = networks.tokens_of(net, networks.excerpts(samples), length)
    settings = {"excerpts": samples, "length": length, "width": width, "depth": DEPTH}
    table = networks.swept(setup, net, X, **settings)
    single = pl.concat(
        [
            setup.cached(
                networks.part("float32", mask),
                lambda m=mask: networks.collapse(net, X, "SAN", m, arithmetic="float32"),
                **settings,
            )
            for mask in MASKS
        ]
    )
    off = table.filter(~pl.col("dropout"))
    comparisons = [
        _until(off, "SAN", "collapses, local masks later", length),
        _until(off, "SAN + LN", "with LN alone mu no longer goes to zero", length),
        _with_dropout(table),
        _gain(off),
        _underflow(single),
        _skips(table),
    ]
    size = f"{samples} excerpt{'s' if samples > 1 else ''} of {length} tokens"
    narrow = "" if setup.full else ", weights N(0, 0.04) to keep each matrix's gain (--full has bert-base)"
    built = f"{DEPTH} different layers, width {width}, heads of 64{narrow}; {size}."
    notes = [built, "Nothing trained is needed. Text: Moby Dick in place of Wikipedia, under a random embedding."]
    tables = {"collapse": table, "float32": single}
    return StudyResult({"fig6": figure_of(table, "128 layers", lowest=-1e4)}, tables, comparisons, notes)


def deep(width: int, device: str = "cpu") -> Transformer:
    """128 different layers of untrained BERT; narrower ones with the same gain of each matrix."""
    arch = preset("bert-base").replace(layers=DEPTH, width=width, heads=width // 64)
    net = untrained(arch, f"bert, {DEPTH} layers", device=device)
    if width == 768:
        return net
    larger = {
        name: tensor * math.sqrt(768 / width) if name.endswith(".weight") else tensor
        for name, tensor in net.state().items()
    }
    return replace(net, weights=Transformer.from_weights(arch, larger).weights)


def layers_until(table: pl.DataFrame, variant: str, mask: str) -> int | None:
    """The first layer at which relative mu of every excerpt is below 10^EQUAL; None where there is none."""
    rows = table.filter(variant=variant, mask=mask, metric="relative_mu")
    most = rows.group_by("layer").agg(pl.col("log10").max()).filter(pl.col("log10") < EQUAL)
    return int(most["layer"].min()) if len(most) else None  # type: ignore[arg-type]


def _until(off: pl.DataFrame, variant: str, said: str, tokens: int) -> Comparison:
    layers = {mask: layers_until(off, variant, mask) for mask in MASKS}
    ends = {mask: last(off, "relative_mu", variant=variant, mask=mask) for mask in MASKS}
    words = ", ".join(
        f"{mask} {layers[mask] if layers[mask] is not None else f'not by {DEPTH} (at {power(ends[mask])})'}"
        for mask in MASKS
    )
    depths = [layers[mask] or DEPTH + 1 for mask in MASKS]
    if variant == "SAN":
        return Comparison(
            "SAN: layers until mu/||X||_F < 1e-10",
            said,
            words,
            depths[0] < depths[1] <= min(depths[2:]),
            "the complete mask falls doubly exponentially, causal exponentially; a window of one place each "
            f"side of {tokens} tokens averages only by {1 - 2 / 3 * (1 - math.cos(math.pi / tokens)):.4f} a "
            "layer",
        )
    return Comparison(
        "SAN + LN, dropout off: layers until mu/||X||_F < 1e-10",
        said,
        words,
        min(depths) > DEPTH,
        "without dropout LN alone does not stop the collapse under the complete and the causal mask",
    )


def _with_dropout(table: pl.DataFrame) -> Comparison:
    on = table.filter("dropout")
    ends = {mask: last(on, "relative_mu", variant="SAN + LN", mask=mask) for mask in MASKS}
    pure = {mask: last(on, "relative_mu", variant="SAN", mask=mask) for mask in MASKS}
    return Comparison(
        "SAN + LN, dropout on: mu/||X||_F at layer 128",
        "with LN alone mu no longer goes to zero",
        powers(ends),
        all(end > -2 for end in ends.values()),
        f"but so does SAN without LN ({powers(pure)}): dropout, not LN, holds tokens apart",
    )


def _gain(off: pl.DataFrame) -> Comparison:
    """How much of the fall of mu is the tokens' size."""
    mask = "uni-directional"
    mu, share = (last(off, name, variant="SAN", mask=mask) for name in ("mu", "relative_mu"))
    return Comparison(
        f"SAN, {mask}: mu against mu/||X||_F at layer {DEPTH}",
        "mu is drawn alone",
        f"mu {power(mu)}, relative {power(share)}: tokens shrink by {10 ** ((mu - share - 2) / DEPTH):.2f} a layer",
        None,
        "values and outputs of N(0, 0.02) multiply tokens by about 0.3: mu falls without any averaging",
    )


def _underflow(single: pl.DataFrame) -> Comparison:
    zero = single.filter(pl.col("metric") == "mu", pl.col("value") == 0)
    first: dict[str, Any] = {mask: zero.filter(mask=mask)["layer"].min() for mask in MASKS}
    words = ", ".join(f"{mask} {layer if layer is not None else 'never'}" for mask, layer in first.items())
    complete = first["complete"]
    return Comparison(
        "float32 SAN, complete mask: the first layer at which mu is exactly 0",
        "0 by layer 64 in a re-creation",
        words,
        isinstance(complete, int) and complete <= 64,
        "under the complete mask rounding makes tokens equal bit by bit; under the others tokens shrink "
        "until they underflow. From there on the curve is the arithmetic's, not the network's",
    )


def _skips(table: pl.DataFrame) -> Comparison:
    """Under the complete mask skips slow the collapse; they do not end it."""
    off, on = (networks.least_with_skips(table, dropout=dropout) for dropout in (False, True))
    kept = all(end > -1 for end in off.values())
    return Comparison(
        f"variants with a skip: smallest mu/||X||_F of any mask at layer {DEPTH}",
        "drawn, and no number given",
        f"dropout off: {powers(off)}; dropout on: {powers(on)}",
        None,
        ""
        if kept
        else "at 12 layers they stay apart; at 128 they become equal with dropout off, slowly, and most of "
        "all under the complete mask. mu of SAN + skip does not show it, for there tokens grow",
    )


FIG6 = Study("wu2024", "fig6", "128 layers of untrained BERT (Figure 6)", _run, seconds=40.0)
