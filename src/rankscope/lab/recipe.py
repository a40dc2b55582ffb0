"""How a network of the lab is trained."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """AdamW, a warm-up, then a cosine down to nothing."""

    steps: int = 600
    batch: int = 16
    rate: float = 1e-3
    warmup: float = 0.05
    """The share of all steps in which the rate rises."""
    decay: float = 0.01
    clip: float = 1.0
    """The longest gradient."""
    seed: int = 0
    every: int = 20
    """Steps between looks."""
    keep_every: int = 100
    """Steps between checkpoints."""


def pace(step: int, steps: int, warmup: float) -> float:
    """The share of the rate at a step: a straight rise, then half a cosine."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
