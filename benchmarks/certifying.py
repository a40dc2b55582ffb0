"""What certificates cost, beside a pass in deviation arithmetic: BERT-base, 2 x 64 tokens.

The norms of the weights are taken once a call, whatever the number of samples, and are most of it.
"""

import torch

from benchmarks.timing import Row, least_seconds
from rankscope.deviation import propagate
from rankscope.nets import Transformer, named_variant
from rankscope.sources import preset
from rankscope.theory import certify


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio)."""
    arch = preset("bert-tiny" if small else "bert-base")
    net = Transformer.random(arch)
    X = torch.randn(
        2, 8 if small else 64, arch.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = []
    for name in ("transformer", "san"):
        variant = named_variant(net, name)
        seconds = least_seconds(
            {
                "pass": lambda variant=variant: [step.layer for step in propagate(variant, X)],
                "certify": lambda variant=variant: certify(variant, X),
            },
            rounds=1 if small else 2,
        )
        against = f"deviation pass, {seconds['pass']:.2f} s"
        found.append((f"certify, {name}", against, seconds["certify"] / seconds["pass"]))
    return found
