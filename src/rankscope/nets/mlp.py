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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import ArchitectureError, require
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
"""The functions between the matrices of an MLP."""


LARGEST_LOG, TINY_LOG = 600.0, -100.0  # beyond e^600 only which logit is largest matters


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a mixture is made of, apart from its weights.

    >>> Experts(number=8, chosen=2, width=64).chosen
    2
    """

    number: int  # Experts of a layer
    chosen: int  # Experts that each token goes through, beside the shared one
    width: int  # The inner width of each
    renormalised: bool = False  # Whether the weights of the chosen are divided by their sum
    shared_width: int = 0  # The inner width of the expert that takes every token; 0: there is none
    shared_gate: bool = False  # Whether the shared expert is weighed by a sigmoid of its own
    dense_layers: tuple[int, ...] = ()  # Layers (0-based) with a gated MLP of the architecture's `mlp_width` instead
    sigmoid: bool = False  # Whether scores are sigmoids, each of its own logit
    correction: bool = False  # Whether experts are chosen by their score and a number of each expert's own
    groups: int = 1  # Groups of equally many experts, side by side
    groups_chosen: int = 1  # Groups that each token chooses its experts from
    group_best: int = 1  # How many of a group's best scores are added up to choose it
    biases: bool = False  # Whether the router and the maps of experts have biases
    limit: float = 0.0
    """L of `(act(min(x W_g, L)) * (1 + x W_u, cut to +-L)) W_d`, what each expert is then (gpt-oss); 0: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        positive = ("number", "chosen", "width", "groups", "groups_chosen", "group_best")
        for name, least in (*((name, 1) for name in positive), ("shared_width", 0)):
            value = getattr(self, name)
            sentence = f"{name} must be a whole number >= {least}; got {value!r}"
            require(type(value) is int and value >= least, sentence, ArchitectureError, name)
        sentence = f"chosen must be at most the number of experts, {self.number}; got {self.chosen}"
        require(self.chosen <= self.number, sentence, ArchitectureError, "chosen")
        even = self.number % self.groups == 0 and self.groups_chosen <= self.groups
        expected = f"groups must be equally large, of {self.number} experts, and groups_chosen at most as many"
        require(even, f"{expected}; got {self.groups} and {self.groups_chosen}", ArchitectureError, "groups")
        size = self.number // self.groups
        enough = self.group_best <= size and self.chosen <= self.groups_chosen * size
        expected = f"group_best must be at most the {size} experts of a group, and chosen those of groups_chosen"
        require(enough, f"{expected}; got {self.group_best} and {self.chosen}", ArchitectureError, "group_best")
        sentence = f"limit must be a number > 0, or 0 for none; got {self.limit!r}"
        require(0 <= self.limit < math.inf, sentence, ArchitectureError, "limit")
        alone, sentence = not self.shared_width, "biases and limit go with no shared expert: leave them out"
        require(alone or not (self.biases or self.limit), sentence, ArchitectureError, "shared_width")
        sentence = "shared_gate needs a shared expert: give shared_width"
        require(not (alone and self.shared_gate), sentence, ArchitectureError, "shared_gate")

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
    logits: Float[Tensor, "*batch expert"], experts: Experts, chosen: Bool[Tensor, "*batch expert"]
) -> Float[Tensor, "*batch expert"]:
    """p: the weight of each expert for each token; 0 of those that are not chosen, and of no other."""
    if experts.renormalised:
        logs = log_sigmoid(logits) if experts.sigmoid else logits
        p = logs.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        p = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    return p.clamp(min=torch.finfo(p.dtype).tiny).masked_fill(~chosen, 0.0)


def chosen_experts(
    logits: Float[Tensor, "*batch expert"],
    experts: Experts,
    correction: Tensor | None = None,
    log: Float[Tensor, "*#batch 1"] | None = None,
) -> Bool[Tensor, "*batch expert"]:
    """True at the experts that each token goes through.

    Scores that float64 rounds to one number, as the sigmoids of 40 and 50, are told apart by their logits, and sums of
    such scores as `_order` says. `log` is that of the unit of logits, which may be too small or large for float64."""
    # Where all logits are tiny, scores are linear in them: equal but for what the logits themselves say.
    z = logits if log is None else logits * log.clamp(max=LARGEST_LOG).exp().masked_fill(log < TINY_LOG, 0.0)
    order = [logits]
    if correction is not None:
        order = [(z.sigmoid() if experts.sigmoid else z.softmax(-1)) + correction, logits]
    if experts.groups == 1:
        return largest(order, experts.chosen)
    shape = (*logits.shape[:-1], experts.groups, -1)
    best = largest([numbers.view(shape) for numbers in order], experts.group_best)
    by_group = [torch.where(best, numbers.view(shape), 0.0).sum(-1) for numbers in order]
    if experts.group_best > 1:
        base, sign, size = _parts(z) if experts.sigmoid else (z * 0.0, z * 0.0 + 1.0, z.log_softmax(-1))
        base = base if correction is None else base + correction
        by_group = [*_order(base.view(shape), sign.view(shape), size.view(shape), best), by_group[-1]]
    closed = ~largest(by_group, experts.groups_chosen)[..., None].expand_as(best).flatten(-2)
    return largest([numbers.masked_fill(closed, -torch.inf) for numbers in order], experts.chosen)


def _parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(w, g, l) of sigmoids `s(z) = w + g e^l`, w one of 0, 1/2 and 1."""
    near, above = z.abs() <= 1, (z > 1).to(z.dtype)
    size = torch.where(near, ((z / 2).tanh().abs() / 2).log(), log_sigmoid(-z.abs()))
    return torch.where(near, 0.5, above), torch.where(near, z.sign(), 1 - 2 * above), size


def _order(base: Tensor, sign: Tensor, log: Tensor, added: Tensor) -> list[Tensor]:
    """Numbers by which the sums of `w + g e^l` over the entries in `added` are ordered: by the first, then the next.

    Where the w add up to the same, the first is as its small part is, and the others are what it rounds away."""
    log = log.masked_fill(~added, -torch.inf)
    top = log.amax(-1, keepdim=True).clamp(min=torch.finfo(log.dtype).min)
    part, top = (sign * (log - top).exp()).sum(-1), top[..., 0]  # the sum of all g e^l, in units of e^top
    size = part.abs().masked_fill(part == 0, 1.0).log() + top
    return [torch.where(added, base, 0.0).sum(-1) + part * top.exp(), part.sign(), part.sign() * size]


def largest(order: Sequence[Float[Tensor, "*batch entry"]], count: int) -> Bool[Tensor, "*batch entry"]:
    """True at the `count` largest entries of each row: by the first numbers of `order`, among equals by the next."""
    chosen = torch.zeros(order[0].shape, dtype=torch.bool, device=order[0].device)
    order = [numbers.nan_to_num(torch.inf, torch.inf, -torch.inf) for numbers in order]  # NaN goes on as NaN
    for _ in range(count):  # not topk: doubled precision has none
        best = ~chosen
        for numbers in order:
            best = best & (numbers == numbers.masked_fill(~best, -torch.inf).amax(-1, keepdim=True))
        chosen = chosen.scatter(-1, best.to(torch.int8).argmax(-1, keepdim=True), True)
    return chosen


def log_sigmoid(z: Tensor) -> Tensor:
    """The log of the sigmoid, however small."""
    return z.clamp(max=0.0) - (-z.abs()).exp().log1p()


def mixed(X: Tokens, p: Float[Tensor, "batch token expert"], expert: Callable[[Tensor, int], Tensor]) -> Tokens:
    """`sum_e p_e f_e`: each expert, `expert(rows, e)`, is computed on the tokens that chose it alone."""
    total = torch.zeros_like(X)
    for e in range(p.shape[-1]):
        rows = p[..., e] > 0
        if bool(rows.any()):
            total = total.index_put((rows,), p[rows][:, e, None] * expert(X[rows], e), accumulate=True)
    return total
