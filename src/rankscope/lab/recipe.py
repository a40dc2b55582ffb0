"""How a network of the lab starts and how it is trained."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The training of a network: AdamW, a warm-up, then a cosine down to zero.

    >>> recipe = Recipe(steps=100, warmup=0.1)
    >>> [round(recipe.lr_scale(step), 2) for step in (0, 4, 9, 55, 99)]
    [0.1, 0.5, 1.0, 0.5, 0.0]
    """

    steps: int = 600
    batch: int = 16
    lr: float = 1e-3
    warmup: float = 0.05  # The share of all steps in which the learning rate rises
    weight_decay: float = 0.01  # Decoupled; of matrices and tables alone
    max_norm: float = 1.0  # The longest gradient: longer ones are scaled down to it
    seed: int = 0
    measure_every: int = 20  # Steps between measurements of the monitor
    checkpoint_every: int = 100  # Steps between checkpoints
    frozen: tuple[str, ...] = ()  # Parameters that stay as they start, by the last part of their names: `("gain",)`

    def lr_scale(self, step: int) -> float:
        """The share of the learning rate at a step: a straight rise, then half a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


@dataclass(frozen=True)
class Initialisation:
    """What networks are before they learn."""

    scheme: str = "xavier/sqrt(L)"  # A scheme of `nets/initial.py`
    embedding_std: float | None = None
    """Standard deviation of the entries of embedding and positions; `1 / sqrt(width)` if left out."""
    dropout: float = 0.0  # The chance that an entry is zero in training (`nets/dropout.py`)
    sigma_reparam: str | None = None
    """What the g of sigmaReparam starts from, "sigma" or "one" (`sigma_reparam.py`); None: without it."""
    gains: tuple[tuple[str, float], ...] = ()
    """Factors of weights as drawn, by the end of their names: `(("attention.query.weight", 2.0),)`."""
