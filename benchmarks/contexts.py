"""Long contexts: two layers of width 64 in float32, read through fused attention, and with entropy and the
first token's share, a block of rows at a time."""

import torch

from benchmarks.timing import Row, least_seconds
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure

TOKENS = ["relative_residual", "mu"]
ROWS = [*TOKENS, "entropy", "first_token_mass"]


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio) by the number of tokens."""
    arch = Architecture(layers=2, width=64, heads=4, mask="causal", positions="rotary")
    net, found = Transformer.random(arch, dtype=torch.float32), []
    for number in (64,) if small else (4096, 16384):
        X = torch.randn(1, number, arch.width)
        seconds = least_seconds(
            {
                "tokens": lambda X=X: measure(net, X, metrics=TOKENS, arithmetic="float32"),
                "rows": lambda X=X: measure(net, X, metrics=ROWS, arithmetic="float32"),
            },
            rounds=1 if small else 3,
        )
        against = f"metrics of tokens, {seconds['tokens']:.2f} s"
        found.append((f"{number:,} tokens, and entropy, sinks", against, seconds["rows"] / seconds["tokens"]))
    return found
