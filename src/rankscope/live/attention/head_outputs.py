"""Arithmetic of heads that the observers share: shapes, products, and checks that parts add up.

With the pattern P_h, the values V_h and the rows W_h of the output projection that belong to head h, a head's
output is `P_h V_h` and what it adds to the hidden states `P_h V_h W_h`. Called by the observers of this
folder and by `output_projection.py`.
"""

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.metrics.tokens import unit_of
from rankscope.shapes import Float

CLOSURE = 1e-3
"""The largest relative miss of a sum of parts; half precision may miss by `ROUNDINGS` of its eps."""
ROUNDINGS = 8.0


def by_head(x: Tensor) -> Tensor:
    """`[batch, head, token, ...]`: adds the axis of a lone sample or head, and flattens groups of heads."""
    if x.ndim < 4:
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.flatten(1, -3)


def weight_of(projection: nn.Module) -> Float[Tensor, "in out"]:
    """The matrix W of a linear layer that computes `x W`; a Conv1D of transformers stores it so."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if type(projection).__name__ == "Conv1D" else weight.detach().mT


def contributions_of(
    head_outputs: Float[Tensor, "batch token head d"], weight: Float[Tensor, "in out"]
) -> Float[Tensor, "batch head token out"]:
    """What each head adds, `P_h V_h W_h`, in float64; `weight` is the output projection's, head by head."""
    W = weight.to(torch.float64).reshape(*head_outputs.shape[-2:], -1)  # [head, d, width]
    return head_outputs.to(torch.float64).transpose(1, 2) @ W


def check_contributions(contributions: Tensor, bias: Tensor | None, output: Tensor, where: str) -> None:
    """Refuse contributions whose sum, with the bias, is not the output of the projection `where`."""
    total = contributions.sum(1) if bias is None else contributions.sum(1) + bias.detach().to(torch.float64)
    miss = _relative_miss(total, output.detach().to(torch.float64).reshape(total.shape), 1e-300)
    if bool(miss > _allowed(output)):  # never where there is NaN: a broken sample is marked elsewhere
        raise WatchError(
            f"what the heads of {where} add must sum to its output; it misses by {float(miss):.1e} of its "
            "size: its output projection is not a plain linear map, watch metrics of tokens or attention",
            subject="heads",
        )


def check_pattern(pattern: Tensor, values: Tensor, output: Tensor, what: str) -> None:
    """Refuse a pattern that, times the values, is not the output that attention gave; `what` says whose."""
    expected = output.detach().to(pattern.dtype)
    miss = _relative_miss(pattern @ values.to(pattern.dtype), expected, 1e-30)
    if bool(miss > _allowed(output)):
        raise WatchError(
            f"the attention pattern times the values must be what {what} gave; it misses by "
            f"{float(miss):.1e} of its size, as a pattern changed in place does: watch metrics of tokens",
            subject="pattern",
        )


def _relative_miss(x: Tensor, expected: Tensor, least: float) -> Tensor:
    return (x - expected).norm() / expected.norm().clamp(min=least)


def _allowed(output: Tensor) -> float:
    return max(CLOSURE, ROUNDINGS * unit_of(output.dtype))
