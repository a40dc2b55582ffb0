"""How long passes will take, estimated before they start.

A pass of n tokens through a layer multiplies and adds

    n (numbers in its weight matrices) + 2 n^2 heads head_width

times, and goes `ENTRY` such operations' time over each entry of attention and of what its parts give. Divided
by how many of these this machine does a second in a product of matrices, and times what the arithmetic costs
beside a plain pass (`PASSES`), that is the time, within a factor of two; files that are read on the way take
longer.
"""

import math
import time
from functools import cache

import torch

from rankscope.nets.architecture import Architecture
from rankscope.nets.tensors import layer_shapes

PASSES = {"float": 1.2, "deviation": 2.6, "checked": 4.6, "confirm": 80.0}
"""As measured on one core, with metrics of tokens; "checked" has the second pass beside deviation."""
ENTRY = 300
"""Multiplications and additions in the time of what happens to an entry beside products."""
SIDE = {"cpu": 384}
"""Of the matrices whose product is timed; elsewhere 4,096, less is done before the next is asked for."""


def seconds(
    arch: Architecture, samples: int, tokens: int, kind: str, dtype: torch.dtype, device: torch.device
) -> float:
    """The estimate for a pass of a kind of `PASSES` over samples of so many tokens."""
    entries = tokens**2 * arch.heads + tokens * (4 * arch.width + arch.mlp_width)
    beside = ENTRY * samples * arch.layers * entries
    # Products of narrow numbers may be many times as fast; what goes over entries is not.
    fast = min(rate(each, device) for each in {dtype, torch.promote_types(dtype, torch.float32)})
    return PASSES[kind] * (multiply_adds(arch, samples, tokens) + beside) / fast


def multiply_adds(arch: Architecture, samples: int, tokens: int) -> float:
    """Of the products of a plain pass."""
    attention = tokens**2 * arch.heads * (arch.head_width + arch.value_width)
    return samples * sum(tokens * _numbers(arch, index) + attention for index in range(arch.layers))


def _numbers(arch: Architecture, index: int) -> float:
    """That a token meets in the matrices of a layer: of experts, those it is sent to."""
    shapes, experts = layer_shapes(arch, index), arch.experts
    found = {name: math.prod(shape) for name, shape in shapes.items() if name.endswith(".weight")}
    if experts is None:
        return sum(found.values())
    routed = sum(found.get(f"experts.{name}.weight", 0) for name in ("up", "gate", "down"))
    return sum(found.values()) - routed * (1 - experts.chosen / experts.number)


@cache
def rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiplications and additions of a product of matrices that this machine does in a second: timed, the
    least of three."""
    side = SIDE.get(device.type, 4096)
    A = torch.ones(side, side, dtype=dtype, device=device)
    took = math.inf
    for _ in range(4):  # the first may have to wake something
        start = time.perf_counter()
        float((A @ A)[0, 0])
        took = min(took, time.perf_counter() - start)
    return side**3 / max(took, 1e-9)


def in_words(duration: float) -> str:
    """As people say it.

    >>> in_words(170), in_words(40), in_words(9000)
    ('about 3 minutes', 'about 40 seconds', 'about 2.5 hours')
    """
    if duration < 90:
        return f"about {duration:.0f} seconds"
    if duration < 90 * 60:
        return f"about {duration / 60:.0f} minutes"
    return f"about {duration / 3600:.2g} hours"
