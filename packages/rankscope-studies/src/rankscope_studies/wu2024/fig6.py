"""Figure 6: 128 layers of untrained BERT, five variants under four masks.

The question is what is left at depth, so three things are told apart that mu alone confuses: tokens that become equal
(mu / ||X||_F), tokens that shrink (mu), and an arithmetic that gives up (float32 beside deviation arithmetic). The
quick size is a narrower network, whose weights are made larger so that each matrix multiplies as much as BERT-base's.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import polars as pl

from rankscope.figures import power
from rankscope.nets import Transformer
from rankscope.sources import fresh, preset
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024 import networks
from rankscope_studies.wu2024.fig2 import figure_of
from rankscope_studies.wu2024.networks import MASKS, last, powers

EQUAL = -10.0  # log10 of mu / ||X||_F from which tokens are said to be the same
TEXTS = StudyTexts("wu2024", "fig6")


class DeepSize(NamedTuple):
    """The sizes of the deep network and of what it reads."""

    samples: int
    length: int
    width: int
    depth: int = 128


QUICK, FULL = DeepSize(1, 64, 192), DeepSize(4, 128, 768)


def _run(setup: Setup, size: DeepSize | None = None) -> StudyResult:
    samples, length, width, depth = size = size or (FULL if setup.full else QUICK)
    net = deep(width, depth, setup.device)
    X = networks.tokens_of(net, networks.excerpts(samples), length)
    settings = {"excerpts": samples, "length": length, "width": width, "depth": depth}
    table = networks.swept(setup, net, X, **settings)
    parts = {
        networks.file_name("float32", mask): partial(networks.collapse, net, X, "SAN", mask, arithmetic="float32")
        for mask in MASKS
    }
    single, off = setup.cached_parts(parts, **settings), table.filter(~pl.col("dropout"))
    comparisons = [
        _pure_attention(off, size), _with_norm(off, depth), _with_dropout(table), _gain(off, depth), _underflow(single),
        _skips(table, depth),
    ]  # fmt: skip
    notes = TEXTS.notes(
        depth=depth, width=width, narrow="" if setup.full else TEXTS.sentence("narrow"), length=length,
        samples=f"{samples} excerpt{'s' if samples > 1 else ''}",
    )  # fmt: skip
    tables = {"collapse": table, "float32": single}
    return StudyResult({"fig6": figure_of(table, f"{depth} layers", lowest=-1e4)}, tables, comparisons, notes)


def deep(width: int, depth: int, device: str = "cpu") -> Transformer:
    """Different layers of untrained BERT; narrower ones with the same gain of each matrix."""
    arch = preset("bert-base").replace(layers=depth, width=width, heads=width // 64)
    net = fresh(arch, device=device, name=f"bert, {depth} layers")
    if width == 768:
        return net
    gain = math.sqrt(768 / width)
    larger = {name: tensor * gain if name.endswith(".weight") else tensor for name, tensor in net.state_dict().items()}
    return replace(net, weights=Transformer.from_weights(arch, larger).weights)


def layers_until(table: pl.DataFrame, variant: str, mask: str) -> int | None:
    """The first layer at which relative mu of every excerpt is below 10^EQUAL; None where there is none."""
    rows = table.filter(variant=variant, mask=mask, metric="relative_mu")
    most = rows.group_by("layer").agg(pl.col("log10").max()).filter(pl.col("log10") < EQUAL)
    return int(most["layer"].min()) if len(most) else None  # type: ignore[arg-type]


def _until(off: pl.DataFrame, variant: str, depth: int) -> tuple[str, list[int]]:
    """By mask the layers until tokens are equal, in words and as numbers; one more than there are if they never are."""
    words, depths = [], []
    for mask in MASKS:
        layers, end = layers_until(off, variant, mask), last(off, "relative_mu", variant=variant, mask=mask)
        words.append(f"{mask} {layers if layers is not None else f'not by {depth} (at {power(end)})'}")
        depths.append(layers or depth + 1)
    return ", ".join(words), depths


def _pure_attention(off: pl.DataFrame, size: DeepSize) -> Comparison:
    words, depths = _until(off, "SAN", size.depth)
    averaged = 1 - 2 / 3 * (1 - math.cos(math.pi / size.length))
    agrees = depths[0] < depths[1] <= min(depths[2:])
    return TEXTS.compare("pure", agrees, layers=words, tokens=size.length, averaged=averaged)


def _with_norm(off: pl.DataFrame, depth: int) -> Comparison:
    words, depths = _until(off, "SAN + LN", depth)
    return TEXTS.compare("norm", min(depths) > depth, layers=words)


def _with_dropout(table: pl.DataFrame) -> Comparison:
    ends, pure = (
        {mask: last(table.filter("dropout"), "relative_mu", variant=variant, mask=mask) for mask in MASKS}
        for variant in ("SAN + LN", "SAN")
    )
    return TEXTS.compare("dropout", all(end > -2 for end in ends.values()), ends=powers(ends), pure=powers(pure))


def _gain(off: pl.DataFrame, depth: int) -> Comparison:
    """How much of the fall of mu is the tokens' size."""
    mask = "uni-directional"
    mu, share = (last(off, name, variant="SAN", mask=mask) for name in ("mu", "relative_mu"))
    shrink = 10 ** ((mu - share - 2) / depth)
    return TEXTS.compare("gain", None, mask=mask, depth=depth, mu=power(mu), share=power(share), shrink=shrink)


def _underflow(single: pl.DataFrame) -> Comparison:
    zero = single.filter(pl.col("metric") == "mu", pl.col("value") == 0)
    first = {mask: min(zero.filter(mask=mask)["layer"], default=None) for mask in MASKS}
    words = ", ".join(f"{mask} {'never' if layer is None else layer}" for mask, layer in first.items())
    return TEXTS.compare("underflow", first["complete"] is not None and first["complete"] <= 64, layers=words)


def _skips(table: pl.DataFrame, depth: int) -> Comparison:
    """Under the complete mask skips slow the collapse; they do not end it."""
    off, on = (networks.least_with_skips(table, dropout=dropout) for dropout in (False, True))
    why = "" if all(end > -1 for end in off.values()) else TEXTS.sentence("skips", "equal")
    return TEXTS.compare("skips", None, depth=depth, off=powers(off), on=powers(on), why=why)


STUDY = Study("wu2024", "fig6", "128 layers of untrained BERT (Figure 6)", _run, seconds=40.0)
