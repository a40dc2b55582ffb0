"""Runs the network a second time with different rounding: readings on which the passes differ are marked.

`profiles/propagation.py` and `profiles/captured.py` call `with_second_pass`, and for `measure(..., confirm=True)`
`confirmations`; readings are compared by `profiles/agreement.py`. The passes have two stretches:

1. As long as float64 sees what tokens differ by, both passes are plain ones, the first in float64 and the second in
   float32 (`float_passes.py`). Float32 rounds 2^29 times as much, so the difference of the two shows how much float64
   rounds.
2. From the first layer on at which float64 does not see that, both passes are deviation arithmetic (`rules.py`), the
   second with its last digits perturbed (`perturbation.py`). They start from the tokens of float64 after the last layer
   at which float64 and float32 were next to each other (`FloatLayer.slight`); the tokens of the second are moved by
   `EXAGGERATED` times float64's rounding. Layers between that one and the first of this stretch are run once more.

In the first stretch a single reading whose digits float64's rounding took is read off deviation arithmetic instead, of
the tokens after the layer (`FloatSecondPass.tokens_by_deviation`) or of its block (`block_by_deviation`). What no
comparison of two passes shows is looked for in every layer of deviation arithmetic (`undecided_attention`,
`zeros_of_layer`). In a captured graph (`replay.py`) both passes of deviation arithmetic run as one batch.

**Doubled precision**: digits on which a pass of 32 digits and the one in float64 agree are confirmed. Layer by layer,
`confirmations` runs the rules in float64 with their second pass and on `Doubled` tensors. Where the two do not agree,
or float64's own second pass marks a reading, float64 was not enough, and the question is whether 32 digits were: from
there on a second doubled pass runs, perturbed by more than the rounding of the first can have grown to: `MARGIN` times
what float64's has, brought down from 16 digits to 32. Both precisions may agree on what neither holds, such as what two
tokens differ by at 1e-70 of their size. `Confirmation.lost` looks in doubled precision for what no comparison shows.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from rankscope.deviation import comparison
from rankscope.deviation.by_rows import AnyPattern
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.float_passes import FloatLayer, FloatPasses, trusts_floats
from rankscope.deviation.perturbation import (
    TORN,
    UNITS,
    Perturbation,
    PerturbedDeviation,
    PerturbedRows,
    WatchedDeviation,
    repeated,
)
from rankscope.deviation.propagate import DeviationStep, PassInputs, restored, rounded, run_block
from rankscope.deviation.proved_zeros import UnprovedZeros, of_either, zeros_of_layer
from rankscope.deviation.replay import joined
from rankscope.deviation.state import State
from rankscope.nets import AttentionRequest, Block, Step, Transformer, converted
from rankscope.shapes import Bool

EXAGGERATED = 4
"""How many times the usual moves the second pass is perturbed by. Where numbers cancel, a few units in their last place
are left: moves of no more than that could give the same number in both passes by chance. `profiles/agreement.py`
divides differences between the passes by this factor."""
ALIKE = 1e-9  # the distance of two states up to which they count as the same
MARGIN = 100.0
EPS = torch.finfo(torch.float64).eps


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


@dataclass(frozen=True, eq=False)
class FloatSecondPass:
    """One layer of the second pass in float32, where the first ran in float64; tokens in their original order."""

    layer: FloatLayer
    block: Block | None  # None at the input
    before: FloatLayer  # the layer before, valid tokens first; at the input the input itself
    passes: "Callable[[], DeviationPasses]"  # made when they are first needed

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
                if can_skip("second_pass.slight", layer.slight):
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
    hidden = torch.zeros_like(step.state.valid.mask[:, 0])
    for name in ("attention", "cross"):
        P: AnyPattern | None = getattr(step, name)
        if P is None or not must_compute("second_pass.steep", comparison.steep_scores(P)):
            continue
        other, Q = second().state, getattr(second(), name)
        elsewhere = comparison.attends_elsewhere(P, Q)
        if alike < math.inf:
            elsewhere = elsewhere & (comparison.state_distance(step.state, other) <= alike)
        hidden = hidden | comparison.cut_away(P, step.state) | comparison.undecided(P, Q) | elsewhere
    return hidden


def _halves(step: DeviationStep) -> Iterator[DeviationStep]:
    """The layers of two passes that ran as one batch."""
    heads, samples = step.heads, len(step.state.valid.mask) // 2
    projection = None if heads is None else heads.output  # the one tensor of a step that has no axis of samples
    for half in (slice(samples), slice(samples, None)):
        yield converted(step, lambda t, half=half: t if t is projection else t[half])


class _DoubledPasses:
    """The doubled pass, and the perturbed one from the layer where it was first needed."""

    def __init__(self, net: Transformer, X: Tensor, padding: Tensor | None) -> None:
        self.inputs = PassInputs.of(net, X, padding, doubled=True)
        self.rules = WatchedDeviation(self.inputs.net.arch, self.inputs.settings, TORN * EPS)
        self.perturbed_rules = PerturbedDeviation(self.inputs.net.arch, self.inputs.settings)
        self.state = self.inputs.state
        self.perturbed_state: State | None = None  # the state of the perturbed pass; None until it starts


@dataclass(frozen=True)
class Confirmation:
    """One layer in float64 and in doubled precision, tokens in their original order."""

    doubled: DeviationStep  # the layer of the doubled pass, rounded to float64
    single: DeviationStep  # the layer of the pass in float64
    second: DeviationSecondPass  # the layer of float64's second pass
    lost_before: Bool[Tensor, " batch"]  # `lost` of the layer before
    passes: _DoubledPasses
    before: State  # the doubled pass's tokens before this layer
    after: DeviationStep  # the layer of the doubled pass as it is, valid tokens first
    grown: float  # the largest distance of float64's tokens from them so far

    @cached_property
    def zeros(self) -> UnprovedZeros:
        """Which samples and heads hold a zero that is rounding, in 32 digits too."""
        passes, step = self.passes, self.after
        if not step.layer:
            return UnprovedZeros.none(self.before, passes.inputs.net.arch.heads)
        block = passes.inputs.block(step.layer - 1)
        return zeros_of_layer(block, passes.rules, self.before, step, block.active_heads)

    @cached_property
    def lost(self) -> Bool[Tensor, " batch"]:
        """True where nothing is known of the sample from this layer on, in 32 digits either: what
        `DeviationSecondPass.lost` is of float64."""
        lost = self.lost_before | self.zeros.samples | self.passes.rules.losses.torn
        return lost | undecided_attention(self.after, lambda: self.perturbed_inside)

    @cached_property
    def perturbed(self) -> DeviationStep:
        """The layer of the perturbed doubled pass, rounded to float64; the first use starts that pass. Tokens are
        perturbed in float64 too: metrics are read off rounded ones, and some see digits that rounding takes away."""
        step = rounded(restored(self.perturbed_inside, self.passes.inputs.order))
        return step._replace(state=Perturbation().of(step.state))

    @cached_property
    def perturbed_inside(self) -> DeviationStep:
        """The layer of the perturbed doubled pass as it is, valid tokens first."""
        passes, index = self.passes, self.doubled.layer - 1
        if index < 0:
            return self.after
        if passes.perturbed_state is None:
            share = MARGIN * max(self.grown, EPS) * EPS
            passes.perturbed_state = Perturbation(largest_share=min(share, 1e-12)).of(self.before)
            passes.perturbed_rules.carried = dict(passes.rules.carried)  # of the layers before
        step = run_block(passes.inputs.block(index), passes.perturbed_rules, passes.perturbed_state)
        passes.perturbed_state = step.state
        return step


def confirmations(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Iterator[Confirmation]:
    """Yields every layer in float64 and in doubled precision."""
    passes = _DoubledPasses(net, X, padding)
    lost = torch.zeros(len(X), dtype=torch.bool, device=passes.inputs.net.device)
    grown = 0.0
    for single, second in with_second_pass(PassInputs.of(net, X, padding), floats=False):
        assert isinstance(single, DeviationStep) and isinstance(second, DeviationSecondPass)
        before = passes.state
        step = DeviationStep(0, before, None)
        if single.layer:
            step = run_block(passes.inputs.block(single.layer - 1), passes.rules, before)
            passes.state = step.state
        doubled = rounded(restored(step, passes.inputs.order))
        confirmation = Confirmation(doubled, single, second, lost, passes, before, step, grown)
        lost = confirmation.lost
        yield confirmation
        distances = comparison.state_distance(doubled.state, single.state)
        grown = max(grown, float(distances.max()) if len(distances) else 0.0)
        if passes.perturbed_state is not None:
            _ = confirmation.perturbed_inside  # once started, it runs every layer
