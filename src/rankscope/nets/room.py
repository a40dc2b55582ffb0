"""How much memory a network needs, and whether this machine has it: asked before anything is built."""

import math
import os

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import Architecture
from rankscope.nets.tensors import layer_shapes

FLOAT64 = 8
"""Bytes."""
OBJECTS = 5_000
"""Bytes that a layer takes beside its numbers, at least."""


def machine_memory() -> int:
    """Bytes of this machine's memory; without a limit where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**63


def refuse_too_large(arch: Architecture) -> None:
    """A sentence where the weights alone do not fit into memory in float64."""
    layer = sum(math.prod(shape) for shape in layer_shapes(arch, 0).values())
    needed = (1 if arch.shared else arch.layers) * (layer * FLOAT64 + OBJECTS)
    if needed > machine_memory():
        raise ArchitectureError(
            f"a network must fit into memory; {arch.layers} layers of width {arch.width} take {size(needed)} "
            f"in float64 and this machine has {size(machine_memory())}: fewer layers, or a smaller width"
        )


def size(number: int) -> str:
    """Bytes as people write them.

    >>> size(3 * 10**12)
    '3,000 GB'
    """
    return f"{number / 1e9:,.0f} GB" if number >= 1e9 else f"{number / 1e6:,.0f} MB"
