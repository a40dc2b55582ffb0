"""The common token x that is subtracted: `res(X) = X - 1 x^T`.

| centre     | x                                                   | minimises                    |
|------------|-----------------------------------------------------|------------------------------|
| `mean`     | the mean token (the published code's choice)        | Frobenius and spectral norm  |
| `midrange` | half of (largest + smallest), entry by entry        | the largest entry            |
| `argmin`   | the minimiser of the norm at hand (the definition)  | that norm                    |
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.metrics.tokens import Tokens
from rankscope.shapes import Float

Centre = Literal["mean", "midrange", "argmin"]
Norm = Literal["composite", "frobenius", "spectral", "max"]

MINIMISER: dict[Norm, Centre] = {"frobenius": "mean", "spectral": "mean", "max": "midrange"}
"""Closed forms of the argmin. Spectral: `||X - 1x^T||_2 >= ||(I - 11^T/n)(X - 1x^T)||_2`, whose right
side does not depend on x and is attained at the mean."""


def closed_form(centre: Centre, norm: Norm) -> Centre:
    """The centre that is the argmin of a norm where that has a closed form, and the centre itself elsewhere."""
    if centre not in get_args(Centre):
        raise MetricError(one_of("centre", centre, get_args(Centre)), subject="centre")
    return MINIMISER.get(norm, centre) if centre == "argmin" else centre


def centred(tokens: Tokens, centre: Centre = "mean", norm: Norm = "composite") -> Float[Tensor, "*batch token width"]:
    """res(X) about the chosen centre; padded rows are zero."""
    chosen = closed_form(centre, norm)
    if chosen == "mean":
        return tokens.once("about the mean", lambda: _about(tokens, centre_of(tokens, "mean")))
    return _about(tokens, centre_of(tokens, chosen))


def _about(tokens: Tokens, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch token width"]:
    if tokens.unpadded:
        return tokens.X - x[..., None, :]
    # X is zero at padded tokens: in one pass over it, x is taken off the valid ones, 0 off the others.
    valid = tokens.valid[..., None].to(tokens.X.dtype)
    return torch.addcmul(tokens.X, valid, x[..., None, :], value=-1)


def centre_of(tokens: Tokens, centre: Centre) -> Float[Tensor, "*batch width"]:
    """The common token x; zero for a sample without tokens."""
    X, valid, count = tokens.X, tokens.valid, tokens.count
    if centre == "mean":
        return X.sum(-2) / count.clamp(min=1)[..., None]
    if centre == "midrange" and X.shape[-2]:
        hidden = ~valid[..., None]
        top = X.masked_fill(hidden, -torch.inf).amax(-2)
        bottom = X.masked_fill(hidden, torch.inf).amin(-2)
        return ((top + bottom) / 2).masked_fill((count == 0)[..., None], 0.0)
    if not X.shape[-2]:
        return X.new_zeros((*X.shape[:-2], X.shape[-1]))
    from rankscope.metrics.argmin import composite_argmin

    return composite_argmin(tokens)
