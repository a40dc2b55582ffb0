"""What certificates cost, beside a pass in deviation arithmetic: BERT-base, 2 x 64 tokens.

The norms of the weights are taken once a call, whatever the number of samples, and are most of it.
"""

import torch

from benchmarks.timing import Row, ratios
from rankscope.deviation import propagate
from rankscope.nets import Transformer, named_variant
from rankscope.sources import preset
from rankscope.theory import certify


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio)."""
    arch = preset("bert-tiny" if small else "bert-base")
    net = Transformer.random(arch)
    generator, tokens = torch.Generator().manual_seed(0), 8 if small else 64
    X = torch.randn(2, tokens, arch.width, generator=generator, dtype=torch.float64)
    found = []
    for name in ("transformer", "san"):
        variant = named_variant(net, name)
        cases = {
            "plain": lambda variant=variant: [step.layer for step in propagate(variant, X)],
            f"certify, {name}": lambda variant=variant: certify(variant, X),
        }
        found += ratios("deviation pass", cases, rounds=1 if small else 2)
    return found
