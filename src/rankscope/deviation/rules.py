"""The rules of deviation arithmetic: what each part of a block does to a state `1 x^T + e^s R`.

`nets/traversal.py` walks through a block and calls the methods of `Deviation` in the block's order: for the
attention branch `norm` (of a pre-norm block), `values`, `pattern`, `mix`, `gate` (if heads have gates),
`output`; for the MLP branch `norm`, `mlp`; for cross-attention `norm`, `cross`; after each branch `norm` (of
a sandwich); then `add` the skip, and `norm` (of a post-norm block). `part` is called wherever a part of the
user's own stands. Each method hands over to the file with its formulas:

    norm -> norms.py        values, mix -> attention.py     pattern -> scores.py, softmax.py
    gate -> attention.py    mlp -> mlp.py, experts.py       add -> state.py (tidy)

Traversals are started by `propagate.py`, `replay.py`, `second_pass.py` and `dissect.py`.

`PartOperations`, the base class of `Deviation`, has the operations on states and split patterns that the rules of parts
and remedies call on `rules`, so that a part, the user's own or a built-in remedy (`rankscope/remedies`), needs to
import nothing of this room. In the order of a block: tokens (`unit_tokens`, `attend_tokens`), the pattern
(`shape_pattern`, `subtract_pattern`), outputs of heads (`normalise_heads`, `gate_heads`, `sigmoid_of`).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import attention
from rankscope.deviation.attention import (
    DeviationPattern,
    HeadOutputs,
    Logits,
    Pattern,
    Values,
    Visible,
    common_heads,
    deviation_heads,
    gated,
    mixed,
    sigmoid,
)
from rankscope.deviation.decisions import piecewise
from rankscope.deviation.experts import mixture
from rankscope.deviation.mlp import affine, mlp, product
from rankscope.deviation.norms import normed
from rankscope.deviation.scores import ScoreParts, Scores, StateHeads, normed_heads
from rankscope.deviation.softmax import balanced, split
from rankscope.deviation.state import STEEPEST, Scaled, State, chosen, spread
from rankscope.nets import (
    LATENT_EPS,
    UNWEIGHTED,
    Architecture,
    Arithmetic,
    Block,
    Half,
    Latent,
    Linear,
    NormWeights,
    PassSettings,
    average,
)
from rankscope.shapes import Float


class PartOperations(Arithmetic):
    """Operations that rules of parts and remedies are made of; a base class of `Deviation`."""

    settings: PassSettings
    perturb_tensor: Callable[[Tensor], Tensor] | None = None
    """Perturbs a product before it is taken from another, in a second pass."""

    def perturb(self, part: Scaled) -> Scaled:
        """Perturb the result of a product or an activation, in a second pass."""
        return part

    def perturb_pattern(self, part: Scaled) -> Scaled:
        """Perturb a part of a pattern, in a second pass: patterns that are added may cancel to the last digit."""
        return part if self.perturb_tensor is None else part.mapped(self.perturb_tensor)

    def tidy(self, state: State) -> State:
        """Re-centre and rescale a state."""
        return state.tidy()

    def unit_tokens(self, state: State) -> State:
        """Return the tokens at length one; a token of length zero stays zero."""
        return self.tidy(normed(state, "scale", UNWEIGHTED, 0.0, self.perturb_tensor))

    def attend_tokens(self, unit: State, values: State, block: Block) -> State:
        """Return `softmax(U U^T) V`, U the tokens `unit` and V `values`, over what each token sees in this layer."""
        h, d = self.perturb(unit.x), self.perturb(unit.R)
        ref = Scaled((d.value @ h.value[..., None])[..., 0], d.log + h.log)
        D = Scaled(d.value @ d.value.mT, 2 * d.log)
        visible = self.settings.visible[block.arch.mask_of(block.index)]
        visible = visible.expand(len(values.valid.mask), -1, -1, -1)
        S = split(Scores(_as_head(ref), _as_head(D)), visible, values.valid)
        every_head, output = tuple(range(block.arch.heads)), block.weights.attention.output.weight
        V = Values(_as_head(values.x), _as_head(values.R), values.valid)
        averaged = mixed(block.arch, every_head, output, S, V)
        return State(averaged.x[:, 0], averaged.R[:, 0], values.valid)

    def shape_pattern(
        self, P: DeviationPattern, alpha: Tensor, beta: Tensor, gamma: Tensor, inside: State
    ) -> DeviationPattern:
        """Return `alpha I + beta P - gamma C`, C the average of what each row sees, numbers of each head.

        Small scores bring P near C, and what is left of `P - C` may be all there is. With scores s_ij and m_i
        the mean of `expm1(s_ij)` over what row i sees,

            E = P - C,    E_ij = C_ij (expm1(s_ij) - m_i) / (1 + m_i),

        no two nearly equal numbers are subtracted, and `alpha I + (beta - gamma) C + beta E` is the same
        matrix. With `P = 1 p^T + Delta`, c and e a row of C and of E, and j* the largest entry of p,

            alpha e_j* + (beta - gamma) c + beta e    is shared, and
            alpha (I - 1 e_j*^T) + (beta - gamma) (C - 1 c^T) + beta (E - 1 e^T)    is not:

        outside column j* the first of these three is alpha I. Where rows see alike, `E - 1 e^T` is Delta.
        Rows sum to `alpha + beta - gamma` where those of P sum to one.
        """
        valid = inside.valid.mask
        samples, positions = (torch.arange(count, device=valid.device) for count in valid.shape)
        last = torch.where(valid, positions, 0).amax(-1)  # the index of the last token of each sample
        C = average(P.visible).to(P.p)  # [batch, 1, row, token]
        c = C[samples, 0, last][:, None]  # of a row that sees most
        e, E = map(self.perturb_pattern, _from_average(P, valid, samples, last))
        column = torch.arange(P.p.shape[-1], device=C.device) == P.top  # [batch, head, token]: j*
        shared = Scaled.plain(alpha[:, None] * column + (beta - gamma)[:, None] * c).by_head()
        shared = shared + e.mapped(lambda t: t * beta[:, None]).normalised()
        identity = torch.eye(P.p.shape[-1], dtype=P.p.dtype, device=C.device)
        fixed = alpha[:, None, None] * identity + (beta - gamma)[:, None, None] * (C - c[:, :, None])
        fixed = fixed.expand(*P.p.shape[:2], -1, -1)
        off_top = Scaled.plain(fixed).by_head() + E.mapped(lambda t: t * beta[:, None, None]).normalised()
        outside = column[:, :, None] | ~valid[:, None, :, None]
        off_top = off_top.mapped(lambda t: t.masked_fill(outside, 0.0))
        total = alpha + (beta if P.total is None else beta * P.total) - gamma
        sums = P.row_excess and P.row_excess.mapped(lambda t: t * beta[:, None]).normalised()
        return replace(
            P, p=shared.explicit(), off_top=off_top, signed=True, total=total, row_excess=sums, scaled_p=shared
        )

    def subtract_pattern(
        self, P: DeviationPattern, second: DeviationPattern, weight: Tensor, own: Scaled | None = None
    ) -> DeviationPattern:
        """Return `P - (weight - own_i) second`: `weight` is one number, or `[batch, head, 1]` where it differs between
        tokens, and `own` `[batch, head, token, 1]` is minus what that of each token has beside it.

        Shared is `p_1 - w p_2`, and not shared `Delta_1 - w Delta_2 + own_i (p_2 + Delta_2)`, without column j* of P.
        Rows sum to `total - w`, and each to `own_i` beside.
        """
        column = P.top[:, :, None].expand(-1, -1, P.off_top.value.shape[2], 1)
        shared, Delta = map(self.perturb_pattern, (Scaled.plain(second.p).by_head(), second.by_head))
        if own is None:
            taken = Delta.mapped(lambda t: (t * -weight).scatter(-1, column, 0.0)).normalised()
            share = weight[None]
        else:
            pattern = shared.mapped(lambda t: t[:, :, None]) + Delta
            taken = Delta.mapped(lambda t: t * -weight[..., None]).normalised() + product(own, pattern)
            taken = taken.mapped(lambda t: t.scatter(-1, column, 0.0)).normalised()
            share = weight[..., 0]
        sums = None if own is None else own.mapped(lambda t: t[..., 0])
        excess = P.row_excess if sums is None else sums if P.row_excess is None else P.row_excess + sums
        return replace(
            P,
            p=P.p - weight * shared.explicit(),
            off_top=P.off_top + taken,
            signed=True,
            total=(torch.ones_like(share) if P.total is None else P.total) - share,
            row_excess=excess,
            scaled_p=P.scaled_p and P.scaled_p + shared.mapped(lambda t: t * -weight).normalised(),
            logits=P.logits and second.logits and _steeper(P.logits, second.logits),
        )

    def normalise_heads(self, outputs: HeadOutputs, gain: Tensor, eps: float) -> HeadOutputs:
        """Return the outputs of heads through an RMSNorm of every head, with one gain for all of them."""
        weights = NormWeights(gain)
        x, R = normed_heads(outputs.x, outputs.R, weights, outputs.valid, eps, self.perturb_tensor)
        return replace(outputs, x=x, R=R)

    def sigmoid_of(
        self, inside: State, weight: Float[Tensor, "width head"], bias: Tensor | None = None
    ) -> tuple[Scaled, Scaled]:
        """Return `sigmoid(X weight + bias)`: of the common token `[batch, head, 1]`, and what each token has
        beside it `[batch, head, token, 1]`."""
        return sigmoid(*self._by_head(inside, weight, bias))

    def gate_heads(
        self, outputs: HeadOutputs, inside: State, weight: Float[Tensor, "width head"], bias: Tensor | None = None
    ) -> HeadOutputs:
        """Return the outputs of heads times `sigmoid(X weight + bias)`, X what attention reads."""
        return gated(outputs, *self._by_head(inside, weight, bias))

    def _by_head(self, inside: State, weight: Tensor, bias: Tensor | None) -> tuple[Scaled, Scaled]:
        """`X weight + bias` of the common token `[batch, head, 1]`, and what each token adds to it."""
        z = self.perturb(affine(inside.x, Linear(weight, bias)))  # [batch, head]
        d = self.perturb(inside.R.mapped(lambda v: v @ weight))  # [batch, token, head]
        return z.mapped(lambda v: v[..., None]), d.mapped(lambda v: v.mT[..., None])


def _as_head(part: Scaled) -> Scaled:
    """Numbers of a state with an axis for one head."""
    return part.mapped(lambda v: v[:, None]).by_head()


def _steeper(a: Logits, b: Logits) -> Logits:
    """The larger scores of two patterns, by head: they say whether rounding may decide the softmax."""
    sizes = [torch.maximum(part.D.log_size(), part.reference.log_size()) for part in (a, b)]
    pick = sizes[0] >= sizes[1]
    ref = torch.where(pick[..., None], a.ref, b.ref)
    return Logits(ref, chosen(pick, a.D, b.D), chosen(pick, a.reference, b.reference))


def _from_average(P: DeviationPattern, valid: Tensor, samples: Tensor, last: Tensor) -> tuple[Scaled, Scaled]:
    """(e, E - 1 e^T) of E = P - C, as in `shape_pattern`; column j* of the second counts only where rows do not see
    alike. Of a pattern that another part has changed, which need not be near C, E is the difference."""
    if P.signed or P.logits is None:
        C = average(P.visible).to(P.p)
        c = C[samples, :, last]
        e = (P.scaled_p or Scaled.plain(P.p).by_head()) + Scaled.plain(-c.expand_as(P.p)).by_head()
        departure = (c[:, :, None] - C).expand(*P.p.shape[:2], -1, -1)
        return e, P.off_top + Scaled.plain(departure).by_head()
    row = P.visible[samples, :, last][:, :, None]  # [batch, 1, 1, token]
    e = _less_average(P.logits.reference.mapped(lambda t: t[:, :, None]), row)
    e = e.mapped(lambda t: t[:, :, 0])
    alike = ((P.visible == row).all(-1)[:, 0] | ~valid).all(-1)  # [batch]
    reference, D = P.logits.reference, P.logits.D

    def otherwise() -> tuple[Scaled, Scaled]:
        E = _less_average(reference.mapped(lambda t: t[:, :, None]) + D, P.visible)
        return E.mapped(lambda t: t[samples, :, last]), E.mapped(lambda t: t - t[samples, :, last, None])

    return piecewise("shape_pattern.alike", ~alike[:, None].expand(P.p.shape[:2]), otherwise, (e, P.off_top))


def _less_average(scores: Scaled, visible: Visible) -> Scaled:
    """The softmax of scores minus C, the average over what each row sees; zero for a row that sees nothing."""
    scores = scores.mapped(lambda t: torch.where(visible, t, torch.zeros_like(t))).unit()
    C = average(visible).to(scores.value)
    size = spread(scores.log.clamp(-STEEPEST, 0.0).exp(), scores.value)
    E = torch.expm1(scores.value * size) / size
    m = (C * E).sum(-1, keepdim=True)
    near = Scaled(C * (E - m) / (1 + size * m), scores.log)
    plain = scores.explicit().masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    return chosen(scores.log <= 0.0, near, Scaled(plain - C, torch.zeros_like(scores.log))).normalised()


class Deviation(PartOperations):
    """The deviation arithmetic: a rule on states for every part of a block, and the operations that rules of
    parts and remedies call (`rules.py`)."""

    name = "deviation"

    def __init__(self, arch: Architecture, settings: PassSettings) -> None:
        self.arch, self.settings = arch, settings
        self.carried: dict[str, Any] = {}
        self.routed: dict[int, Tensor] = {}
        self.cross_patterns: dict[int, DeviationPattern] = {}

    def norm(self, block: Block, name: str, state: State) -> State:
        """The state with each token normalised (`norms.py`). The output of a branch is made tidy first."""
        state = self.tidy(state) if name.endswith("_after") else state
        weights, eps = getattr(block.weights, name), self.arch.norm_eps
        return self.tidy(normed(state, self.arch.norm, weights, eps, self.perturb_tensor))

    def values(self, block: Block, state: State) -> Values:
        """The values of all heads: those of the common token, and deviations from them."""
        w = block.weights.attention.value
        state = self.latent(state, block.weights.attention.key_latent, alone=True)
        common, deviation = common_heads(state.x, w, self.arch), deviation_heads(state.R, w, self.arch)
        return Values(common.by_head(), deviation.by_head(), state.valid)

    def pattern(self, block: Block, state: State) -> DeviationPattern:
        """The attention pattern P as one row p and what the rows differ from it by (`softmax.py`)."""
        visible = self.settings.visible[self.arch.mask_of(block.index)]
        visible = visible.expand(len(state.valid.mask), -1, -1, -1)
        parts = self.score_parts(block, state)
        scores = balanced(self.scores(parts), visible, state.valid, self.arch.sinkhorn_rounds or 0)
        return replace(split(scores, visible, state.valid), before_cap=parts.before_cap())

    def scores(self, parts: ScoreParts) -> Scores:
        """Scores as a row `ref` shared by all queries and the rest D."""
        return parts.scores()

    def score_parts(
        self, block: Block, state: State, bias: Callable[[slice], Tensor] | None = None, source: State | None = None
    ) -> ScoreParts:
        """The queries, keys and positions that the scores are made of (`scores.py`); `bias` makes rows of what
        positions add, if the settings do not hold all of it. Keys are of the `source`, a memory, or of the tokens."""
        w = block.weights.attention
        if source is None:
            queries, keys, settings = (
                self.latent(state, w.query_latent),
                self.latent(state, w.key_latent),
                self.settings,
            )
        else:
            queries, keys, settings = state, source, self.settings.bare()
        perturbations = (self.perturb, self.perturb_tensor)
        return StateHeads(self.arch, block.index, w, queries, settings, *perturbations, keys, bias).parts()

    def latent(self, state: State, w: Latent | None, *, alone: bool = False) -> State:
        """The state that queries, or keys and values, are linear in, where attention has latents: the latent
        `RMSNorm(x A)`, and beside it what goes without a norm, unless the latent is asked for `alone`."""
        if w is None:
            return state
        assert w.norm.gain is not None
        width, valid = len(w.norm.gain), state.valid
        x = self.perturb(affine(state.x, Linear(w.weight, w.bias)))
        R = self.perturb(state.R.mapped(lambda t: t @ w.weight))
        normed_part, rest = (
            self.tidy(State(x.mapped(lambda t, at=at: t[..., at]), R.mapped(lambda t, at=at: t[..., at]), valid))
            for at in (slice(width), slice(width, None))
        )
        normed_part = self.tidy(normed(normed_part, "rms", w.norm, LATENT_EPS, self.perturb_tensor))
        if alone or width == w.weight.shape[1]:
            return normed_part
        return State(_concatenated(normed_part.x, rest.x), _concatenated(normed_part.R, rest.R), valid)

    def mix(self, block: Block, P: Pattern, values: Values) -> HeadOutputs:
        """The outputs of the heads, pattern times values (`attention.py`)."""
        return attention.mixed(self.arch, self.active_heads(block), block.weights.attention.output.weight, P, values)

    def gate(self, block: Block, heads: HeadOutputs, state: State) -> HeadOutputs:
        """The outputs of the heads times their gates (`attention.py`)."""
        w = block.weights.attention.gate
        assert w is not None
        z = self.perturb(common_heads(state.x, w, self.arch))
        d = self.perturb(deviation_heads(state.R, w, self.arch))
        return attention.gated(heads, z, d)

    def output(self, block: Block, heads: HeadOutputs) -> State:
        """The attention branch: the outputs of the heads through the output projection."""
        w = block.weights.attention.output
        out = Linear(w.weight.flatten(0, 1), w.bias)
        x = affine(heads.x.together().mapped(lambda t: t.flatten(1)), out)
        R = heads.R.side_by_side().mapped(lambda t: t @ out.weight)
        return State(x, R, heads.valid)

    def cross(self, block: Block, state: State) -> State:
        """The cross-attention branch: values are the memory's, and rows differ as the tokens' queries do."""
        cross_block = block.cross_block
        P = self.cross_patterns[block.index] = self.cross_pattern(cross_block, state)
        values = replace(self.values(cross_block, self.source), valid=state.valid)
        return self.output(cross_block, self.mix(cross_block, P, values))

    def cross_pattern(self, cross_block: Block, state: State) -> DeviationPattern:
        """The pattern of the tokens' attention to the memory."""
        assert self.settings.memory is not None
        visible = self.settings.memory.visible(state.valid.mask)
        parts = self.score_parts(cross_block, state, source=self.source)
        return replace(split(self.scores(parts), visible, state.valid, tokens=False), before_cap=parts.before_cap())

    @cached_property
    def source(self) -> State:
        """The memory as a state."""
        assert self.settings.memory is not None
        return State.of(self.settings.memory.tokens, self.settings.memory.valid)

    def mlp(self, block: Block, state: State) -> State:
        """The MLP branch (`mlp.py`), or that of a mixture of experts (`experts.py`)."""
        if block.weights.experts is not None:
            out, self.routed[block.index] = mixture(self.arch, block.weights.experts, state, self.perturb)
            return out
        assert block.weights.mlp is not None
        return mlp(self.arch, block.weights.mlp, state, self.perturb)

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        """The sum `skip X + branches`, each part at the larger of its two scales, and tidy."""
        branch = total(branches.values())
        return self.tidy(branch if half.skip == 0.0 else added(half.skip, state, branch))


def total(branches: Iterable[State]) -> State:
    """The sum of several branches, not yet tidy."""
    result, *remaining = branches
    for branch in remaining:
        result = added(1.0, branch, result)
    return result


def added(weight: float, state: State, branch: State) -> State:
    """The sum `weight X + branch` of two states, not yet tidy."""
    return State(state.x * weight + branch.x, state.R * weight + branch.R, state.valid)


def _concatenated(a: Scaled, b: Scaled) -> Scaled:
    """Entries of a, then those of b, at the larger of their scales; zeros do not set the scale."""
    wide, narrow = torch.zeros_like(b.value), torch.zeros_like(a.value)
    return a.mapped(lambda t: torch.cat([t, wide], -1)) + b.mapped(lambda t: torch.cat([narrow, t], -1))
