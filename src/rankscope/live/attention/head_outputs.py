"""What heads give and add: products, checks that parts add up, and the search for the output projection.

With the pattern P_h, the values V_h and the rows W_h of the output projection that belong to head h, a head's output is
`P_h V_h` and what it adds to the hidden states `P_h V_h W_h`. The observers of this folder call the functions. Where
one knows the heads' outputs alone, `OutputProjectionFinder` finds the projection: the first Linear or Conv1D in the
block that is called, after attention, on exactly these side by side.

Order of events: `StackWatch` hooks the modules that `may_project`; the follower calls `reset` when a call of the model
begins; `attention_readings.py` sets `head_outputs` when attention was seen; the follower calls `module_called`, which
calls `linear_called`, which hands what each head adds to `on_contributions`, or `wrapper_called` (LoRA); `block_left`
checks that the projection was found.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live.attention.observer import Products
from rankscope.live.attention.row_statistics import pattern_of
from rankscope.live.attention.scores import AnyScores
from rankscope.live.hooks import isolated
from rankscope.live.modules import submodules
from rankscope.live.processes import SAMPLED, TensorParallel, local_part
from rankscope.metrics import unit_of
from rankscope.shapes import Float

OTHERS = "watch metrics of tokens or attention"
CHECKED = 8  # queries of which scores are checked
CLOSURE, ROUNDINGS = 1e-3, 8.0  # a sum of parts may miss by so much; in half precision by so many eps


def by_head(x: Tensor) -> Tensor:
    """`[batch, head, token, ...]`: adds the axis of a lone sample or head, and flattens groups of heads."""
    if x.ndim < 4:
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.flatten(1, -3)


def without_heads(x: Tensor, heads: Collection[int], axis: int) -> Tensor:
    """A tensor with an axis of heads, with 0 for these."""
    return x.index_fill(axis, torch.tensor(sorted(heads), device=x.device), 0) if heads else x


def weight_of(projection: nn.Module) -> Float[Tensor, "in out"]:
    """The matrix W of a linear layer that computes `x W`, as far as this process has it; a Conv1D of transformers
    stores it so."""
    assert isinstance(projection.weight, Tensor)
    weight = local_part(projection.weight.detach())
    return weight if type(projection).__name__ == "Conv1D" else weight.mT


def contributions_of(
    head_outputs: Float[Tensor, "batch token head d"], weight: Float[Tensor, "in out"]
) -> Float[Tensor, "batch head token out"]:
    """What each head adds, `P_h V_h W_h`, in float64; `weight` is the output projection's, head by head."""
    W = weight.to(torch.float64).reshape(*head_outputs.shape[-2:], -1)  # [head, d, width]
    return head_outputs.to(torch.float64).transpose(1, 2) @ W


def takes_heads(head_outputs: Tensor, args: Sequence[Any]) -> bool:
    """True if a module that is called with these arguments takes the outputs of all heads `[batch, token, head, d]`,
    side by side, and nothing else."""
    x, width = args[0] if len(args) == 1 else None, head_outputs.shape[-2] * head_outputs.shape[-1]
    if not isinstance(x, Tensor) or x.numel() != head_outputs.numel() or x.shape[-1] != width:
        return False
    with isolated(x.device):
        expected = head_outputs.flatten(-2).reshape(x.shape).to(x.dtype)
        return bool(torch.isclose(x, expected, equal_nan=True).all())


def check_contributions(contributions: Tensor, bias: Tensor | None, output: Tensor, where: str) -> None:
    """Refuse contributions whose sum, with the bias, is not the output of the projection `where`."""
    total = contributions.sum(1) if bias is None else contributions.sum(1) + local_part(bias.detach()).to(torch.float64)
    check_sum(total, output.detach().to(torch.float64).reshape(total.shape), output.dtype, where)


def check_sum(total: Tensor, output: Tensor, dtype: torch.dtype, where: str) -> None:
    """Refuse a sum of what heads add that is not the output of the projection `where`, which was given in `dtype`."""
    if miss := _miss(total, output, dtype, 1e-300):
        fault = f"it misses by {miss:.1e} of its size, as if projected by no plain linear map: {OTHERS}"
        raise WatchError(f"what the heads of {where} add must sum to its output; {fault}", subject="heads")


def check_pattern(pattern: Tensor, values: Tensor, output: Tensor, what: str) -> None:
    """Refuse a pattern that, times the values, is not the output that attention gave; `what` says whose."""
    product = pattern @ values.to(pattern.dtype)
    if miss := _miss(product, output.detach().to(pattern.dtype), output.dtype, 1e-30):
        fault = f"it misses by {miss:.1e} of its size, as a pattern changed in place does: watch metrics of tokens"
        raise WatchError(f"the pattern times the values must be what {what} gave; {fault}", subject="pattern")


class Miss(NamedTuple):
    """By what share of its size a head's output, made of scores again, misses what attention gave."""

    share: float  # the largest of all heads, over a few queries
    largest: float  # the size of the largest score of these queries
    dtype: torch.dtype  # that attention gave the output in

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains it: of the output, or of the scores, which kernels compute in float32."""
        return self.share <= self.by_scores(torch.float32) or is_rounding(self.share, self.dtype)

    def by_scores(self, dtype: torch.dtype) -> float:
        """The share that rounding of scores in this dtype explains: s is rounded by eps of its size, and its weight e^s
        by eps s of its own."""
        return ROUNDINGS * unit_of(dtype) * self.largest


def scores_miss(scores: AnyScores, products: Products, valid: Tensor | None) -> tuple[Float[Tensor, "2"], torch.dtype]:
    """`share` and `largest` of the `Miss` of these scores at a few queries, on their device, so that nobody has to wait
    for them, and its dtype. Only queries where `valid` `[batch, token]` is True count, if given; NaN counts as 0."""
    queries = scores.shape[2]
    checked = min(CHECKED, queries)
    rows = torch.arange(checked, device=scores.device) * (queries - 1) // max(1, checked - 1)
    s = scores.rows(rows)
    largest = s.amax(-1).abs()
    P = pattern_of(s, scores.sinks)
    product, output = products(rows, P)
    if product.shape != output.shape:  # laid out otherwise than it should be
        return torch.tensor([math.inf, 0.0], device=scores.device), output.dtype
    wide = torch.promote_types(P.dtype, torch.float32)
    product, expected = (x.detach().to(wide).reshape(*x.shape[:2], x.shape[2], -1) for x in (product, output))
    both = torch.stack([product - expected, expected])  # [missing or size, batch, row, head, d]
    if valid is not None:
        padded = ~valid[:, rows].to(output.device)[:, :, None, None]
        both, largest = both.masked_fill(padded, 0.0), largest.masked_fill(padded[..., 0].transpose(1, 2), 0.0)
    missing, size = torch.linalg.vector_norm(both, dim=(1, 2, 4))
    shares = (missing / size.clamp(min=1e-30)).nan_to_num(0.0).max()
    return torch.stack([shares, largest.nan_to_num(0.0, 0.0).max().to(shares)]), output.dtype


def is_rounding(miss: float, dtype: torch.dtype) -> bool:
    """True if rounding in this dtype explains that a sum of parts misses by this share of its size."""
    return not miss > max(CLOSURE, ROUNDINGS * unit_of(dtype))


def values_product(values: Tensor, output: Tensor) -> Products:
    """The products of attention with these values `[batch, group, key, d]` that gave `[batch, query, head, d]`."""

    def products(rows: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        group = P.shape[1] // values.shape[1]
        grouped = P.reshape(len(P), values.shape[1], group * P.shape[2], -1) @ values.detach().to(P)
        product = grouped.reshape(*P.shape[:3], -1)
        return product.transpose(1, 2), output.detach()[:, rows]

    return products


def _miss(x: Tensor, expected: Tensor, dtype: torch.dtype, least: float) -> float:
    """By what share of its size x misses; 0 where rounding explains it, and at NaN, which is marked elsewhere."""
    miss = float((x - expected).norm() / expected.norm().clamp(min=least))
    return 0.0 if is_rounding(miss, dtype) else miss


class PartOfSum(NamedTuple):
    """Some entries of what the heads of one process add, and of the output of the projection as far as it has that; the
    sums over the processes that share the projection must agree (`check_sum`)."""

    total: Float[Tensor, " entry"]
    output: Float[Tensor, " entry"]
    dtype: torch.dtype  # of the output
    where: str  # the class of the projection

    @classmethod
    def of(cls, contributions: Tensor, linear: nn.Module, y: Tensor, together: TensorParallel) -> "PartOfSum":
        """Some entries of what the heads of this process add, and of y, the output of `linear`, without the bias. Of y
        each process counts its own tokens if `together` divides tokens; else the first process counts all."""
        total = contributions.sum(1)
        output = torch.zeros_like(total)
        mine = y.to(total).reshape(len(total), -1, total.shape[-1])
        if isinstance(linear.bias, Tensor):
            mine = mine - local_part(linear.bias.detach()).to(total)
        if together.tokens is not None:  # each has the output at its own tokens
            start = sum(together.tokens[: together.index])
            output[:, start : start + mine.shape[1]] = mine
        elif together.index == 0:  # all have the same output
            output += mine
        chosen = slice(None, None, max(1, total.numel() // SAMPLED))
        return cls(total.flatten()[chosen].cpu(), output.flatten()[chosen].cpu(), y.dtype, type(linear).__name__)


class OutputProjectionFinder:
    """Waits for the linear layer that is called on the heads' outputs, and reports what each head adds. `together` are
    the processes that share the model, if several do; where they share the projection, its output is the sum of what
    all their heads add, and a part of that sum is reported."""

    def __init__(
        self, on_contributions: Callable[[Tensor, PartOfSum | None], None], together: TensorParallel | None = None
    ) -> None:
        self.on_contributions, self.together = on_contributions, together
        self.reset()

    def reset(self) -> None:
        """Forget what a call of the model left behind."""
        self.head_outputs: Tensor | None = None  # waiting for the projection, `[batch, token, head, d]`
        self.projected: tuple[nn.Module, Tensor, Tensor] | None = None  # the projection, its input and output

    def linear_called(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """A linear layer in a block computed y from x: the projection, if x is the heads' outputs."""
        heads = self.head_outputs
        if heads is None or not takes_heads(heads, (x,)):
            return
        with isolated(x.device):
            self.head_outputs = None
            W = weight_of(linear)
            fault = f"FSDP has sharded its {type(linear).__name__} again: shard whole blocks, or {OTHERS}"
            sentence = f"what each head adds needs the weight of the output projection; {fault}"
            require(W.shape == (x.shape[-1], y.shape[-1]), sentence, WatchError, "heads")
            contributions, part = contributions_of(heads, W), None
            if self.together is not None and self.together.is_split_by_rows(linear):
                part = PartOfSum.of(contributions, linear, y, self.together)
            else:
                check_contributions(contributions, linear.bias, y, type(linear).__name__)  # type: ignore[arg-type]
            self.on_contributions(contributions, part)
            self.projected = (linear, x, y.clone())  # a wrapper may add to y in place

    def wrapper_called(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """A module around linear layers computed y from x: around the projection, both outputs must agree."""
        if self.projected is None:
            return
        projection, taken, output = self.projected
        if x.shape != taken.shape or projection not in set(module.modules()):
            return
        with isolated(x.device):
            same = y.shape == output.shape and torch.allclose(y.to(output), output, CLOSURE, 1e-12, True)
            adds = f"{type(module).__name__} adds to its {type(projection).__name__}, as LoRA does"
            sentence = f"what each head adds needs a plain output projection; {adds}: merge it, or {OTHERS}"
            require(same or not torch.equal(x, taken), sentence, WatchError, "heads")

    def block_left(self, block: nn.Module) -> None:
        """The block has returned: its output projection must have been found by now."""
        self.projected = None
        fault = f"no Linear or Conv1D of this {type(block).__name__} took the heads' outputs: {OTHERS}"
        sentence = f"what each head adds needs the output projection; {fault}"
        require(self.head_outputs is None, sentence, WatchError, "heads")

    def module_called(self, module: nn.Module, args: Any, output: Any) -> None:
        """A linear layer, or a module around linear layers, returned."""
        # With a second argument it is more than a projection: BERT's also takes the residual.
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            called = self.linear_called if is_linear(module) else self.wrapper_called
            called(module, local_part(args[0].detach()), local_part(output.detach()))


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer: torch's, or a Conv1D of transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def may_project(module: nn.Module) -> bool:
    """True for a linear layer, and for a module with one and parameters beside those of one of them and of norms."""
    if is_linear(module):
        return True
    inside = submodules(module)
    plain = [part for part in inside if "norm" not in type(part).__name__.lower()]
    weighted = [part for part in plain if next(part.parameters(recurse=False), None) is not None]
    return any(map(is_linear, inside)) and len(weighted) > 1
