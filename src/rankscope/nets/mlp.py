"""What the MLP of a block is made of: nonlinearities by name, and mixtures of experts.

In a mixture, a router scores the experts for each token, `s = softmax(x W_r)`, or a sigmoid of each; the k of
largest score, or of largest `s + c` with a correction c, are **chosen**, and

    mlp(x) = sum over chosen e of p_e(x) f_e(x) + g(x) f_shared(x),     f gated: (act(x W_g) * (x W_u)) W_d

with `p = s`, or s divided by its sum over the chosen (`renormalised`). The shared expert, where there is one,
takes every token, at the weight `g = sigmoid(x w)` or 1. Experts may lie in groups: then the k are of those groups
alone whose best scores add up to most (DeepSeek).

With the weights p and the gates act(x W_g) as they are on some tokens, all experts side by side are one gated
MLP (`weights.py`, `side_by_side`): that is how paths freeze a mixture.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.shapes import Bool, Float

Tokens = Float[Tensor, "batch token width"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda z: z,
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a mixture is made of, apart from its weights.

    Args:
        number: Experts of a layer.
        chosen: Experts that each token goes through, beside the shared one.
        width: The width of the hidden layer of each.
        renormalised: Whether the weights of the chosen are divided by their sum.
        shared_width: The hidden width of the expert that takes every token; 0: there is none.
        shared_gate: Whether the shared expert is weighed by a sigmoid of its own.
        dense_layers: Layers (0-based) with a gated MLP of the architecture's `mlp_width` instead.
        sigmoid: Whether scores are sigmoids, each of its own logit.
        correction: Whether experts are chosen by their score and a number of each expert's own.
        groups: Groups of equally many experts, side by side.
        groups_chosen: Groups that each token chooses its experts from.
        group_best: How many of a group's best scores are added up to choose it.
        biases: Whether the router and the maps of experts have biases.
        limit: L of `(act(min(x W_g, L)) * (1 + x W_u, cut to +-L)) W_d`, what each expert is then (gpt-oss); 0: none.

    >>> Experts(number=8, chosen=2, width=64).chosen
    2
    """

    number: int
    chosen: int
    width: int
    renormalised: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    sigmoid: bool = False
    correction: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1
    biases: bool = False
    limit: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        positive = ("number", "chosen", "width", "groups", "groups_chosen", "group_best")
        for name, least in (*((name, 1) for name in positive), ("shared_width", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArchitectureError(f"{name} must be a whole number >= {least}; got {value!r}", subject=name)
        if self.chosen > self.number:
            sentence = f"chosen must be at most the number of experts, {self.number}; got {self.chosen}"
            raise ArchitectureError(sentence, subject="chosen")
        if self.number % self.groups or self.groups_chosen > self.groups:
            expected = f"groups must be equally large, of {self.number} experts, and groups_chosen at most as many"
            raise ArchitectureError(f"{expected}; got {self.groups} and {self.groups_chosen}", subject="groups")
        size = self.number // self.groups
        if self.group_best > size or self.chosen > self.groups_chosen * size:
            expected = f"group_best must be at most the {size} experts of a group, and chosen those of groups_chosen"
            raise ArchitectureError(f"{expected}; got {self.group_best} and {self.chosen}", subject="group_best")
        if not 0 <= self.limit < math.inf:
            raise ArchitectureError(f"limit must be a number > 0, or 0 for none; got {self.limit!r}", subject="limit")
        if self.shared_width and (self.biases or self.limit):
            raise ArchitectureError("biases and limit go with no shared expert: leave them out", subject="shared_width")
        if self.shared_gate and not self.shared_width:
            raise ArchitectureError("shared_gate needs a shared expert: give shared_width", subject="shared_gate")

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, as JSON has it."""
        return {**asdict(self), "dense_layers": list(self.dense_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Experts":
        """Make the description of a mixture that `to_dict` wrote."""
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        try:
            return cls(**given)
        except TypeError as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ArchitectureError(f"experts have {names}; got {values!r:.80}", subject="experts") from error


def chosen_weights(
    logits: Float[Tensor, "*batch expert"], experts: Experts, correction: Tensor | None = None
) -> Float[Tensor, "*batch expert"]:
    """p: the weight of each expert for each token, 0 of those that are not chosen."""
    s = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    index = in_best_groups(s if correction is None else s + correction, experts).topk(experts.chosen, -1)[1]
    top = s.gather(-1, index)
    if experts.renormalised:
        top = top / top.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, index, top)


def in_best_groups(s: Float[Tensor, "*batch expert"], experts: Experts) -> Float[Tensor, "*batch expert"]:
    """Scores with -inf in place of those in groups that are not chosen."""
    if experts.groups == 1:
        return s
    grouped = s.view(*s.shape[:-1], experts.groups, -1)
    best = grouped.masked_fill(~largest(grouped, experts.group_best), 0.0).sum(-1)
    return grouped.masked_fill(~largest(best, experts.groups_chosen)[..., None], -torch.inf).flatten(-2)


def largest(values: Float[Tensor, "*batch entry"], count: int) -> Bool[Tensor, "*batch entry"]:
    """True at the `count` largest entries of each row."""
    chosen = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    for _ in range(count):  # not topk: doubled precision has none
        best = values.masked_fill(chosen, -torch.inf).argmax(-1, keepdim=True)
        chosen = chosen.scatter(-1, best, True)
    return chosen


def mixed(X: Tokens, p: Float[Tensor, "batch token expert"], expert: Callable[[Tensor, int], Tensor]) -> Tokens:
    """`sum_e p_e f_e`: each expert, `expert(rows, e)`, is computed on the tokens that chose it alone."""
    total = torch.zeros_like(X)
    for e in range(p.shape[-1]):
        rows = p[..., e] > 0
        if bool(rows.any()):
            total = total.index_put((rows,), p[rows][:, e, None] * expert(X[rows], e), accumulate=True)
    return total
