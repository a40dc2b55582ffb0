"""Normalisation of each token: taken about its mean or not, divided by its length, then gain and bias.

| norm    | of a token x of width d                                      |
|---------|--------------------------------------------------------------|
| `layer` | `(x - mean x) / sqrt(var x + eps)`, then gain and bias       |
| `rms`   | `x / sqrt(|x|^2 / d + eps)`, then gain                       |
| `scale` | `x / sqrt(|x|^2 + eps)` (Wu et al. 2024: `LN(X) = D X`)      |
| `none`  | x                                                            |

A norm of one's own is a `Norm` with a `length` of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankscope.shapes import Float

Tokens = Float[Tensor, "*batch width"]
Length = Float[Tensor, "*batch 1"]


@dataclass(frozen=True)
class NormWeights:
    """`gain * normalised + bias`; either may be absent, and a scale-only norm has neither."""

    gain: Float[Tensor, " width"] | None = None
    bias: Float[Tensor, " width"] | None = None


UNWEIGHTED = NormWeights()


@dataclass(frozen=True)
class Norm:
    """A kind of norm.

    >>> import torch
    >>> largest = Norm("largest", length=lambda x, eps: x.abs().amax(-1, keepdim=True) + eps)
    >>> normalise(torch.tensor([1.0, -4.0]), largest, NormWeights(), eps=0.0)
    tensor([ 0.2500, -1.0000])
    """

    name: str
    centred: bool = False
    """Whether the token's mean is taken off first."""
    averaged: bool = True
    """Whether the length is a root mean square; else the 2-norm."""
    gain: bool = True
    bias: bool = False
    length: Callable[[Tokens, float], Length] | None = None
    """In place of the root of the (mean) square and eps: what a token is divided by, never zero."""
    deviation: Callable[[Any, float], Any] | None = None
    """Its rule in deviation arithmetic: a state and eps to a state, before gain and bias. A norm with a
    length of its own has none unless it is given here."""

    def centre(self, x: Tokens) -> Tokens:
        """x about its mean, where that is taken off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def divisor(self, x: Tokens, eps: float) -> Length:
        """What each (centred) token is divided by; one for a token of length zero, which stays zero."""
        if self.length is not None:
            return self.length(x, eps)
        square = x.square().sum(-1, keepdim=True)
        variance = square / x.shape[-1] + eps if self.averaged else square + eps
        return variance.masked_fill(variance == 0, 1.0).sqrt()


NORMS: dict[str, Norm] = {
    norm.name: norm
    for norm in (
        Norm("layer", centred=True, bias=True),
        Norm("rms"),
        Norm("scale", averaged=False, gain=False),
    )
}


def norm_of(kind: str | Norm) -> Norm | None:
    """The norm of a name, or itself; None of 'none'."""
    return NORMS.get(kind) if isinstance(kind, str) else kind


def normalise(x: Tokens, kind: str | Norm, weights: NormWeights, eps: float) -> Tokens:
    """Each row of x, normalised."""
    norm = norm_of(kind)
    if norm is None:
        return x
    x = norm.centre(x)
    x = x / norm.divisor(x, eps)
    if weights.gain is not None:
        x = x * weights.gain
    return x if weights.bias is None else x + weights.bias
