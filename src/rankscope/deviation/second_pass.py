"""Runs the network a second time with different rounding: readings on which the passes differ are marked.

Called by `profiles/propagation.py` (`with_second_pass`); `profiles/agreement.py` compares the readings. Layer by layer,
after the first pass (`propagate.py`) has finished a layer, `SecondPass.run_layer` takes the second pass's own state
through the same block: by the plain rules where float64 resolves what tokens differ by (they share no formula with
deviation arithmetic), below that by the rules of deviation arithmetic with their last digits perturbed
(`perturbation.py`). That costs a plain pass where tokens stay apart, and as much as the first pass where they do not.
Over many layers float64's own rounding may grow beyond what counts as agreement while deviation arithmetic has lost
nothing; then a pass by perturbed rules from the first layer on settles it (`alone`). On a GPU both passes are recorded
and replayed together (`replay.py`), and layers of one form are stacked along the samples (`StackSecondPass`) for
`profiles/layer_stack.py` to read in one go.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.deviation import comparison
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.by_rows import PatternByRows
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.perturbation import (
    PerturbedDeviation,
    PerturbedPlain,
    PerturbedRows,
    PerturbedStreamed,
    is_cached,
)
from rankscope.deviation.propagate import DeviationStep, PassInputs, at_once, layers, restored, run_block
from rankscope.deviation.proved_zeros import UnprovedZeros, may_be_unproved, unproved
from rankscope.deviation.replay import pass_cache
from rankscope.deviation.scaled import chosen
from rankscope.deviation.state import State
from rankscope.nets import Step, Transformer
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.streaming import AttentionRequest, PatternNumbers
from rankscope.nets.traversal import Block, BlockOutput, traverse
from rankscope.nets.weights import outline
from rankscope.shapes import Bool, Float

RESOLVED = 1e-4  # the share of the tokens' size by which they must differ for plain rules in float64 to be used
ALIKE = 1e-9  # the distance of two states up to which they count as the same
WITHIN = 300.0  # the largest |log| of the size of tokens for which plain rules are used: 1e+-130

Structure = TypeVar("Structure")
Bare = TypeVar("Bare", Step, DeviationStep)


def with_second_pass(
    inputs: PassInputs, by_rows: AttentionRequest | None = None, compile: bool = False
) -> Iterator[tuple[DeviationStep, "SecondPassLayer"]]:
    """Yields every layer of the first pass together with the same layer of the second.

    `by_rows` says what is wanted of attention patterns that are too large to be held."""
    second_pass = SecondPass(inputs, by_rows=by_rows)
    if not (at_once(inputs, compile, passes=2) and _perturbation_fits(inputs)):
        for step in layers(inputs, compile):
            yield step, second_pass.run_layer(step)
        return
    result = pass_cache(compile).run(inputs.net, inputs.settings, inputs.state, second_pass_of_layers)
    blocks = [None, *inputs.net.blocks]
    for step, block, tensors in zip(_steps(inputs.state, result.layers), blocks, result.second_pass, strict=True):
        yield restored(step, inputs.order), SecondPassLayer(second_pass, block, *tensors)


def _steps(state: State, outputs: Sequence[BlockOutput]) -> list[DeviationStep]:
    """The steps of a pass from its input and what its blocks gave."""
    return [DeviationStep(0, state, None), *(DeviationStep(n, *output) for n, output in enumerate(outputs, 1))]


def _perturbation_fits(inputs: PassInputs) -> bool:
    """True if the random row of `perturbation.py` is short enough to stay in memory, where a captured pass reads it."""
    arch, (samples, tokens) = inputs.net.arch, inputs.state.valid.mask.shape
    memory = inputs.settings.memory
    columns = max(tokens, 0 if memory is None else memory.valid.shape[1])
    heads = arch.heads * max(columns, arch.head_width, arch.value_width)
    return is_cached(2 * samples * columns * max(arch.width, arch.mlp_width, heads), inputs.net.device)


class SecondPass:
    """Runs the network a second time with different rounding, one block at a time.

    `plain_rules` are float64's; `perturbed_rules` and `perturbed_again_rules` are deviation arithmetic with
    two different perturbations of the last digits."""

    plain_rules: PerturbedPlain | PerturbedStreamed

    def __init__(self, inputs: PassInputs, seed: int = 0, by_rows: AttentionRequest | None = None) -> None:
        """Starts from the inputs of the first pass; with `by_rows`, attention goes by blocks of rows."""
        self.inputs = inputs
        arch, settings, seeds = inputs.net.arch, inputs.settings, (seed, seed + 1, seed + 2)
        if by_rows is None:
            self.plain_rules = PerturbedPlain(arch, settings, seed)
            rules = [PerturbedDeviation(arch, settings, rule_seed) for rule_seed in seeds]
        else:
            self.plain_rules = PerturbedStreamed(inputs.net, settings, by_rows, seed)
            rules = [PerturbedRows(inputs.net, settings, rule_seed, by_rows.block_bytes) for rule_seed in seeds]
        self.perturbed_rules, self.perturbed_again_rules, self.rules_alone = rules
        self.last_alone = DeviationStep(0, inputs.state, None)  # the last layer that `alone` was asked for
        # The first product with a matrix rounds the input as well.
        self.state = self.perturbed_rules.noise.of(inputs.state)
        self.first_pass_before = inputs.state
        self.lost = torch.zeros(len(inputs.state.valid.mask), dtype=torch.bool, device=inputs.net.device)

    def run_layer(self, step: DeviationStep) -> "SecondPassLayer":
        """The second pass through the layer that the first pass has just finished as `step`."""
        before_first, self.first_pass_before = self.first_pass_before, step.state
        if step.layer == 0:
            return SecondPassLayer(self, None, self.state, torch.zeros_like(self.lost), None, self.lost)
        block, before = self.inputs.net.blocks[step.layer - 1], self.state
        resolved, plain, numbers = _resolves(before), None, None
        self.plain_rules.losses.short, self.perturbed_rules.losses.short = {}, {}
        if self.inputs.net.arch.parts:  # what they remember of earlier layers is of one arithmetic
            resolved = torch.zeros_like(resolved)
        if must_compute("second_pass.resolved_before", resolved.any()):
            X, P, *rest = traverse(block, self.plain_rules, before.tokens())
            X = before.valid.zero_padding(X)
            numbers, P = (P, None) if isinstance(P, PatternNumbers) else (None, P)
            # What the first pass has lost, float64 may still resolve.
            after = State.of(X.nan_to_num(0.0, 0.0, 0.0), before.valid.mask)
            resolved = resolved & X.isfinite().flatten(1).all(1) & (_resolves(step.state) | _resolves(after))
            if must_compute("second_pass.resolved_after", resolved.any()):
                plain = Step(step.layer, X.nan_to_num(0.0, 0.0, 0.0), P, *rest)
        layer = SecondPassLayer(self, block, before, resolved, plain, self.lost, numbers=numbers)
        if plain is None:
            self.state = layer.perturbed_inside.state
        else:
            every = can_skip("second_pass.all_resolved", resolved.all())
            self.state = after if every else _chosen(resolved, after, layer.perturbed_inside.state)
        plain_losses, losses = self.plain_rules.losses, self.perturbed_rules.losses
        short = {
            name: plain_losses.short.get(name, False) | losses.short.get(name, torch.zeros_like(before.valid.mask))
            for name in {**plain_losses.short, **losses.short}
        }
        if plain is not None:
            short[""] = comparison.short_tokens(after) & resolved[:, None]
        zero = self._rounded_to_zero(block, before, before_first, step, short)
        self.lost = self.lost | _hidden(step, layer) | plain_losses.torn | losses.torn | zero.samples
        return replace(layer, lost=self.lost, perturbed_step=layer.perturbed_so_far, lost_heads=zero.heads)

    def alone(self, layer: int) -> DeviationStep:
        """A layer by perturbed rules of deviation arithmetic alone, from the first layer on, tokens in their original
        order; layers are best asked for in turn."""
        if layer < self.last_alone.layer or self.last_alone.layer == 0:
            self.rules_alone.memory = {}
            self.last_alone = DeviationStep(0, self.rules_alone.noise.of(self.inputs.state), None)
        for block in self.inputs.net.blocks[self.last_alone.layer : layer]:
            self.rules_alone.begin(block)
            self.last_alone = run_block(block, self.rules_alone, self.last_alone.state)
        return restored(self.last_alone, self.inputs.order)

    def _rounded_to_zero(
        self, block: Block, before: State, first_before: State, step: DeviationStep, short: dict[str, Tensor]
    ) -> UnprovedZeros:
        """Return which samples and heads hold a zero that is rounding (`proved_zeros.py`), if there is one to look at.

        Args:
            block: The layer.
            before: The second pass's state before it.
            first_before: The first pass's state before it.
            step: The layer of the first pass.
            short: By norm of this layer, the tokens that were zero or nearly so when it met them; "" after the layer.
        """
        # Uniform attention makes the outputs of heads equal, unless they have gates.
        active = () if block.arch.kernel == "uniform" and not block.arch.head_gate else block.active_heads
        suspect = may_be_unproved(first_before, step, active)
        for tokens in short.values():
            suspect = suspect | tokens.any(-1)
        if block.arch.parts:  # they have no rule for what may be zero: no zero is proved
            return UnprovedZeros.all(first_before, step, active)
        if not must_compute("second_pass.zeros", suspect.any()):
            return UnprovedZeros.none(before, block.arch.heads)
        self.perturbed_rules.begin(block)
        return unproved(block, self.perturbed_rules, before, short)


def second_pass_of_layers(
    net: Transformer, settings: PassSettings, state: State, passed: Sequence[BlockOutput]
) -> tuple[tuple[tuple[Any, ...], ...], SecondPass]:
    """The second pass of all layers, after the first pass has run them all: of each layer the fields `before` to
    `perturbed_step` of its `SecondPassLayer`, which a CUDA graph writes (`replay.py`). Its questions about numbers
    count as those of layers beyond the network's."""
    second_pass, tensors = SecondPass(PassInputs(net, state, settings, None)), []
    for step in _steps(state, passed):
        at_layer(net.arch.layers + step.layer)
        layer = second_pass.run_layer(step)
        inside = (layer.before, layer.resolved, layer.plain_step)
        tensors.append((*inside, layer.lost, layer.perturbed_so_far, layer.lost_heads))
    return tuple(tensors), second_pass


@dataclass(frozen=True)
class SecondPassLayer:
    """One layer of the second pass: by plain rules where float64 resolves it, else by perturbed rules."""

    second_pass: SecondPass
    block: Block | None
    before: State  # the second pass's tokens before the block
    resolved: Bool[Tensor, " batch"]  # True where float64 resolves what tokens differ by, before the block and after
    plain_step: Step | None  # the layer by plain rules, valid tokens first; None if float64 resolves no sample
    lost: Bool[Tensor, " batch"]
    """True where nothing is known of the sample from here on: a token became so short beside the others that
    one scale does not hold them, or was rounded to zero, or the differences of equal tokens may have been all that was
    left, or a norm gave a sign to a token that is zero but for rounding."""
    perturbed_step: DeviationStep | None = None  # the layer by perturbed rules, if it was computed already
    lost_heads: Bool[Tensor, "batch head"] | None = None
    """True where all that the outputs of a head differ by was rounded to zero."""
    numbers: PatternNumbers | None = None
    """Statistics of the attention pattern by plain rules, where it goes by rows; valid tokens first."""

    @property
    def perturbed_so_far(self) -> DeviationStep | None:
        """The layer by perturbed rules if anyone has asked for it, else None."""
        return cast(DeviationStep | None, self.__dict__.get("perturbed_inside", self.perturbed_step))

    @cached_property
    def perturbed_inside(self) -> DeviationStep:
        """The layer by perturbed rules of deviation arithmetic, valid tokens first."""
        if self.perturbed_step is not None:
            return self.perturbed_step
        if self.block is None:
            return DeviationStep(0, self.before, None)
        return self._by_rules(self.block, self.second_pass.perturbed_rules)

    @cached_property
    def perturbed(self) -> DeviationStep:
        """The layer by perturbed rules of deviation arithmetic, tokens in their original order."""
        return restored(self.perturbed_inside, self.second_pass.inputs.order)

    @cached_property
    def perturbed_again(self) -> DeviationStep:
        """The layer by the same rules with another perturbation, tokens in their original order."""
        if self.block is None:
            return self.perturbed
        step = self._by_rules(self.block, self.second_pass.perturbed_again_rules)
        return restored(step, self.second_pass.inputs.order)

    def _by_rules(self, block: Block, rules: PerturbedDeviation) -> DeviationStep:
        rules.begin(block)
        return run_block(block, rules, self.before)

    def perturbed_for(self, where: Tensor) -> DeviationStep:
        """`perturbed`, of which the caller reads the samples `where` alone."""
        return self.perturbed

    def perturbed_again_for(self, where: Tensor) -> DeviationStep:
        """`perturbed_again`, of which the caller reads the samples `where` alone."""
        return self.perturbed_again

    @cached_property
    def alone(self) -> DeviationStep:
        """The layer of a pass by perturbed rules from the first layer on, tokens in their original order."""
        return self.second_pass.alone(0 if self.block is None else self.block.index + 1)

    def alone_for(self, where: Tensor) -> DeviationStep:
        """`alone`, of which the caller reads the samples `where` alone."""
        return self.alone

    @cached_property
    def plain(self) -> Step | None:
        """The layer by plain rules, tokens in their original order."""
        order = self.second_pass.inputs.order
        if self.plain_step is None or order is None:
            return self.plain_step
        return self.plain_step.restored(order)

    @property
    def restored_numbers(self) -> PatternNumbers | None:
        """The statistics `numbers`, tokens in their original order."""
        order = self.second_pass.inputs.order
        return self.numbers if order is None or self.numbers is None else self.numbers.restored(order)

    def plain_rows(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of the pattern by plain rules, made as they are asked for; valid tokens first."""
        assert self.numbers is not None and self.numbers.rows is not None
        maker, every = self.numbers.rows, slice(None)
        pattern = maker.pattern(every, every, rows.start, rows.stop)
        return F.pad(pattern, (0, maker.k.shape[2] - pattern.shape[-1]))


def _hidden(step: DeviationStep, layer: SecondPassLayer) -> Bool[Tensor, " batch"]:
    """Return which samples attend to tokens that rounding or a cut of scores chose, although both passes have the same
    output.

    The outputs agree because the tokens in question are equal as far as R can tell; in later layers what those tokens
    differ by may be the whole residual. Compared is the plain second pass where it resolves every sample (then the
    perturbed pass need not be looked at), and the perturbed one elsewhere.
    """
    hidden = torch.zeros_like(layer.resolved)
    for name, name_of_rows in (("attention", "rows"), ("cross", "cross_rows")):
        P: comparison.AnyPattern | None = getattr(step, name) or getattr(step, name_of_rows)
        if P is None or not must_compute("second_pass.steep", comparison.steep_scores(P).any()):
            continue
        hidden = hidden | comparison.cut_away(P, step.state)
        plain: comparison.Pattern | None = getattr(layer.plain, name, None)
        if isinstance(P, PatternByRows) and name == "attention":
            plain = layer.plain_rows
        if (
            plain is not None
            and layer.plain is not None
            and P.largest_before_cap is None  # a cap hides by how much the passes differ
            and can_skip("second_pass.plain_pattern", layer.resolved.all())
        ):
            state = State.of(layer.plain.state, step.state.valid.mask)
            alike = comparison.state_distance(step.state, state) <= ALIKE
            hidden = hidden | comparison.attends_elsewhere(P, plain) & alike
        else:
            second = layer.perturbed
            Q: comparison.AnyPattern = getattr(second, name) or getattr(second, name_of_rows)
            pattern = Q.matrix() if isinstance(Q, DeviationPattern) else Q.matrix
            alike = comparison.state_distance(step.state, second.state) <= ALIKE
            hidden = hidden | comparison.attends_elsewhere(P, pattern) & alike | comparison.undecided(P, Q)
    return hidden


def _resolves(state: State) -> Bool[Tensor, " batch"]:
    """True where float64 resolves the tokens: numbers are within its range, differences not lost beside their size."""
    differences = state.R.log_size()
    size = torch.maximum(state.x.log_size(), differences)  # not `state.log`: values need not be of size one
    return (differences - size > math.log(RESOLVED)) & (size.abs() < WITHIN)


def _chosen(pick: Bool[Tensor, " batch"], a: State, b: State) -> State:
    """The samples of a where `pick` is true, those of b elsewhere."""
    return State(chosen(pick, a.x, b.x), chosen(pick, a.R, b.R), a.valid)


class DifferentLayersError(Exception):
    """Layers that cannot be stacked, since they differ in form."""


@dataclass(frozen=True, eq=False)
class StackSecondPass:
    """The second pass of several layers, stacked, as `SecondPassLayer` is that of one."""

    steps: Sequence[DeviationStep]  # the layers of the first pass
    layers: Sequence[SecondPassLayer]
    attention: bool  # whether attention is asked for
    restored_numbers: PatternNumbers | None = None
    lost_heads: None = None  # heads are read layer by layer

    @cached_property
    def resolved(self) -> Bool[Tensor, " batch"]:
        """True where float64 resolves what the tokens differ by."""
        return torch.cat([layer.resolved for layer in self.layers])

    @cached_property
    def lost(self) -> Bool[Tensor, " batch"]:
        """True where nothing is known of the sample."""
        return torch.cat([layer.lost for layer in self.layers])

    @property
    def before(self) -> State:
        """Tokens before the first of the layers: they are asked for their shape."""
        return self.layers[0].before

    @cached_property
    def plain(self) -> Step | None:
        """The layers by plain rules of float64."""
        plain = [bare(layer.plain, self.attention) for layer in self.layers if layer.plain is not None]
        return joined(plain) if plain else None

    def perturbed_for(self, where: Tensor) -> DeviationStep:
        """The layers by perturbed rules, right for those that hold a sample in `where`."""
        return self._made("perturbed", where)

    def perturbed_again_for(self, where: Tensor) -> DeviationStep:
        """The layers by perturbed rules once more, perturbed in another way."""
        return self._made("perturbed_again", where)

    def alone_for(self, where: Tensor) -> DeviationStep:
        """The layers of a pass by perturbed rules from the first layer on."""
        return self._made("alone", where)

    def _made(self, name: str, where: Tensor) -> DeviationStep:
        """Nobody looks at the other layers: those of the first pass stand in for them."""
        wanted = where.reshape(len(self.layers), -1).any(1).tolist()
        steps: list[DeviationStep] = [
            getattr(layer, name) if want else step
            for want, layer, step in zip(wanted, self.layers, self.steps, strict=True)
        ]
        return joined([bare(step, self.attention) for step in steps])


SecondPassStep = SecondPassLayer | StackSecondPass  # the second pass of one layer, or of several side by side


def bare(step: Bare, attention: bool) -> Bare:
    """A step without its index and what is read off each layer by itself."""
    kept = step.attention if attention else None
    return step._replace(layer=0, attention=kept, heads=None, routing=None, cross=None)


def joined(parts: Sequence[Structure]) -> Structure:
    """Structures of one form as one, their tensors one after the other along the samples."""
    if any(form(part) != form(parts[0]) for part in parts[1:]):
        raise DifferentLayersError
    return _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, tuple):
        make = getattr(type(first), "_make", tuple)
        return make(_joined(entries) for entries in zip(*parts, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: _joined([getattr(part, name) for part in parts]) for name in names})
    return first


def form(structure: Any) -> Any:
    """Equal for structures that can be joined; a tensor without an axis of samples equals no other."""
    return outline(structure, lambda t: (t.shape, t.dtype) if t.ndim else object())
