"""Run a network in deviation arithmetic, one layer at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, HeadOutputs
from rankscope.deviation.blocks import PatternByRows
from rankscope.deviation.norms import has_rule, normalise
from rankscope.deviation.replay import can_replay, pass_cache
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.state import State, ValidTokens
from rankscope.deviation.streaming import StreamedDeviation
from rankscope.doubled import Doubled, nearest
from rankscope.errors import ArchitectureError
from rankscope.nets.kernels import KERNELS, kernel_of
from rankscope.nets.padding import TokenOrder
from rankscope.nets.parts import pieces
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block, traverse
from rankscope.nets.weights import converted


class DeviationStep(NamedTuple):
    """What one layer gives: its number (0 is the input, which has no attention and no heads), its state, its
    attention, and what its heads say."""

    layer: int
    state: State
    attention: DeviationPattern | None
    heads: HeadOutputs | None = None
    routing: Tensor | None = None
    """The weight of each expert for each token `[batch, token, expert]`, of a mixture of experts."""
    cross: DeviationPattern | None = None
    """Attention to the memory `[batch, head, token, source]`, of a layer that has cross-attention."""
    rows: PatternByRows | None = None
    """Attention by rows, where it is too large to be held; valid tokens stand first there."""
    cross_rows: PatternByRows | None = None
    """The same of attention to the memory."""


def applies(net: Transformer) -> bool:
    """Whether deviation arithmetic has a rule for every part of the network."""
    return not without_rule(net)


def without_rule(net: Transformer) -> list[str]:
    """The parts of a network that deviation arithmetic has no rule for."""
    arch = net.arch
    has_kernel = kernel_of(arch.kernel).deviation is not None
    found = [] if has_kernel else [f"kernel {getattr(arch.kernel, 'name', arch.kernel)}"]
    found += [] if has_rule(arch.norm) else [f"norm {getattr(arch.norm, 'name', arch.norm)}"]
    return found + [
        part.name
        for part in arch.parts
        if any(not hasattr(piece, Deviation.name) for piece in pieces([part]))
    ]


def propagate(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    *,
    doubled: bool = False,
    compile: bool = False,
    by_rows: bool = False,
) -> Iterator[DeviationStep]:
    """The forward pass as `X = 1 x^T + e^s R`, in float64 whatever the network's dtype.

    `doubled`: by the same rules in doubled precision (about 32 digits), weights and tokens taken as they are;
    `rounded` makes an ordinary step of what comes. `compile`: layers are compiled first, which takes a minute
    or two and is worth it for passes by the hundred over batches of one shape (`replay.py`). `by_rows`:
    attention a block of rows at a time, so that no `[head, token, token]` is held (`blocks.py`).

    >>> from rankscope.nets import Architecture
    >>> san = Transformer.random(Architecture(layers=8, width=64, heads=4)).variant("san")
    >>> *_, last = propagate(san, torch.randn(1, 16, 64))
    >>> bool(last.state.R.log < -1000)
    True
    """
    if not applies(net):
        raise ArchitectureError(
            f"deviation arithmetic has no rule for {', '.join(without_rule(net))} of this network (kernels "
            f"that have one: {', '.join(name for name in KERNELS if KERNELS[name].deviation)}): use "
            "arithmetic='float64'",
            subject="arithmetic",
        )
    yield from layers(PassInputs.of(net, X, padding, doubled=doubled, by_rows=by_rows), compile)


def layers(given: "PassInputs", compile: bool = False) -> Iterator[DeviationStep]:
    """The steps of a pass from what is given, which a network has rules for."""
    net, rules, state = given.net, given.rules, given.state
    yield restored(DeviationStep(0, state, None), given.order)
    if at_once(given, compile):
        for number, passed in enumerate(pass_cache(compile).run(net, given.settings, state).layers, 1):
            yield restored(DeviationStep(number, *passed), given.order)
        return
    for block in net.blocks:
        if not state.R.value.shape[1]:
            yield DeviationStep(block.index + 1, state, _nothing(net, state))
            continue
        step = stepped(given.block(block.index), rules, state)
        state = step.state
        yield restored(step, given.order)


def at_once(given: "PassInputs", compile: bool = False, passes: int = 1) -> bool:
    """Whether all layers of a pass, or of so many, are made in one go, and held (`replay.py`)."""
    asked = compile or given.state.x.log.is_cuda
    return asked and not (given.doubled or given.by_rows) and can_replay(given.net, given.state, passes)


def stepped(block: Block, rules: Deviation, state: State) -> DeviationStep:
    """What a layer gives of a state."""
    state, P, heads, routing, cross = traverse(block, rules, state)
    if isinstance(P, PatternByRows) or isinstance(cross, PatternByRows):
        return DeviationStep(block.index + 1, state, None, heads, routing, None, P, cross)
    return DeviationStep(block.index + 1, state, P, heads, routing, cross)


def rounded(step: DeviationStep) -> DeviationStep:
    """A step of doubled precision as an ordinary one, every number the nearest float64."""
    return DeviationStep(
        step.layer,
        converted(step.state, nearest),
        converted(step.attention, nearest),
        converted(step.heads, nearest),
        converted(step.routing, nearest),
        converted(step.cross, nearest),
    )


@dataclass(frozen=True)
class PassInputs:
    """What a pass starts from: the network in float64, its input as a state, and what its layers share."""

    net: Transformer
    state: State
    settings: PassSettings
    order: TokenOrder | None
    """How valid tokens were moved to the front, if they were."""
    doubled: bool = False
    by_rows: bool = False

    @classmethod
    def of(
        cls,
        net: Transformer,
        X: Tensor,
        padding: Tensor | None = None,
        *,
        doubled: bool = False,
        by_rows: bool = False,
    ) -> "PassInputs":
        """Of tokens `[batch, token, width]`; `by_rows` without masks of all tokens."""
        net = net.to(torch.float64)
        X = X.to(dtype=torch.float64, device=net.device)
        if doubled:
            X, valid, order = net.prepared(Doubled.of(X), padding)
            settings = net.settings(X, valid)
            if settings.memory is not None:
                wide = replace(settings.memory, tokens=Doubled.of(settings.memory.tokens))
                settings = replace(settings, memory=wide)
            return cls(net, State.of(X, valid), settings, order, doubled)
        X, valid, order = net.prepared(X, padding, positions=False)
        table = net.weights.positions
        state = State.of(X, valid) if table is None else State.placed(X, table[: X.shape[1]], valid)
        settings = PassSettings.of(net.arch, net.weights, X, valid, net.memory, whole_masks=not by_rows)
        return cls(net, state, settings, order, by_rows=by_rows)

    @property
    def rules(self) -> Deviation:
        """What takes states through blocks."""
        arch, weights = self.net.arch, self.net.weights
        return (
            StreamedDeviation(arch, self.settings, weights)
            if self.by_rows
            else Deviation(arch, self.settings)
        )

    def block(self, index: int) -> Block:
        """Layer `index` (0-based), its weights as the pass has them."""
        block = self.net.blocks[index]
        return block.with_weights(converted(block.weights, Doubled.of)) if self.doubled else block


def _nothing(net: Transformer, state: State) -> DeviationPattern:
    """Attention among no tokens."""
    shape = (len(state.valid.mask), net.arch.heads, 0, 0)
    empty = state.R.value.new_zeros(shape)
    top = torch.zeros(*shape[:2], 1, dtype=torch.long, device=empty.device)
    return DeviationPattern(empty.sum(-1), Scaled.plain(empty).by_head(), top, empty[:, :1].bool())


def restored(step: DeviationStep, order: TokenOrder | None) -> DeviationStep:
    """Tokens back where they stood before padding was moved to the end."""
    if order is None:
        return step
    state, P = step.state, step.attention
    valid = ValidTokens(state.valid.mask.gather(1, order.back))
    return DeviationStep(
        step.layer,
        State(state.x, state.R.mapped(order.restored), valid),
        P
        and replace(
            P,
            p=order.restored_columns(P.p),
            others=P.others.mapped(order.restored_square),
            top=order.forth.gather(1, P.top.flatten(1)).view_as(P.top),
            visible=order.restored_square(P.visible),
            logits=P.logits and P.logits.restored(order),
            apart=P.apart and P.apart.mapped(order.restored_columns),
            scaled_p=P.scaled_p and P.scaled_p.mapped(order.restored_columns),
        ),
        step.heads
        and replace(
            step.heads, R=step.heads.R.mapped(lambda t: order.restored(t.transpose(1, 2)).transpose(1, 2))
        ),
        None if step.routing is None else order.restored(step.routing),
        step.cross and _restored_rows(step.cross, order),
        step.rows,
        step.cross_rows,
    )


def _restored_rows(P: DeviationPattern, order: TokenOrder) -> DeviationPattern:
    """Of attention to a memory, whose tokens have not moved."""
    logits = P.logits and replace(P.logits, D=P.logits.D.mapped(order.restored_rows))
    others, visible = P.others.mapped(order.restored_rows), order.restored_rows(P.visible)
    return replace(P, others=others, visible=visible, logits=logits)


def finish(net: Transformer, state: State) -> State:
    """The last state through the final norm, where there is one."""
    if not net.arch.final_norm:
        return state
    net = net.to(torch.float64)
    return normalise(state, net.arch.norm, net.weights.final_norm, net.arch.norm_eps)
