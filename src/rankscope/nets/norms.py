"""Normalisation of each token: centred or not, divided by its length, then gain and bias.

| norm    | of a token x of width d                                      |
|---------|--------------------------------------------------------------|
| `layer` | `(x - mean x) / sqrt(var x + eps)`, then gain and bias       |
| `rms`   | `x / sqrt(|x|^2 / d + eps)`, then gain                       |
| `scale` | `x / sqrt(|x|^2 + eps)` (Wu et al. 2024: `LN(X) = D X`)      |
| `none`  | x                                                            |

Your own norm is a `Norm`, made as those in `NORMS` are. To add a built-in one, add it to that list.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from torch import Tensor

from rankscope.shapes import Float

Tokens = Float[Tensor, "*batch width"]
Length = Float[Tensor, "*batch 1"]


@dataclass(frozen=True)
class NormWeights:
    """The gain and bias of a norm, `gain * normalised + bias`; either may be absent."""

    gain: Float[Tensor, " width"] | None = None
    bias: Float[Tensor, " width"] | None = None


UNWEIGHTED = NormWeights()


@runtime_checkable
class NormOperations(Protocol):
    """What deviation arithmetic offers to the deviation rule of a norm (`deviation/norms.py`)."""

    def root_mean_square(self, state: Any, eps: float, *, centred: bool, averaged: bool) -> Any:
        """Divide every token by the root of its (mean) square and eps, after taking its mean off if `centred`."""


DeviationNorm = Callable[[Any, float, NormOperations], Any]
"""The rule of a norm in deviation arithmetic: (state, eps, operations) to a state, before gain and bias."""


@final
@dataclass(frozen=True)
class Norm:
    """A kind of norm: `x -> (x - mean x) / length(x)`, or without the mean.

    >>> import torch
    >>> largest = Norm("largest", length=lambda x, eps: x.abs().amax(-1, keepdim=True) + eps)
    >>> normalise(torch.tensor([1.0, -4.0]), largest, NormWeights(), eps=0.0)
    tensor([ 0.2500, -1.0000])
    """

    name: str  # What files and messages call it
    centred: bool = False  # Whether the token's mean is taken off first
    averaged: bool = True  # Whether the usual length is a root mean square, `sqrt(|x|^2 / d + eps)`; else the 2-norm
    gain: bool = True  # Whether the norm has a gain among a network's weights
    bias: bool = False  # Whether it has a bias there
    length: Callable[[Tokens, float], Length] | None = None
    """A length of its own: (centred tokens, eps) to `[..., 1]`, never zero. None: the usual one."""
    deviation: DeviationNorm | None = None
    """The rule of such a length in deviation arithmetic. Without one, networks with it are measured in float64."""

    @property
    def deviation_rule(self) -> DeviationNorm | None:
        """The rule of this norm in deviation arithmetic; None for a `length` that came without one."""
        return self.deviation if self.deviation or self.length else self._usual_deviation

    def _usual_deviation(self, state: Any, eps: float, operations: NormOperations) -> Any:
        return operations.root_mean_square(state, eps, centred=self.centred, averaged=self.averaged)

    def centre(self, x: Tokens) -> Tokens:
        """Take the mean of each token off, if this norm does so."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def divisor(self, x: Tokens, eps: float) -> Length:
        """Return what each (centred) token is divided by; 1 for a token of length zero, which stays zero, and NaN where
        the square of a finite number overflows: divided by infinity, such a token would become zero and look measured.
        """
        if self.length is not None:
            return self.length(x, eps)
        square = x.square().sum(-1, keepdim=True)
        variance = square / x.shape[-1] + eps if self.averaged else square + eps
        return variance.masked_fill(variance == 0, 1.0).masked_fill(variance.isinf(), math.nan).sqrt()


NORMS: dict[str, Norm] = {
    norm.name: norm
    for norm in (Norm("layer", centred=True, bias=True), Norm("rms"), Norm("scale", averaged=False, gain=False))
}


def norm_of(kind: str | Norm) -> Norm | None:
    """Return the norm of a name, or the norm itself; None of 'none'."""
    return NORMS.get(kind) if isinstance(kind, str) else kind


def normalise(x: Tokens, kind: str | Norm, weights: NormWeights, eps: float) -> Tokens:
    """Normalise each token, then apply gain and bias."""
    norm = norm_of(kind)
    if norm is None:
        return x
    x = norm.centre(x)
    x = x / norm.divisor(x, eps)
    if weights.gain is not None:
        x = x * weights.gain
    return x if weights.bias is None else x + weights.bias
