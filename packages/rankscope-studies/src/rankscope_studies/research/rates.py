"""How fast tokens become the same: the table of `docs/deviation.md`. `python -m rankscope_studies.research.rates`."""

from collections.abc import Iterator
from typing import Any

import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("complete mask", "san", {}),
    ("causal", "san", {"mask": "causal"}),
    ("window of 8 on each side", "san", {"mask": "window:8"}),
    ("window of 2 on each side", "san", {"mask": "window:2"}),
    ("self and previous", "san", {"mask": "unidirectional"}),
    ("rotary positions", "san", {"positions": "rotary"}),
    ("relative positions (Transformer-XL)", "san", {"positions": "relative"}),
    ("position bias (T5)", "san", {"positions": "bias"}),
    ("ALiBi", "san", {"positions": "alibi"}),
    ("complete, LayerNorm", "san+norm", {}),
    ("causal, LayerNorm", "san+norm", {"mask": "causal"}),
    ("complete, scale-only norm", "san+norm", {"norm": "scale"}),
    ("causal, scale-only norm", "san+norm", {"norm": "scale", "mask": "causal"}),
    ("rotary, LayerNorm", "san+norm", {"positions": "rotary"}),
    ("complete, MLP", "san+mlp", {}),
    ("complete, skip", "san+skip", {}),
    ("complete, skip, LayerNorm", "san+skip+norm", {}),
]
LAYERS = (4, 8, 16, 48)


def rows(small: bool = False) -> Iterator[tuple[str, list[float], float, float]]:
    """(network, log10 of the relative residual at `LAYERS`, decades lost a layer over 8-16, over 40-48).

    48 random layers of width 64, 4 heads, 32 tokens, xavier weights, no dropout; mean over 4 samples."""
    width, tokens = (16, 8) if small else (64, 32)
    X = torch.randn(4, tokens, width, generator=torch.Generator().manual_seed(0))
    for label, variant, change in ROWS[:: 9 if small else 1]:
        arch = Architecture(layers=48, width=width, heads=4, **change)
        net = Transformer.random(arch, init="xavier").variant(variant)
        log10 = measure(net, X, metrics="relative_residual").curve("relative_residual", "log10").mean(0)
        early, late = float(log10[8] - log10[16]) / 8, float(log10[40] - log10[48]) / 8
        yield label, [float(log10[layer]) for layer in LAYERS], early, late


def main() -> None:
    """The table in Markdown."""
    print("| network | layer 4 | layer 8 | layer 16 | layer 48 | a layer, 8-16 | a layer, 40-48 |")
    print("|---|---|---|---|---|---|---|")
    for label, log10, early, late in rows():
        values = " | ".join(f"{each:.3g}" for each in log10)
        print(f"| {label} | {values} | {early:.2g} | {late:.2g} |")


if __name__ == "__main__":
    main()
