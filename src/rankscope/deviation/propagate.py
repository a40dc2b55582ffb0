"""`propagate`: the forward pass in deviation arithmetic, layer by layer.

`paths` and `theory` call `propagate`; `profiles/measuring.py` calls `layers`, or `second_pass.py`, which runs the
same blocks twice. A pass goes in this order: `PassInputs.of` brings network and tokens to float64,
moves padding to the end and splits the tokens into a `State`; `layers` takes it through each block by the
rules of `rules.py` (`nets/traversal.py` calls them), on a GPU by a captured graph of all blocks (`replay.py`);
`restored` puts the tokens of each step back in their original order; `finish` applies the final norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, HeadOutputs, Logits
from rankscope.deviation.by_rows import PatternByRows, StreamedDeviation
from rankscope.deviation.decisions import at_layer
from rankscope.deviation.norms import normalise
from rankscope.deviation.replay import can_replay, replay_cache, waits
from rankscope.deviation.rules import Deviation
from rankscope.deviation.state import Scaled, State, ValidTokens
from rankscope.doubled import Doubled, nearest
from rankscope.errors import ArchitectureError
from rankscope.nets import (
    KERNELS,
    Block,
    PassSettings,
    TokenOrder,
    Transformer,
    converted,
    kernel_of,
    norm_of,
    pieces,
    streams,
    traverse,
)
from rankscope.shapes import Float

StartingTensors = tuple[Tensor, Tensor | None, PassSettings, TokenOrder | None]
"""The tokens, positions, settings and order of a `PassInputs`."""


class DeviationStep(NamedTuple):
    """One layer of a pass: the output of its block. Layer 0 is the input, which has no attention."""

    layer: int
    state: State  # the hidden states after the layer
    attention: DeviationPattern | PatternByRows | None
    """The attention pattern of the layer; by rows, with valid tokens first in it, if it is too large to be held."""
    heads: HeadOutputs | None = None  # the outputs of its heads, before the output projection
    routing: Tensor | None = None
    """In a mixture of experts, the weight of each expert for each token `[batch, token, expert]`."""
    cross: DeviationPattern | PatternByRows | None = None
    """In a layer with cross-attention, the pattern over the memory `[batch, head, token, source]`, held or by rows."""


def applies(net: Transformer) -> bool:
    """True if deviation arithmetic has a rule for every part of the network.

    >>> from rankscope.nets import Architecture
    >>> [applies(Transformer.random(Architecture(layers=1, width=8, heads=2, kernel=kernel)))
    ...  for kernel in ("softmax", "sigmoid")]
    [True, False]
    """
    return not without_rule(net)


def without_rule(net: Transformer) -> list[str]:
    """The names of the parts of a network that deviation arithmetic has no rule for."""
    arch = net.arch
    has_kernel = kernel_of(arch.kernel).deviation is not None
    norm = norm_of(arch.norm)
    missing = [] if has_kernel else [f"kernel {getattr(arch.kernel, 'name', arch.kernel)}"]
    missing += ["disentangled positions"] if arch.positions == "disentangled" else []
    missing += [f"norm {norm.name}"] if norm is not None and norm.deviation_rule is None else []
    return missing + [
        part.name for part in arch.parts if any(not hasattr(piece, Deviation.name) for piece in pieces([part]))
    ]


def propagate(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    *,
    doubled: bool = False,
    by_rows: bool = False,
    block_bytes: int | None = None,
) -> Iterator[DeviationStep]:
    """Yields the layers of the forward pass with hidden states `X = 1 x^T + e^s R`, in float64 whatever the
    network's dtype: x is the common token, R the tokens' deviations from it, s a log-scale per sample.

    Args:
        net: The network.
        X: Its input tokens `[batch, token, width]`.
        padding: True at positions `[batch, token]` that are no tokens.
        doubled: Runs the rules in doubled precision (about 32 digits); `rounded` makes ordinary steps of it.
        by_rows: Takes attention a block of rows at a time, so that no `[head, token, token]` is held.
        block_bytes: The bytes of such a block, of all samples and heads; left out, by the device.

    Raises:
        ArchitectureError: The network has a part without a rule (`without_rule`), or none by rows.

    >>> from rankscope.nets import Architecture
    >>> san = Transformer.random(Architecture(layers=8, width=64, heads=4)).variant("san")
    >>> *_, last = propagate(san, torch.randn(1, 16, 64))
    >>> bool(last.state.R.log < -1000)
    True
    """
    if not applies(net):
        sentence = f"deviation arithmetic has no rule for {', '.join(without_rule(net))} of this network"
        kernels = f"(kernels that have one: {', '.join(name for name in KERNELS if KERNELS[name].deviation)})"
        raise ArchitectureError(f"{sentence} {kernels}: use arithmetic='float64'", subject="arithmetic")
    if by_rows and not (streams(net.arch) and kernel_of(net.arch.kernel).deviation_by_row):
        sentence = "by_rows needs a kernel whose rows are made one by one, no log_gain, and no part that changes P"
        raise ArchitectureError(f"{sentence} or reads whole masks: leave it out", subject="by_rows")
    inputs = PassInputs.of(net, X, padding, doubled=doubled, by_rows=by_rows, block_bytes=block_bytes)
    yield from layers(inputs)


def layers(inputs: "PassInputs", replayed: bool = True) -> Iterator[DeviationStep]:
    """Yields the steps of a pass from its inputs, for a network whose parts all have rules; on a GPU `replayed`, if it
    can be."""
    net = inputs.net
    at_layer(0)
    yield restored(DeviationStep(0, inputs.state, None), inputs.order)
    replays = replayed and not isinstance(inputs.tokens, Doubled) and waits(inputs.tokens) and not inputs.by_rows
    if replays and can_replay(net, inputs.tokens.shape[:2], net.arch.layers):
        steps = iter(replay_cache.run("layers", partial(_all_blocks, net), inputs.tensors, net))
    else:
        steps = block_by_block(inputs)
    for step in steps:
        yield restored(step, inputs.order)


def _all_blocks(net: Transformer, tensors: StartingTensors) -> tuple[DeviationStep, ...]:
    """All layers of a pass as a function of tensors, for `replay.py`."""
    return tuple(block_by_block(PassInputs(net, *tensors)))


def block_by_block(inputs: "PassInputs") -> Iterator[DeviationStep]:
    """Yields the layers of a pass, one block after the other; valid tokens come first."""
    rules, state = inputs.rules, inputs.state
    for block in inputs.net.blocks:
        at_layer(block.index + 1)
        if not state.R.value.shape[1]:
            yield DeviationStep(block.index + 1, state, _empty_pattern(inputs.net, state))
            continue
        step = run_block(inputs.block(block.index), rules, state)
        state = step.state
        yield step


def run_block(block: Block, rules: Deviation, state: State) -> DeviationStep:
    """One block applied to a state by these rules."""
    state, P, heads, routing, cross = traverse(block, rules, state)
    return DeviationStep(block.index + 1, state, P, heads, routing, cross)


def rounded(step: DeviationStep) -> DeviationStep:
    """A step in doubled precision with every number rounded to the nearest float64; scores as log P, which they are up
    to a constant of each row: scores of 1e9 would lose what differs between them."""
    P = step.attention
    if isinstance(P, DeviationPattern) and P.logits is not None and P.p.numel():
        logs = P.logits.log_softmax(P.visible).masked_fill(~P.visible, 0.0)
        zero = torch.zeros_like(P.p)
        logits = Logits(zero, Scaled(logs, torch.zeros_like(P.off_top.log)), Scaled.plain(zero).by_head())
        step = step._replace(attention=replace(P, logits=logits))
    return converted(step, nearest)


@dataclass(frozen=True)
class PassInputs:
    """What a pass starts from: the network in float64, its input tokens, and the settings of its layers."""

    net: Transformer
    tokens: Float[Tensor, "batch token width"]  # valid ones first
    positions: Float[Tensor, "token width"] | None  # absolute positions that are still to be added to the tokens
    settings: PassSettings
    order: TokenOrder | None  # how valid tokens were moved to the front; None if they were there
    doubled: bool = False
    by_rows: bool = False
    block_bytes: int | None = None

    @classmethod
    def of(
        cls,
        net: Transformer,
        X: Tensor,
        padding: Tensor | None = None,
        *,
        doubled: bool = False,
        by_rows: bool = False,
        block_bytes: int | None = None,
    ) -> "PassInputs":
        """The inputs of a pass; the arguments are those of `propagate`."""
        net = net.to(torch.float64)
        X = X.to(dtype=torch.float64, device=net.device)
        if doubled:
            X, valid, order = net.prepared(Doubled.of(X), padding)
            settings = net.settings(X, valid)
            if (memory := settings.memory) is not None:
                settings = replace(settings, memory=replace(memory, tokens=Doubled.of(memory.tokens)))
            return cls(net, X, None, settings, order, doubled)
        X, valid, order = net.prepared(X, padding, positions=False)
        table = net.weights.positions
        settings = PassSettings.of(net.arch, net.weights, X, valid, net.memory, whole_masks=not by_rows)
        positions = None if table is None else table[: X.shape[1]]
        return cls(net, X, positions, settings, order, by_rows=by_rows, block_bytes=block_bytes)

    @property
    def tensors(self) -> StartingTensors:
        """The tensors of the inputs; the network's are not among them."""
        return self.tokens, self.positions, self.settings, self.order

    @cached_property
    def state(self) -> State:
        """The input tokens as a state."""
        return State.of(self.tokens, self.settings.valid, self.positions)

    @property
    def rules(self) -> Deviation:
        """The rules that take states through blocks."""
        if self.by_rows:
            return StreamedDeviation(self.net, self.settings, self.block_bytes)
        return Deviation(self.net.arch, self.settings)

    def block(self, index: int) -> Block:
        """Layer `index` (0-based), its weights in the precision of the pass."""
        block = self.net.blocks[index]
        return block.with_weights(converted(block.weights, Doubled.of)) if self.doubled else block


def _empty_pattern(net: Transformer, state: State) -> DeviationPattern:
    """The attention pattern of samples without tokens."""
    shape = (len(state.valid.mask), net.arch.heads, 0, 0)
    empty = state.R.value.new_zeros(shape)
    top = torch.zeros(*shape[:2], 1, dtype=torch.long, device=empty.device)
    return DeviationPattern(empty.sum(-1), Scaled.plain(empty).by_head(), top, empty[:, :1].bool())


def restored(step: DeviationStep, order: TokenOrder | None) -> DeviationStep:
    """The step with tokens in their original order: padding was moved to the end before the pass."""
    if order is None:
        return step
    state = step.state
    valid = ValidTokens(state.valid.mask.gather(1, order.back))
    return step._replace(
        state=State(state.x, state.R.mapped(order.restored), valid),
        attention=step.attention and step.attention.restored(order),
        heads=step.heads and replace(step.heads, R=step.heads.R.mapped(order.restored_rows)),
        routing=None if step.routing is None else order.restored(step.routing),
        cross=step.cross and step.cross.restored(order, of_memory=True),
    )


def finish(net: Transformer, state: State) -> State:
    """The last state through the final norm, if the network has one.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=1, width=8, heads=2, norm="layer", final_norm=True))
    >>> *_, last = propagate(net, torch.randn(1, 4, 8))
    >>> tuple(finish(net, last.state).tokens().shape)
    (1, 4, 8)
    """
    if not net.arch.final_norm:
        return state
    net = net.to(torch.float64)
    return normalise(state, net.arch.norm, net.weights.final_norm, net.arch.norm_eps)
