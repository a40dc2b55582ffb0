"""What certificates cost, beside a pass in deviation arithmetic: BERT-base, 2 x 64 tokens.

The norms of the weights are taken once, at the first call, which is not timed: beside it is what they cost.
"""

import torch

from benchmarks.timing import Row, ratios
from rankscope.deviation import propagate
from rankscope.nets import Transformer, active_heads
from rankscope.sources import preset
from rankscope.theory import MLPNorms, certify
from rankscope.theory.weight_norms import HeadNorms


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio)."""
    arch = preset("bert-tiny" if small else "bert-base")
    net = Transformer.random(arch)
    generator, tokens = torch.Generator().manual_seed(0), 8 if small else 64
    X = torch.randn(2, tokens, arch.width, generator=generator, dtype=torch.float64)
    found = []
    for name in ("transformer", "san"):
        variant = net.variant(name)
        cases = {
            "plain": lambda variant=variant: [step.layer for step in propagate(variant, X)],
            f"certify, {name}": lambda variant=variant: certify(variant, X),
            f"norms of the weights, {name}": lambda variant=variant: _norms(variant),
        }
        found += ratios("deviation pass", cases, rounds=1 if small else 2)
    return found


def _norms(net: Transformer) -> list[tuple[HeadNorms, MLPNorms]]:
    """As the first call takes them."""
    arch, layers = net.arch, net.weights.layers
    heads = [HeadNorms.of_layers(arch, active_heads(arch, index), [layer])[0] for index, layer in enumerate(layers)]
    return list(zip(heads, [MLPNorms.of_layers(arch, [layer])[0] for layer in layers], strict=True))
