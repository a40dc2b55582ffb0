"""`GradientProfile`: what `gradients.py` reads, the sizes of gradients by layer, and exponents made of them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.shapes import Bool, Float


class LogReadings(NamedTuple):
    """Numbers by layer, as log10 of their size: -inf of a zero."""

    log10: Float[Tensor, " layer"]
    below_floor: Bool[Tensor, " layer"]  # True where rounding decided: the number is **marked**

    @property
    def known(self) -> Float[Tensor, " layer"]:
        """Natural logs, NaN where they are marked."""
        return self.log10.masked_fill(self.below_floor, torch.nan) * math.log(10)


class Exponents(NamedTuple):
    """By how much a layer multiplies gradients and angles, as natural logs; NaN where readings are marked."""

    gradient: float  # lambda_g, the mean of `gradients`: (1/L) log(|dX_0|^2 / |dX_L|^2)
    angle: float  # the mean of `angles`
    gradients: Float[Tensor, " layer"]  # of layers 1 to L: log(|dX_{l-1}|^2 / |dX_l|^2)
    angles: Float[Tensor, " layer"]  # lambda_a of layers 1 to L: log[(1 - p'/q') / (1 - p/q)]


@dataclass(frozen=True)
class GradientProfile:
    """Norms of gradients of one loss, the sum over samples, and how far apart tokens are.

    Args:
        tokens: Of the tokens at layer 0 (the input) to L, over all samples.
        weights: By kind (`KINDS` of `gradients.py`), of weights of layers 1 to L; kinds that no layer has are left out.
        separation: `1 - p/q` at layer 0 to L: q the mean square of tokens, p the mean product of two of a sample.
    """

    tokens: LogReadings
    weights: dict[str, LogReadings]
    separation: LogReadings

    def exponents(self) -> Exponents:
        """The exponents of Cowsik et al. 2024: of gradients at tokens and of the angle between them.

        Theirs of gradients, `(1/L) log |d<X_L, R>/dX_0|^2`, contains `(1/L) log |R|^2`, which is taken off here; so
        is what the final norm does, which is no layer."""
        gradients, angles = -2 * self.tokens.known.diff(), self.separation.known.diff()
        return Exponents(float(gradients.mean()), float(angles.mean()), gradients, angles)
