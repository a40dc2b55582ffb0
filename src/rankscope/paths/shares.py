"""What a term is of the whole: its share and its direction."""

import torch
from torch import Tensor

from rankscope.metrics.residuals import frobenius_norm
from rankscope.metrics.tokens import Values
from rankscope.shapes import Float

Tokens = Float[Tensor, "batch token width"]


def share(term: Tokens, whole: Tokens) -> Values:
    """`<term, whole> / <whole, whole>`: shares of terms that add up to the whole add up to one."""
    size = frobenius_norm(whole.double())
    return (_divided(term, size) * _divided(whole, size)).sum((1, 2))


def cosine(term: Tokens, whole: Tokens) -> Values:
    """`<term, whole> / (||term|| ||whole||)`; 0 where either is zero."""
    term, whole = (_divided(tensor, frobenius_norm(tensor.double())) for tensor in (term, whole))
    return (term * whole).sum((1, 2))


def _divided(X: Tokens, size: Values) -> Tokens:
    """X / size before anything is multiplied: products of small numbers would leave the range."""
    safe = size.masked_fill(size == 0, torch.inf)
    return X.double() / safe[:, None, None]
