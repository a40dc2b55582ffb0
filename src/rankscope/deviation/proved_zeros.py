"""Which zeros of a block are exact, and which are numbers that left float64's range on the way.

A token that sees only zeros is zero, and a matrix of zeros leaves nothing: such zeros are **proved**. The weight
e^-1000 of a token beside others is not zero, though float64 has nothing left of it; a norm without eps gives what it
was multiplied with length one. Both passes take it for zero, so no comparison finds it.

`unproved` takes a state through a block once more, together with its **support**: which entries may be other than
zero, from what is zero among tokens and weights alone (weights of attention are above zero wherever a token sees, and
activations are zero at zero only, but for relu, whose zeros are those of its numbers). Where a token that enters a
norm, a token after the block, or all that tokens differ by is zero in numbers and not in the support, it was rounded to
zero, and nothing is known of the sample from there on; where it is all that the outputs of a head differ by, nothing
is known of that head. `zeros_of_layer`, which `second_pass.py` calls, asks this only of layers where
something is zero, or nearly so (`comparison.short_tokens`): in ordinary networks of none.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import HeadOutputs, Pattern, Values, common_heads, deviation_heads, marked
from rankscope.deviation.comparison import SHORTEST, short_tokens
from rankscope.deviation.decisions import must_compute
from rankscope.deviation.mlp import affine
from rankscope.deviation.perturbation import NEGLIGIBLE, PerturbedDeviation, WatchedDeviation
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.rules import Deviation
from rankscope.deviation.state import LOWEST, Scaled, State, ValidTokens
from rankscope.nets import Arithmetic, Block, Half, Linear, norm_of, traverse
from rankscope.shapes import Bool

NEAR_ZERO = 1e-9  # the share of a sum's terms below which rounding may have decided its sign


class Support(NamedTuple):
    """Numbers of deviation arithmetic, and which of their entries may be other than zero."""

    numbers: Any  # a state, values, or outputs of heads
    x: Bool[Tensor, "batch ..."]  # of the common part
    R: Bool[Tensor, "batch ... token width"]  # of what tokens add to it

    def through(self, linear: Linear) -> tuple[Tensor, Tensor]:
        """The support after a linear map, of the common part (bias included) and of the rest."""
        W = (linear.weight != 0).double()
        x, R = self.x.double() @ W > 0, self.R.double() @ W > 0
        return (x if linear.bias is None else x | (linear.bias != 0)), R


class UnprovedZeros(NamedTuple):
    """What a block rounds to zero."""

    samples: Bool[Tensor, " batch"]  # True where it is a token, or all that tokens differ by
    heads: Bool[Tensor, "batch head"]  # True where it is all that the outputs of a head differ by

    @classmethod
    def none(cls, state: State, heads: int) -> "UnprovedZeros":
        """Nothing in any sample of a state."""
        samples = torch.zeros_like(state.valid.mask[:, 0])
        return cls(samples, samples[:, None].expand(-1, heads))

    @classmethod
    def all(cls, before: State, step: DeviationStep, active: Sequence[int]) -> "UnprovedZeros":
        """Every zero of a layer, `before` the tokens before it, and of its active heads."""
        assert step.heads is not None
        equal = equal_outputs(step.heads.R.value, step.state.valid) & (before.R.log > LOWEST)[:, None]
        is_active = marked(active, equal.shape[1], step.heads.R.value)[:, 0] > 0
        return cls(may_be_unproved(before, step, ()), equal & is_active)


def of_either(flags: Tensor, samples: int) -> Tensor:
    """Flags of samples, or of their heads; where two passes ran as one batch, True where the flag of either is."""
    return flags.view(2, samples, *flags.shape[1:]).any(0) if len(flags) > samples else flags


def zeros_of_layer(
    block: Block,
    rules: PerturbedDeviation | WatchedDeviation,
    before: State,
    step: DeviationStep,
    active: Sequence[int],
    entered: State | None = None,
) -> UnprovedZeros:
    """Which samples and heads hold a zero after a layer that may be due to rounding.

    Args:
        block: The layer.
        rules: Those of a pass that has just gone through it, and noted tokens that were zero, or nearly.
        before: The tokens before the layer, in the pass that `step` is of.
        step: The layer.
        active: Heads whose outputs are looked at.
        entered: The tokens before the layer in the pass of `rules`, which may be both passes as one batch; left out,
            `before`.
    """
    suspect, samples = may_be_unproved(before, step, active, block.arch.head_gate), len(before.valid.mask)
    short, rules.losses.short = rules.losses.short, {}
    for tokens in short.values():
        suspect = suspect | of_either(tokens.any(-1), samples)
    if block.arch.parts:  # they have no rule for what may be zero: no zero is proved
        return UnprovedZeros.all(before, step, active)
    if not must_compute("proved_zeros.suspect", suspect):
        return UnprovedZeros.none(before, block.arch.heads)
    zeros = unproved(block, rules, before if entered is None else entered, short)
    return UnprovedZeros(*(of_either(flags, samples) for flags in zeros))


def may_be_unproved(
    before: State, step: DeviationStep, active: Sequence[int], gated: bool = False
) -> Bool[Tensor, " batch"]:
    """True for samples of a layer that hold a zero to be looked at, `before` the tokens before it: a token, all that
    tokens differ by, all that the outputs of an active head differ by, or where heads are gated the output of a token,
    which may be all that is left once the gates of the others are shut."""
    zero = (step.state.R.log <= LOWEST) & (before.R.log > LOWEST)
    if step.heads is not None:
        lost = equal_outputs(step.heads.R.value, step.state.valid) & (before.R.log > LOWEST)[:, None]
        lost = lost | zero_outputs(step.heads).any(-1) if gated else lost
        if len(active) < lost.shape[1]:  # a list of them would have to cross to where the heads are
            lost = torch.stack([lost[:, head] for head in active], 1) if active else lost[:, :0]
        zero = zero | lost.any(1)
    return zero | short_tokens(step.state).any(-1)


def equal_outputs(R: Tensor, valid: ValidTokens) -> Bool[Tensor, "batch head"]:
    """True for heads whose outputs `[batch, head, token, width]` are the same for all tokens, if there are several."""
    if valid.all and R.shape[2]:
        most, least = R.amax(2), R.amin(2)
    else:
        tokens = valid.mask[:, None, :, None]
        most, least = R.masked_fill(~tokens, -torch.inf).amax(2), R.masked_fill(~tokens, torch.inf).amin(2)
    return (most == least).all(-1) & (valid.count > 1)


def zero_outputs(heads: HeadOutputs) -> Bool[Tensor, "batch head token"]:
    """True for tokens to which a head gives an output of zero."""
    zero = (heads.R.value == 0).all(-1) & (heads.x.value == 0).all(-1)[..., None]
    return zero & heads.valid.mask[:, None]


def unproved(block: Block, rules: Deviation, before: State, short: Mapping[str, Tensor]) -> UnprovedZeros:
    """Which samples and heads hold a zero after this block that is rounding.

    `before` is the state that enters the block: what is zero in it is proved. `short` are tokens that were zero, or
    nearly, when another pass took them through the norm of that name ("": after the block); by these rules rounding
    may be left of them."""
    nonzero = before.R.value.abs().amax(-1, keepdim=True) > 0
    common = (before.x.log > LOWEST)[:, None].expand_as(before.x.value)
    watched = SupportRules(rules, dict(short))
    after = traverse(block, watched, Support(before, common, nonzero.expand_as(before.R.value))).state
    watched.compare(after)
    state = after.numbers
    differ = (after.R.any(-1) & state.valid.mask).any(-1) & (state.valid.count[:, 0] > 1)
    return UnprovedZeros(watched.lost | differ & (before.R.log > LOWEST) & (state.R.log <= LOWEST), watched.lost_heads)


class SupportRules(Arithmetic):
    """Rules on states with their support: numbers by the rules of deviation arithmetic, beside them booleans.

    Not for networks with parts of the user's own or remedies, which have no rule for a support."""

    def __init__(self, rules: Deviation, short: Mapping[str, Tensor]) -> None:
        self.rules, self.arch, self.short = rules, rules.arch, short
        self.lost = torch.zeros_like(rules.settings.valid[:, 0])  # True for samples where a token was rounded to zero
        self.lost_heads = self.lost[:, None].expand(-1, self.arch.heads)

    def compare(self, state: Support, least: float = -math.inf, name: str = "") -> None:
        """Note samples with a token that is zero, or nearly, in numbers and not in the support, but for those whose
        longest token is so short that the log of the shortest stays below `least`. `name` is that of a norm."""
        numbers: State = state.numbers.tidy()
        may = (state.x[:, None] | state.R).any(-1)
        matters = numbers.R.log + math.log(SHORTEST) > least
        short = short_tokens(numbers) | self.short.get(name, torch.zeros_like(may))
        self.lost = self.lost | (short & may).any(-1) & matters

    def norm(self, block: Block, name: str, state: Support) -> Support:
        """Tokens of length zero stay zero; of others any entry that was not zero, or all if their mean is taken."""
        norm, weights, eps = norm_of(self.arch.norm), getattr(block.weights, name), self.arch.norm_eps
        assert norm is not None
        self.compare(state, 0.5 * math.log(eps) + NEGLIGIBLE if eps > 0 else -math.inf, name)
        tokens = state.x[:, None] | state.R
        x, R = state.x, tokens & state.R.any(-1, keepdim=True)
        if norm.centred:
            x, R = (part.any(-1, keepdim=True).expand_as(part) for part in (x, R))
        if weights.gain is not None:
            x, R = x & (weights.gain != 0), R & (weights.gain != 0)
        x = x if weights.bias is None else x | (weights.bias != 0)
        return Support(self.rules.norm(block, name, state.numbers), x, R)

    def values(self, block: Block, state: Support) -> Support:
        """Values of heads, by the zeros of their weights."""
        values: Values = self.rules.values(block, state.numbers)
        w = block.weights.attention
        latent = w.key_latent
        if latent is not None:
            count = w.value.weight.shape[0]
            inner = Support(None, *state.through(Linear(latent.weight, latent.bias)))
            state = Support(None, inner.x[..., :count], (inner.x[:, None] | inner.R)[..., :count])
        zeros = Linear((w.value.weight != 0).double(), None if w.value.bias is None else (w.value.bias != 0).double())
        x = common_heads(Scaled.plain(state.x.double()), zeros, self.arch).value > 0
        R = deviation_heads(Scaled.plain(state.R.double()), zeros, self.arch).value > 0
        return Support(values, x, R)

    def pattern(self, block: Block, state: Support) -> Any:
        """The pattern itself: its entries are above zero wherever a token sees."""
        return self.rules.pattern(block, state.numbers)

    def mix(self, block: Block, P: Pattern, values: Support) -> Support:
        """A token has what the tokens have that it sees; where rows of P are equal, all tokens have the same."""
        heads: HeadOutputs = self.rules.mix(block, P, values.numbers)
        valid, first = heads.valid.mask, None
        rows: list[Tensor] = []
        alike = torch.ones_like(valid[:, 0])
        for visible in P.visible_blocks():
            first = visible[:, 0, 0] if first is None else first  # what the first token sees; valid ones come first
            start = sum(part.shape[2] for part in rows)
            tokens = valid[:, start : start + visible.shape[2]]
            alike = alike & ((visible[:, 0] == first[:, None]).all(-1) | ~tokens).all(-1)
            rows.append(visible.double() @ values.R.double() > 0)
        assert first is not None
        R = torch.cat(rows, 2)
        equal = alike if self.arch.kernel == "uniform" else alike & (first.sum(-1) == 1)
        shared = R.any(2) & equal[:, None, None]
        x, R = values.x | shared, R & ~equal[:, None, None, None]
        active = marked(self.active_heads(block), self.arch.heads, heads.x.value) > 0
        R = R & active[:, None]
        return self._compared_heads(Support(heads, x & active, R))

    def _compared_heads(self, heads: Support) -> Support:
        """Note heads whose outputs are equal in numbers and not in the support."""
        may = (heads.R.any(-1) & heads.numbers.valid.mask[:, None]).any(-1)
        self.lost_heads = self.lost_heads | equal_outputs(heads.numbers.R.value, heads.numbers.valid) & may
        return heads

    def gate(self, block: Block, heads: Support, state: Support) -> Support:
        """Gates are sigmoids, above zero everywhere; they make outputs differ where they do."""
        gate = block.weights.attention.gate
        assert gate is not None
        zeros = Linear((gate.weight != 0).double())
        d = deviation_heads(Scaled.plain(state.R.double()), zeros, self.arch).value > 0
        lost = zero_outputs(heads.numbers) & (heads.R.any(-1) | heads.x.any(-1)[..., None])
        self.lost_heads = self.lost_heads | lost.any(-1)
        outputs = self.rules.gate(block, heads.numbers, state.numbers)
        return self._compared_heads(Support(outputs, heads.x, heads.R | d & heads.x[:, :, None]))

    def output(self, block: Block, heads: Support) -> Support:
        """The output projection, by the zeros of its weights."""
        w = block.weights.attention.output
        flat = Support(None, heads.x.flatten(1), heads.R.transpose(1, 2).flatten(-2))
        return Support(self.rules.output(block, heads.numbers), *flat.through(Linear(w.weight.flatten(0, 1), w.bias)))

    def cross(self, block: Block, state: Support) -> Support:
        """Anything of the memory may come in; tokens differ by it if they differ and attention looks at them."""
        differs = state.R.any(-1, keepdim=True).expand_as(state.R) & (self.arch.kernel != "uniform")
        return Support(self.rules.cross(block, state.numbers), torch.ones_like(state.x), differs)

    def mlp(self, block: Block, state: Support) -> Support:
        """Activations are zero at zero alone, but for relu; of experts every entry of a token that is not zero."""
        output, w = self.rules.mlp(block, state.numbers), block.weights.mlp
        if w is None:
            experts = block.weights.experts
            assert experts is not None
            biases = [linear.bias for linear in (experts.gate, experts.up, experts.down) if linear.bias is not None]
            x = (state.x.any(-1, keepdim=True) | any(map(torch.any, biases))).expand_as(state.x)
            return Support(output, x, state.R.any(-1, keepdim=True).expand_as(state.R))
        x, R = state.through(w.up)
        gate = w.up if w.gate is None else w.gate
        a, A = state.through(gate)
        if self.arch.activation == "relu":
            common, tokens = _alive(gate, state.numbers)
            a = a & common
            A = A & (tokens | a[:, None])
        if w.gate is None:
            x, R = a, A
        else:
            x, R = a & x, A & x[:, None] | a[:, None] & R | A & R
        return Support(output, *Support(None, x, R).through(w.down))

    def add(self, block: Block, half: Half, state: Support, branches: dict[str, Support]) -> Support:
        """A sum may be other than zero where one of its terms may be."""
        numbers = {name: branch.numbers for name, branch in branches.items()}
        terms = [*branches.values(), *([state] if half.skip else [])]
        x, R = (torch.stack(parts).any(0) for parts in zip(*((term.x, term.R) for term in terms), strict=True))
        return Support(self.rules.add(block, half, state.numbers, numbers), x, R)


def _alive(linear: Linear, state: State) -> tuple[Tensor, Tensor]:
    """Which units of a relu may be above zero: for the common token `[batch, unit]`, for each token. Zero itself may be
    a number that left the range: whether it is one the support says."""
    z, d = affine(state.x, linear), state.R.mapped(lambda v: v @ linear.weight)
    log = torch.maximum(z.log, d.log)
    Z, D = z.at(log), d.at(log)
    size = NEAR_ZERO * torch.maximum(Z.abs().amax(-1), D.abs().flatten(1).amax(1))
    return -size[:, None] <= Z, Z[:, None] + D >= -size[:, None, None]
