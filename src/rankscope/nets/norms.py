"""Normalisation of each token, by kind.

| norm    | of a token x of width d                                      |
|---------|--------------------------------------------------------------|
| `layer` | `(x - mean x) / sqrt(var x + eps)`, then gain and bias       |
| `rms`   | `x / sqrt(|x|^2 / d + eps)`, then gain                       |
| `scale` | `x / sqrt(|x|^2 + eps)` (Wu et al. 2024: `LN(X) = D X`)      |
| `none`  | x                                                            |
"""

from jaxtyping import Float
from torch import Tensor

from rankscope.nets.architecture import Norm
from rankscope.nets.weights import NormWeights

Tokens = Float[Tensor, "*batch width"]


def normalise(x: Tokens, kind: Norm, weights: NormWeights, eps: float) -> Tokens:
    """Each row of x, normalised."""
    if kind == "none":
        return x
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    square = x.square().sum(-1, keepdim=True)
    variance = square + eps if kind == "scale" else square / x.shape[-1] + eps
    x = x / variance.masked_fill(variance == 0, 1.0).sqrt()  # a token of length zero stays zero
    if weights.gain is not None:
        x = x * weights.gain
    return x if weights.bias is None else x + weights.bias
