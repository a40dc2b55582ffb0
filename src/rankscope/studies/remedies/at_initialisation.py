"""At initialisation: the same random weights with each remedy, whole and without skips, at three depths."""

import math

import polars as pl

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.studies.study import Setup

DEPTHS = (12, 48, 128)
WHOLE, BARE = "whole", "no skips"
VARIANTS = {WHOLE: "transformer", BARE: "transformer-skip"}
PLACES = ("post", "pre")
"""Where norms stand: remedies were made for one or the other."""
WIDTH, HEADS, TOKENS, SAMPLES = 64, 4, 32, 2
INIT = "xavier"
METRIC = "relative_residual"
NONE = "none"
"""The network without a remedy."""
SCHEMA = {
    "remedy": pl.String, "norm_place": pl.String, "depth": pl.Int64, "variant": pl.String, "seed": pl.Int64,
    "layer": pl.Int64, "log10": pl.Float64, "marked": pl.Boolean, "arithmetic": pl.String,
    "refused": pl.String, "note": pl.String,
}  # fmt: skip
NETWORK = ("remedy", "norm_place", "variant", "depth")
SECONDS = 0.02
"""A layer of one variant takes, on one core: what is said before, not what is promised."""
ZERO = "every token is zero: nothing is left that could differ"


def depths(full: bool) -> tuple[int, ...]:
    """All three at full size, else the first two."""
    return DEPTHS if full else DEPTHS[:-1]


def part(setup: Setup, remedy: str, norm_place: str, depth: int, seed: int) -> pl.DataFrame:
    """log10 of the relative residual after each layer, the mean over samples, in deviation arithmetic.
    `marked`: two passes that round otherwise differ on it in some sample. `refused` says why a remedy does
    not go onto this network, `note` what else a reader should know."""
    name = f"initial-{remedy.replace(':', '-').replace(',', '-')}-{norm_place}-{depth}-{seed}"
    settings = {"remedy": remedy, "place": norm_place, "depth": depth, "seed": seed, "size": (WIDTH, HEADS, TOKENS)}
    return setup.cached(name, lambda: measured(remedy, norm_place, depth, seed, setup.device), **settings)


def network(norm_place: str, depth: int, seed: int) -> Transformer:
    """The one that all remedies go onto."""
    arch = Architecture(layers=depth, width=WIDTH, heads=HEADS, norm_place=norm_place)  # type: ignore[arg-type]
    return Transformer.random(arch, seed=seed, init=INIT)


def measured(remedy: str, norm_place: str, depth: int, seed: int, device: str = "cpu") -> pl.DataFrame:
    """The table that `part` caches."""
    labels = {"remedy": remedy, "norm_place": norm_place, "depth": depth, "seed": seed}
    net = network(norm_place, depth, seed)
    try:
        net = net if remedy == NONE else net.with_remedy(remedy)
    except ArchitectureError as refused:
        return pl.DataFrame([labels | {"refused": str(refused)}], schema=SCHEMA)
    X, padding = word_tokens(bundled_excerpts(TOKENS)[:SAMPLES], WIDTH, TOKENS)
    rows: list[dict[str, object]] = []
    for name, variant in VARIANTS.items():
        which = net.to(device=device).variant(variant)
        profile = measure(which, X, padding, METRIC)
        curve = profile.curve(METRIC, "log10").mean(0).tolist()
        at = profile.table.group_by("layer").agg(pl.col("below_floor").any()).sort("layer")["below_floor"]
        gone = math.isinf(curve[-1]) and not bool(which.run(X.to(which.dtype), padding).states[-1].any())
        rows += [
            labels | {"variant": name, "layer": layer, "log10": value, "marked": bool(marked),
                     "arithmetic": profile.arithmetics[0], "note": ZERO if gone and layer else None}
            for layer, (value, marked) in enumerate(zip(curve, at, strict=True))
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
