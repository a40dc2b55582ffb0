"""The forward pass in float64 and in float32 side by side, for as long as float64 sees what tokens differ by.

Called by `second_pass.py`. Where tokens are well apart, no number of a plain pass is the difference of two nearly equal
ones, and float64 is precise enough: only the size of its rounding has to be known.

Float32 tells that size. An operation on floats gives its exact result times 1 + d, where |d| is at most 2^-24 in
float32 and 2^-53 in float64. As long as errors are small, the error of the output is the sum over all operations of d
times a factor, by which the later layers amplify a change there. These factors belong to the network and its tokens,
and are the same in both precisions. So the difference of the two passes, which is float32's error, is some 2^29 times
float64's. `ROUNDING` is 2^-29 with a margin of 16, since the two do not draw the same d; the margin is held against 50
digits in `tests/deviation/test_float_passes.py`.

`FloatPasses.run_layer` takes the tokens of both passes through a block. `FloatLayer.sees` says which samples float64 is
trusted with. If it is not trusted with all samples of a batch, `second_pass.py` continues the batch in deviation
arithmetic, from the last layer at which the passes differed by no more than `SLIGHT` (`FloatLayer.slight`). Not trusted
are samples whose errors are not small, on which both passes may err alike, or that float32 cannot hold:

- the passes differ by more than `CLOSE`, or a layer multiplied what they differ by by more than `FALL`;
- scores are so large that rounding may choose which token is attended to, in both passes the same;
- a token is so short beside the others that float64 may have lost the terms that it is the sum of;
- tokens are longer than `LARGEST`, or shorter than its inverse.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.comparison import STEEP, relative_change
from rankscope.deviation.propagate import PassInputs
from rankscope.deviation.scaled import largest_entry
from rankscope.deviation.state import State
from rankscope.nets import (
    Architecture,
    AttentionRequest,
    Block,
    Heads,
    PassSettings,
    PatternNumbers,
    Plain,
    Step,
    StreamedPlain,
    TokenOrder,
    Tokens,
    converted,
    norm_of,
    traverse,
)
from rankscope.shapes import Bool, Float

ROUNDING = 16.0 * 2.0**-29  # float64's rounding, with a margin, as a share of the difference of the two passes
CLOSE = 1e-4
"""The largest distance of the passes at which float64 is trusted, as a share of what tokens differ by; float64's
rounding is then 3e-12 of what tokens differ by."""
SLIGHT = 3e-6
"""The largest distance of the passes at which deviation arithmetic may start from their tokens and go on through later
layers: float64's rounding is
then 1e-13 of what tokens differ by, and later layers may amplify it by 1e4 before it reaches 1e-9."""
FALL = 8.0
"""The largest factor by which a layer may increase the distance of the passes, once that is above `SLIGHT`: tokens that
become the same faster are too close for float64 one layer later."""
LARGEST = 1e30  # the largest |entry| of the longest token for which float32 has numbers; its inverse is the smallest
SHORT = 1e-30  # the length of a token, as a share of the longest, below which float64 may have lost its terms
SATURATED = 6.0  # the score, in units of a cap, above which tanh leaves too little of what scores differ by


def trusts_floats(arch: Architecture) -> bool:
    """True if the passes in float64 and float32 may take the place of deviation arithmetic in networks of this form.

    A norm of one entry, or of two about their mean, leaves a sign: where rounding decides it, float64 and float32 agree
    by chance every second time. Parts of the user's own may remember earlier layers, of a single arithmetic."""
    norm = norm_of(arch.norm)
    narrow = norm is not None and arch.width - norm.centred <= 1
    narrow_heads = arch.query_norm and not arch.query_norm_across and arch.head_width == 1
    without_eps = arch.query_norm and arch.norm_eps == 0
    return not (narrow or narrow_heads or without_eps or arch.parts)


class _NotesScores:
    """Mixed into plain rules: notes a bound on the scores of a layer, and tokens too short for a norm without eps."""

    arch: Architecture
    settings: PassSettings

    def begin(self, samples: int, like: Tensor) -> None:
        """Start a layer: forget what was noted in the layer before."""
        self.scores = like.new_zeros(samples)  # a bound on |scores| of each sample, before a cap
        self.lost = torch.zeros(samples, dtype=torch.bool, device=like.device)

    def norm(self, block: Block, name: str, X: Tokens) -> Tokens:
        if self.arch.norm_eps == 0:  # both passes may take squares of other tokens for zero
            self.lost = self.lost | ~in_range(X, self.settings.valid)
        result: Tokens = super().norm(block, name, X)
        return result

    def scored(self, block: Block, X: Tokens) -> tuple[Heads, Heads, Tensor | None]:
        q, k, added = super().scored(block, X)
        self._note(q, k)
        # Where attention goes by rows, `added` holds queries.
        if added is not None and added.shape[-2:] == (q.shape[2], k.shape[2]):
            self.scores = self.scores + added.abs().flatten(added.ndim - 3).amax(-1)
        return q, k, added

    def cross_scored(self, block: Block, X: Tokens) -> tuple[Heads, Heads]:
        q, k = super().cross_scored(block, X)
        self._note(q, k)
        return q, k

    def _note(self, q: Heads, k: Heads) -> None:
        lengths = [torch.linalg.vector_norm(part, dim=-1).flatten(1).amax(1) for part in (q, k)]
        gain = 1 + self.arch.log_gain * math.log(max(2, k.shape[2]))
        self.scores = torch.maximum(self.scores, lengths[0] * lengths[1] * gain / self.arch.divisor)


class _WatchedPlain(_NotesScores, Plain):
    """Plain rules in float64 that note where rounding may have decided."""


class _WatchedStreamed(_NotesScores, StreamedPlain):
    """Plain rules with attention by blocks of rows that note where rounding may have decided."""


@dataclass(frozen=True)
class FloatLayer:
    """One layer of the passes in float64 and float32; valid tokens come first."""

    step: Step  # in float64; without attention where that goes by rows
    narrow: Step  # in float32
    numbers: PatternNumbers | None  # numbers of attention by rows, in float64
    narrow_numbers: PatternNumbers | None  # the same in float32
    distance: Float[Tensor, " batch"]  # between the passes, as a share of what tokens differ by
    sees: Bool[Tensor, " batch"]  # True for samples that float64 is trusted with
    valid: Bool[Tensor, "batch token"]

    @property
    def slight(self) -> Bool[Tensor, ""]:
        """True if deviation arithmetic may start from these tokens."""
        return (self.distance <= SLIGHT).all()

    @property
    def tokens_alone(self) -> "FloatLayer":
        """The layer without its attention, head outputs and routing: what is kept to start from later."""
        return replace(self, step=Step(self.step.layer, self.step.state, None), numbers=None, narrow_numbers=None,
            narrow=Step(self.step.layer, self.narrow.state, None))  # fmt: skip

    def states(self, times: int) -> tuple[State, State]:
        """The tokens after the layer as two states: those of float64, and these moved by `times` float64's rounding,
        with its margin, in the direction of float32's tokens."""
        X, Y = self.step.state, self.narrow.state
        moved = X + times * ROUNDING * (Y - X)
        return State.of(X, self.valid), State.of(moved, self.valid)

    def restored(self, order: TokenOrder | None) -> "FloatLayer":
        """The layer with tokens in their original order."""
        if order is None:
            return self
        return replace(
            self,
            step=self.step.restored(order),
            narrow=self.narrow.restored(order),
            numbers=self.numbers and self.numbers.restored(order),
            narrow_numbers=self.narrow_numbers and self.narrow_numbers.restored(order),
            valid=self.valid.gather(1, order.back),
        )


class FloatPasses:
    """Takes tokens through blocks in float64 and in float32. `last` is the layer that the next block starts from."""

    def __init__(self, inputs: PassInputs, by_rows: AttentionRequest | None = None) -> None:
        """Start from the inputs of a pass; with `by_rows`, attention goes by blocks of rows."""
        net, settings = inputs.net, inputs.settings
        narrow: PassSettings = converted(settings, _narrowed)
        self.rules: _WatchedPlain | _WatchedStreamed
        self.narrow_rules: Plain
        if by_rows is None:
            self.rules, self.narrow_rules = _WatchedPlain(net.arch, settings), Plain(net.arch, narrow)
        else:
            self.rules = _WatchedStreamed(net, settings, by_rows)
            self.narrow_rules = StreamedPlain(net, narrow, by_rows)
        self.valid, X = inputs.state.valid, inputs.state.tokens()
        step, of_narrow = Step(0, X, None), Step(0, X.to(torch.float32), None)
        self.last = self._layer(step, of_narrow, torch.ones_like(settings.valid[:, 0]), CLOSE)

    def run_layer(self, block: Block) -> FloatLayer:
        """The next layer, from `last`. The caller sets `last` to the result if float64 is trusted with it."""
        before, rules = self.last, self.rules
        rules.begin(len(before.distance), before.step.state)
        X, *parts = traverse(block, rules, before.step.state)
        cap = self.rules.arch.score_cap
        steepest = min(math.exp(STEEP), SATURATED * cap) if cap else math.exp(STEEP)
        lost = rules.lost | ~(rules.scores <= steepest)
        Y, *narrow_parts = traverse(
            block.with_weights(converted(block.weights, _narrowed)), self.narrow_rules, before.narrow.state
        )
        step = Step(block.index + 1, self.valid.zero_padding(X), *parts)
        narrow = Step(block.index + 1, self.valid.zero_padding(Y), *narrow_parts)
        farthest = (FALL * before.distance).clamp(SLIGHT, CLOSE)
        return self._layer(step, narrow, ~lost, farthest)

    def _layer(self, step: Step, narrow: Step, known: Bool[Tensor, " batch"], farthest: Tensor | float) -> FloatLayer:
        (step, numbers), (narrow, narrow_numbers) = _numbers_apart(step), _numbers_apart(narrow)
        X, mask = step.state, self.valid.mask
        empty = ~mask.any(-1)
        distance = relative_change(X, narrow.state, mask, self.valid.all).masked_fill(empty, 0.0)
        sees = (distance <= farthest) & in_range(X, mask) & known | empty
        return FloatLayer(step, narrow, numbers, narrow_numbers, distance, sees, mask)


def in_range(X: Float[Tensor, "batch token width"], valid: Bool[Tensor, "batch token"]) -> Bool[Tensor, " batch"]:
    """True for samples whose longest token float32 has numbers for, and beside which no token is too short."""
    size = largest_entry(X, 2)
    shortest, longest = size.masked_fill(~valid, torch.inf).amin(-1), size.masked_fill(~valid, 0.0).amax(-1)
    return (longest < LARGEST) & (longest > 1 / LARGEST) & (shortest > SHORT * longest)


def _narrowed(t: Tensor) -> Tensor:
    return t.to(torch.float32) if t.is_floating_point() else t


def _numbers_apart(step: Step) -> tuple[Step, PatternNumbers | None]:
    """A step without numbers of attention by rows in the place of attention, and these."""
    numbers: Any = step.attention
    return (step._replace(attention=None), numbers) if isinstance(numbers, PatternNumbers) else (step, None)
