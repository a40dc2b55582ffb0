"""What a run directory holds for the report beside its numbers: the token cloud and the singular values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer

VARIANTS = 4
"""So many are drawn, and the whole network is among them."""


def pictures(
    net: "Transformer",
    variants: Sequence[str],
    X: "Tensor",
    padding: "Tensor",
    texts: Sequence[str],
    tokens: int,
    quiet: bool,
) -> "dict[str, pl.DataFrame]":
    """Tables by their known names. `texts` are those that X was encoded from."""
    from rankscope.cli.show import progress
    from rankscope.nets import named_variant
    from rankscope.profiles.cloud import cloud
    from rankscope.profiles.spectra import spectra

    chosen = list(variants)[:VARIANTS]
    if "transformer" in variants and "transformer" not in chosen:
        chosen[-1] = "transformer"
    nets = {name: named_variant(net, name) for name in chosen}
    with progress(quiet) as start:
        start("token cloud, singular values")
        return {
            "cloud": cloud(nets, X, padding, net.words(texts[:1], tokens)),
            "spectrum": spectra(nets, X, padding, samples=2),
        }
