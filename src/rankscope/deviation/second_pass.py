"""Runs the network a second time with different rounding: readings on which the passes differ are marked.

`profiles/measuring.py`, `profiles/captured.py` and `confirmation.py` call `with_second_pass`; readings are compared by
`profiles/agreement.py`. The passes have two stretches:

1. As long as float64 sees what tokens differ by, both passes are plain ones, the first in float64 and the second in
   float32 (`FloatPasses`). Float32 rounds 2^29 times as much, so the difference of the two shows how much float64
   rounds.
2. From the first layer on at which float64 does not see that, both passes are deviation arithmetic (`rules.py`), the
   second with its last digits perturbed (`perturbation.py`). They start from the tokens of float64 after the last layer
   at which float64 and float32 were next to each other (`SLIGHT`); the tokens of the second are moved by
   `EXAGGERATED` times float64's rounding. Layers between that one and the first of this stretch are run once more.

In the first stretch a single reading whose digits float64's rounding took is read off deviation arithmetic instead, of
the tokens after the layer (`FloatSecondPass.tokens_by_deviation`) or of its block (`block_by_deviation`). What no
comparison of two passes shows is looked for in every layer of deviation arithmetic (`undecided_attention`,
`zeros_of_layer`). In a captured graph (`replay.py`) both passes of deviation arithmetic run as one batch.

**Float64 and float32.** Where tokens are well apart, no number of a plain pass is the difference of two nearly equal
ones, and float64 is precise enough: only the size of its rounding has to be known. An operation on floats gives its
exact result times 1 + d, where |d| is at most 2^-24 in float32 and 2^-53 in float64. As long as errors are small, the
error of the output is the sum over all operations of d times a factor, by which the later layers amplify a change
there. These factors belong to the network and its tokens, and are the same in both precisions. So the difference of the
two passes, which is float32's error, is some 2^29 times float64's. `ROUNDING` is 2^-29 with a margin of 16, since the
two do not draw the same d; the margin is held against 50 digits in `tests/deviation/test_float_passes.py`.

`FloatLayer.sees` says which samples float64 is trusted with. If that is not all samples of a batch, the batch goes on
in deviation arithmetic. Not trusted are samples whose errors are not small, on which both passes may err alike, or that
float32 cannot hold:

- the passes differ by more than `CLOSE`, or a layer multiplied what they differ by by more than `FALL`;
- scores are so large that rounding may choose which token is attended to, in both passes the same;
- a token is so short beside the others that float64 may have lost the terms that it is the sum of;
- tokens are longer than `LARGEST`, or shorter than its inverse.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from rankscope.deviation import comparison
from rankscope.deviation.comparison import STEEP, relative_change
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.perturbation import UNITS, Perturbation, PerturbedDeviation, PerturbedRows, repeated
from rankscope.deviation.propagate import DeviationStep, PassInputs, restored, run_block
from rankscope.deviation.proved_zeros import of_either, zeros_of_layer
from rankscope.deviation.replay import joined
from rankscope.deviation.state import State, largest_entry
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

    step: Step  # in float64; of attention by rows with its `PatternNumbers` in the place of attention
    narrow: Step  # in float32
    distance: Float[Tensor, " batch"]  # between the passes, as a share of what tokens differ by
    sees: Bool[Tensor, " batch"]  # True for samples that float64 is trusted with
    valid: Bool[Tensor, "batch token"]

    @property
    def tokens_alone(self) -> "FloatLayer":
        """The layer without its attention, head outputs and routing: what is kept to start from later."""
        layer, X, Y = self.step.layer, self.step.state, self.narrow.state
        return replace(self, step=Step(layer, X, None), narrow=Step(layer, Y, None))

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
        step, narrow = _restored(self.step, order), _restored(self.narrow, order)
        return replace(self, step=step, narrow=narrow, valid=self.valid.gather(1, order.back))


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
        X, mask = step.state, self.valid.mask
        empty = ~mask.any(-1)
        distance = relative_change(X, narrow.state, mask, self.valid.all).masked_fill(empty, 0.0)
        sees = (distance <= farthest) & in_range(X, mask) & known | empty
        return FloatLayer(step, narrow, distance, sees, mask)


def in_range(X: Float[Tensor, "batch token width"], valid: Bool[Tensor, "batch token"]) -> Bool[Tensor, " batch"]:
    """True for samples whose longest token float32 has numbers for, and beside which no token is too short."""
    size = largest_entry(X, 2)
    shortest, longest = size.masked_fill(~valid, torch.inf).amin(-1), size.masked_fill(~valid, 0.0).amax(-1)
    return (longest < LARGEST) & (longest > 1 / LARGEST) & (shortest > SHORT * longest)


def _narrowed(t: Tensor) -> Tensor:
    return t.to(torch.float32) if t.is_floating_point() else t


def _restored(step: Step, order: TokenOrder) -> Step:
    """A step with tokens in their original order."""
    numbers: Any = step.attention
    if not isinstance(numbers, PatternNumbers):
        return step.restored(order)
    return step._replace(attention=None).restored(order)._replace(attention=cast(Any, numbers.restored(order)))


EXAGGERATED = 4
"""How many times the usual moves the second pass is perturbed by. Where numbers cancel, a few units in their last place
are left: moves of no more than that could give the same number in both passes by chance. `profiles/agreement.py`
divides differences between the passes by this factor."""
ALIKE = 1e-9  # the distance of two states up to which they count as the same


@dataclass(frozen=True)
class DeviationSecondPass:
    """One layer of the second pass in perturbed deviation arithmetic, tokens in their original order."""

    step: DeviationStep
    lost: Bool[Tensor, " batch"]
    """True where nothing is known of the sample from here on: a token became so short beside the others that
    one scale does not hold them, or was rounded to zero, or the differences of equal tokens may have been all that was
    left, or a norm gave a sign to a token that is zero but for rounding."""
    lost_heads: Bool[Tensor, "batch head"] | None = None
    """True where all that the outputs of a head differ by was rounded to zero."""

    @property
    def tokens_alone(self) -> "DeviationSecondPass":
        """The layer without its attention, head outputs and routing."""
        return DeviationSecondPass(DeviationStep(self.step.layer, self.step.state, None), self.lost)


@dataclass(frozen=True, eq=False)
class FloatSecondPass:
    """One layer of the second pass in float32, where the first ran in float64; tokens in their original order."""

    layer: FloatLayer
    block: Block | None  # None at the input
    before: FloatLayer  # the layer before, valid tokens first; at the input the input itself
    passes: "Callable[[], DeviationPasses]"  # made when they are first needed

    @property
    def tokens_alone(self) -> "FloatSecondPass":
        """The layer without its attention, head outputs and routing."""
        return replace(self, layer=self.layer.tokens_alone)

    @cached_property
    def tokens_by_deviation(self) -> tuple[DeviationStep, DeviationSecondPass]:
        """The tokens after the layer as both passes of deviation arithmetic have them: those of float64, and the same
        moved by float64's rounding."""
        first, second = (DeviationStep(self.layer.step.layer, state, None) for state in self.layer.states(EXAGGERATED))
        return first, DeviationSecondPass(second, torch.zeros_like(self.layer.sees))

    @cached_property
    def block_by_deviation(self) -> tuple[DeviationStep, DeviationSecondPass]:
        """The layer by both passes of deviation arithmetic, from float64's tokens before it."""
        assert self.block is not None
        return self.passes().starting_from(self.before).run_layer(self.block)


SecondPassLayer = FloatSecondPass | DeviationSecondPass


def with_second_pass(
    inputs: PassInputs, by_rows: AttentionRequest | None = None, *, floats: bool = True, together: bool = False
) -> Iterator[tuple[Step | DeviationStep, SecondPassLayer]]:
    """Yields every layer of the first pass together with the same layer of the second.

    Args:
        inputs: What the passes start from.
        by_rows: Which numbers of attention patterns are asked for, if patterns are too large to be held.
        floats: Whether the first stretch exists; without it deviation arithmetic starts at the input.
        together: Whether both passes of deviation arithmetic run as one batch.
    """
    order, by_deviation = inputs.order, cache(partial(DeviationPasses, inputs, by_rows, together))
    at_layer(0)
    float_passes = FloatPasses(inputs, by_rows) if floats and trusts_floats(inputs.net.arch) else None
    if float_passes is not None and can_skip("second_pass.float64_input", float_passes.last.sees):
        first = start = float_passes.last  # deviation arithmetic will start from there
        shown = first.restored(order)
        yield shown.step, FloatSecondPass(shown, None, first, by_deviation)
    else:
        float_passes, passes = None, by_deviation()
        yield passes.input()
    for block in inputs.net.blocks:
        at_layer(block.index + 1)
        if float_passes is not None:
            before, layer = float_passes.last, float_passes.run_layer(block)
            if can_skip("second_pass.float64", layer.sees):
                float_passes.last = layer
                if can_skip("second_pass.slight", layer.distance <= SLIGHT):  # deviation arithmetic may start from here
                    start = layer.tokens_alone
                layer = layer.restored(order)
                yield layer.step, FloatSecondPass(layer, block, before, by_deviation)
                continue
            float_passes, passes = None, by_deviation().starting_from(start)
            del before, layer  # their patterns are as large as any
            for earlier in inputs.net.blocks[start.step.layer : block.index]:
                passes.run_layer(earlier)
        yield passes.run_layer(block)


class DeviationPasses:
    """Takes the tokens of two passes through blocks by deviation arithmetic, those of the second perturbed."""

    def __init__(self, inputs: PassInputs, by_rows: AttentionRequest | None = None, together: bool = False) -> None:
        """Start from the inputs of a pass; with `by_rows` attention goes by blocks of rows, and `together` runs both
        passes as one batch."""
        self.inputs, self.together = inputs, together
        arch, settings = inputs.net.arch, inputs.settings
        self.rules: PerturbedDeviation
        if by_rows is not None:
            self.rules = PerturbedRows(inputs.net, settings, block_bytes=by_rows.block_bytes, times=EXAGGERATED)
        elif together:
            self.rules = PerturbedDeviation(arch, repeated(settings, 2), copies=1, times=EXAGGERATED, in_place=True)
        else:
            self.rules = PerturbedDeviation(arch, settings, times=EXAGGERATED, in_place=True)
        self.first_rules = inputs.rules
        # The first product with a matrix rounds the input as well.
        self.states = inputs.state, Perturbation(units=EXAGGERATED * UNITS).of(inputs.state)
        self.joined: State | None = None  # both states as one batch, once a layer has run so
        self.lost = torch.zeros_like(inputs.state.valid.mask[:, 0])

    def starting_from(self, layer: FloatLayer) -> "DeviationPasses":
        """Passes by the same rules that start from the tokens after a layer. Layer 0 is the input, which float64 did
        not round: its two states stay as they are."""
        passes = copy(self)
        passes.joined = None
        if layer.step.layer:
            passes.states = layer.states(EXAGGERATED)
        return passes

    def input(self) -> tuple[DeviationStep, DeviationSecondPass]:
        """The input as layer 0 of both passes."""
        first, second = (restored(DeviationStep(0, state, None), self.inputs.order) for state in self.states)
        return first, DeviationSecondPass(second, self.lost)

    def run_layer(self, block: Block) -> tuple[DeviationStep, DeviationSecondPass]:
        """Both passes through the next layer, tokens in their original order."""
        before, batch = self.states, self.joined
        self.rules.losses.short = {}
        self.rules.begin(block)
        if self.together:
            batch = joined(before) if batch is None else batch
            both = run_block(block, self.rules, batch)
            self.joined, (step, second) = both.state, _halves(both)
        else:
            step = run_block(self.inputs.block(block.index), self.first_rules, before[0])
            second = run_block(block, self.rules, before[1])
        losses = self.rules.losses
        # Uniform attention makes the outputs of heads equal, unless they have gates.
        active = () if block.arch.kernel == "uniform" and not block.arch.head_gate else block.active_heads
        self.rules.begin(block)
        zeros = zeros_of_layer(block, self.rules, before[0], step, active, before[1] if batch is None else batch)
        torn = losses.torn if isinstance(losses.torn, bool) else of_either(losses.torn, len(self.lost))
        lost = self.lost | undecided_attention(step, lambda: second, ALIKE) | torn | zeros.samples
        self.states, self.lost = (step.state, second.state), lost
        order = self.inputs.order
        return restored(step, order), DeviationSecondPass(restored(second, order), lost, zeros.heads)


def undecided_attention(
    step: DeviationStep, second: Callable[[], DeviationStep], alike: float = math.inf
) -> Bool[Tensor, " batch"]:
    """True for samples that attend to tokens that rounding or a cut of scores chose.

    Both passes may have the same output, because the tokens in question are equal as far as R can tell; in later layers
    what those tokens differ by may be the whole residual.

    Args:
        step: The layer of the first pass.
        second: Gives that of the second; called where scores are steep.
        alike: The distance of two states up to which attention elsewhere counts: others are found different anyway.
    """
    unknown = torch.zeros_like(step.state.valid.mask[:, 0])
    for name in ("attention", "cross"):
        P: comparison.AnyPattern | None = getattr(step, name)
        if P is None or not must_compute("second_pass.steep", comparison.steep_scores(P)):
            continue
        other, Q = second().state, getattr(second(), name)
        elsewhere = comparison.attends_elsewhere(P, Q)
        if alike < math.inf:
            elsewhere = elsewhere & (comparison.state_distance(step.state, other) <= alike)
        unknown = unknown | comparison.cut_away(P, step.state) | comparison.undecided(P, Q) | elsewhere
    return unknown


def _halves(step: DeviationStep) -> Iterator[DeviationStep]:
    """The layers of two passes that ran as one batch."""
    heads, samples = step.heads, len(step.state.valid.mask) // 2
    projection = None if heads is None else heads.output  # the one tensor of a step that has no axis of samples
    for half in (slice(samples), slice(samples, None)):
        yield converted(step, lambda t, half=half: t if t is projection else t[half])
