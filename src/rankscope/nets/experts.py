"""Mixtures of experts: an MLP of many, of which every token goes through a few.

A router scores the experts for each token, `s = softmax(x W_r)`; the k of largest score are **chosen**, and

    mlp(x) = sum over chosen e of p_e(x) f_e(x) + g(x) f_shared(x),     f gated: (act(x W_g) * (x W_u)) W_d

with `p = s`, or s divided by its sum over the chosen (`renormalised`). The shared expert, where there is one,
takes every token, at the weight `g = sigmoid(x w)` or 1. Experts have no biases.

With the weights p and the gates act(x W_g) as they are on some tokens, all experts side by side are one gated
MLP (`side_by_side`, `gates`): that is how paths freeze a mixture.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.shapes import Float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a mixture is made of, apart from its weights.

    >>> Experts(number=8, chosen=2, width=64).chosen
    2
    """

    number: int
    chosen: int
    """Experts that each token goes through, beside the shared one."""
    width: int
    """Of the hidden layer of each."""
    renormalised: bool = False
    """The weights of the chosen are divided by their sum."""
    shared_width: int = 0
    """Of the hidden layer of the expert that takes every token; 0: there is none."""
    shared_gate: bool = False
    """The shared expert is weighed by a sigmoid of its own."""
    dense_layers: tuple[int, ...] = ()
    """Layers (0-based) with a gated MLP of the architecture's `mlp_width` in the place of the mixture."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for name, least in (("number", 1), ("chosen", 1), ("width", 1), ("shared_width", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArchitectureError(
                    f"{name} of experts must be a whole number >= {least}; got {value!r}", subject=name
                )
        if self.chosen > self.number:
            raise ArchitectureError(
                f"a token goes through at most all experts; got {self.chosen} chosen of {self.number}",
                subject="chosen",
            )
        if self.shared_gate and not self.shared_width:
            raise ArchitectureError(
                "shared_gate weighs a shared expert; got one without: give shared_width",
                subject="shared_gate",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, as JSON has it."""
        fields_by_name = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**fields_by_name, "dense_layers": list(self.dense_layers)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Experts":
        """Make the description of a mixture that `to_dict` wrote."""
        try:
            return cls(**{**given, "dense_layers": tuple(given.get("dense_layers", ()))})
        except TypeError as error:
            raise ArchitectureError(
                f"experts have {', '.join(field.name for field in fields(cls))}; got {given!r:.80}",
                subject="experts",
            ) from error


def chosen_weights(
    logits: Float[Tensor, "*batch expert"], experts: Experts
) -> Float[Tensor, "*batch expert"]:
    """p: the weight of each expert for each token, 0 of those that are not chosen."""
    top, index = logits.softmax(-1).topk(experts.chosen, -1)
    if experts.renormalised:
        top = top / top.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, index, top)


def mixed(
    X: Float[Tensor, "batch token width"],
    p: Float[Tensor, "batch token expert"],
    expert: Callable[[Tensor, int], Tensor],
) -> Float[Tensor, "batch token width"]:
    """`sum_e p_e f_e`: each expert, `expert(rows, e)`, is asked of the tokens that chose it alone."""
    total = torch.zeros_like(X)
    for e in range(p.shape[-1]):
        rows = p[..., e] > 0
        if bool(rows.any()):
            total = total.index_put((rows,), p[rows][:, e, None] * expert(X[rows], e), accumulate=True)
    return total
