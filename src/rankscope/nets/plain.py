"""The plain arithmetic: a state is an ordinary tensor of tokens. Readable in one sitting.

`Plain` has its rules; `Step` and `ForwardPass` are what a pass by them gives, a layer at a time or all that is kept.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import KernelContext, kernel_of, log_gain
from rankscope.nets.mlp import ACTIVATIONS, chosen_experts, chosen_weights, mixed
from rankscope.nets.norms import NormWeights, normalise
from rankscope.nets.pass_settings import PassSettings, TokenOrder
from rankscope.nets.positions import by_offset, disentangled, rotate
from rankscope.nets.traversal import Arithmetic, Block, Half
from rankscope.nets.weights import LATENT_EPS, ExpertWeights, Latent, Layer, Linear, MLPWeights
from rankscope.shapes import Float

Tokens = Float[Tensor, "batch token width"]
Heads = Float[Tensor, "batch head token head_width"]
Square = Float[Tensor, "batch head token token"]
HeadOutputs = Float[Tensor, "batch token head head_width"]
RowOutputs = Float[Tensor, "batch row head head_width"]


class Plain(Arithmetic):
    """Rules on tokens `[batch, token, width]`."""

    name = "plain"

    def __init__(self, arch: Architecture, settings: PassSettings) -> None:
        self.arch, self.settings = arch, settings
        self.carried: dict[str, Any] = {}  # what one layer leaves to later ones, by name
        self.routed: dict[int, Tensor] = {}
        """By layer (0-based), the weight of each expert for each token `[batch, token, expert]`."""
        self.attended: Tensor | None = None  # the tokens that attention read last
        self.cross_patterns: dict[int, Tensor] = {}  # by layer, P of cross-attention `[batch, head, token, source]`

    def norm(self, block: Block, name: str, X: Tokens) -> Tokens:
        """Normalise each token by the norm of that name (`norms.py`)."""
        return normalise(X, self.arch.norm, getattr(block.weights, name), self.arch.norm_eps)

    def values(self, block: Block, X: Tokens) -> Heads:
        """`X W_V + b_V`, once for every head."""
        w = block.weights.attention
        return self._grouped(self.heads(self.latent(X, w.key_latent, alone=True), w.value))

    def pattern(self, block: Block, X: Tokens) -> Square:
        """P of every head, by the architecture's kernel."""
        self.attended = X
        return kernel_of(self.arch.kernel).pattern(*self.kernel_inputs(block, X))

    def kernel_inputs(self, block: Block, X: Tokens) -> tuple[Heads, Heads, KernelContext]:
        """Queries and keys of every head, and what the kernel needs beside them."""
        arch, w = self.arch, block.weights.attention
        q, k, added = self.scored(block, X)
        mixing = None if w.mix_keys is None or w.mix_values is None else (w.mix_keys, w.mix_values)
        visible = self.settings.visible[arch.mask_of(block.index)]
        rounds, gain = arch.sinkhorn_rounds or 0, log_gain(arch.log_gain, self.settings.valid, q)
        return q, k, KernelContext(visible, added, arch.divisor, arch.score_cap, mixing, rounds, gain, w.sink)

    def scored(self, block: Block, X: Tokens) -> tuple[Heads, Heads, Tensor | None]:
        """Queries and keys of every head, and what positions add to their scores."""
        arch, w, settings = self.arch, block.weights.attention, self.settings
        q = self.heads(self.latent(X, w.query_latent), w.query)  # [batch, head, token, head_width]
        k = self.heads(self.latent(X, w.key_latent), w.key)  # [batch, key_head, token, head_width]
        if arch.query_norm:
            q, k = self._normed(q, w.query_norm), self._normed(k, w.key_norm)
        if settings.rotary:
            q, k = (rotate(part, settings.rotary_of(block.index), arch.rotary_pairs) for part in (q, k))
        k = self._grouped(k)
        added = self.added(block, q)
        if settings.relative is not None:
            added = disentangled(q, k, w, *settings.relative) / arch.divisor
        if w.content_bias is not None:
            q = q + w.content_bias[:, None]
        return q, k, added

    def added(self, block: Block, q: Heads) -> Tensor | None:
        """What positions add to the scores."""
        w, settings = block.weights.attention, self.settings
        if settings.sinusoids is not None and w.position_bias is not None:
            return by_offset(q + w.position_bias[:, None], w, settings.sinusoids) / self.arch.divisor
        return settings.bias

    def through(self, X: Tensor, linear: Linear) -> Tensor:
        """Apply a linear map, `X W + b`; a perturbed pass overrides it."""
        return affine(X, linear)

    def latent(self, X: Tokens, w: Latent | None, *, alone: bool = False) -> Float[Tensor, "batch token inner"]:
        """Return what queries, or keys and values, are linear in: tokens, or a latent of them; if `alone`,
        without the rotated entries beside it."""
        if w is None:
            return X
        assert w.norm.gain is not None
        Y, normed = self.through(X, Linear(w.weight, w.bias)), len(w.norm.gain)
        first = normalise(Y[..., :normed], "rms", w.norm, LATENT_EPS)
        return first if alone or normed == Y.shape[-1] else torch.cat([first, Y[..., normed:]], -1)

    def heads(self, X: Float[Tensor, "batch token inner"], linear: Linear) -> Heads:
        """Queries, keys or values of every head."""
        count, width = linear.weight.shape[1:]
        bias = None if linear.bias is None else linear.bias.flatten()
        Y = self.through(X, Linear(linear.weight.flatten(1), bias))  # [batch, token, head * head_width]
        return Y.view(*Y.shape[:-1], count, width).transpose(1, 2)

    def mix(self, block: Block, P: Float[Tensor, "batch head row token"], V: Heads) -> RowOutputs:
        """Return `P_h V_h` of every head; zero of one that is not active."""
        return self.only_active(block, P @ V)

    def only_active(self, block: Block, heads: Float[Tensor, "batch head row head_width"]) -> RowOutputs:
        """Return the outputs of heads, zero at those that are not active, as `[batch, row, head, width]`."""
        if len(active_heads := self.active_heads(block)) < self.arch.heads:
            active = heads.new_zeros(self.arch.heads, 1, 1)
            for head in active_heads:  # a list as an index would be copied to the device
                active[head] = 1.0
            heads = heads * active
        return heads.transpose(1, 2)

    def gate(self, block: Block, heads: HeadOutputs, X: Tokens) -> HeadOutputs:
        """`(P_h V_h) * sigmoid(X W_G + b_G)`, entry by entry."""
        return heads * self.gate_values(block, X)

    def gate_values(self, block: Block, X: Tokens) -> HeadOutputs:
        """Return `sigmoid(X W_G + b_G)`, the gate of each entry of each head."""
        gate = block.weights.attention.gate
        assert gate is not None
        return self.heads(X, gate).sigmoid().transpose(1, 2)

    def output(self, block: Block, heads: HeadOutputs) -> Tokens:
        """`sum_h P_h X W_h + 1 b^T` (Dong et al. 2021, section 2)."""
        w = block.weights.attention.output
        return self.through(heads.flatten(-2), Linear(w.weight.flatten(0, 1), w.bias))

    def cross(self, block: Block, X: Tokens) -> Tokens:
        """Queries of the tokens, keys and values of the memory (`pass_settings.py`)."""
        cross_block, M = block.cross_block, self.settings.memory
        assert M is not None
        P = self.cross_patterns[block.index] = self.cross_pattern(cross_block, X)
        return self.output(cross_block, self.mix(cross_block, P, self.values(cross_block, M.tokens)))

    def cross_pattern(self, block: Block, X: Tokens) -> Float[Tensor, "batch head token source"]:
        """P of every head, by the architecture's kernel, without positions."""
        M = self.settings.memory
        assert M is not None
        q, k = self.cross_scored(block, X)
        visible, gain = M.visible(self.settings.valid), log_gain(self.arch.log_gain, M.valid, q)
        context = KernelContext(visible, None, self.arch.divisor, self.arch.score_cap, gain=gain)
        return kernel_of(self.arch.kernel).pattern(q, k, context)

    def cross_scored(self, block: Block, X: Tokens) -> tuple[Heads, Heads]:
        """Queries of the tokens and keys of the memory, of every head."""
        w, M = block.weights.attention, self.settings.memory
        assert M is not None
        return self.heads(X, w.query), self._grouped(self.heads(M.tokens, w.key))

    def mlp(self, block: Block, X: Tokens) -> Tokens:
        """`act(X W_1 + b_1) W_2 + b_2`, or gated, or of the experts that each token chooses."""
        w = block.weights.experts
        if w is None:
            assert block.weights.mlp is not None
            return self._dense(block.weights.mlp, X)
        p = self.routed[block.index] = self.routing(w, X)
        limit = self.arch.experts.limit if self.arch.experts is not None else 0.0
        out = mixed(X, p, lambda rows, expert: self._dense(w.expert(expert), rows, limit))
        return out if w.shared is None else out + self.share(w, X) * self._dense(w.shared, X)

    def _dense(self, w: MLPWeights, X: Tensor, limit: float = 0.0) -> Tensor:
        act = ACTIVATIONS[self.arch.activation]
        up = self.through(X, w.up)  # [batch, token, mlp_width]
        if w.gate is None:
            return self.through(act(up), w.down)
        gate = self.through(X, w.gate)
        if limit:
            gate, up = gate.clamp(max=limit), 1 + up.clamp(-limit, limit)
        return self.through(act(gate) * up, w.down)

    def routing(self, w: ExpertWeights, X: Tokens) -> Float[Tensor, "batch token expert"]:
        """The weight of each expert for each token, 0 of those not chosen."""
        assert self.arch.experts is not None
        logits = self.through(X, w.router)
        return chosen_weights(logits, self.arch.experts, chosen_experts(logits, self.arch.experts, w.correction))

    def share(self, w: ExpertWeights, X: Tokens) -> Float[Tensor, "batch token 1"]:
        """The weight of the shared expert."""
        gate = w.shared_gate
        return torch.ones_like(X[..., :1]) if gate is None else self.through(X, gate).sigmoid()

    def add(self, block: Block, half: Half, X: Tokens, branches: dict[str, Tokens]) -> Tokens:
        """Return `skip X + branches`; at weight 0 X is not added at all."""
        if not branches:
            return half.skip * X
        first, *remaining = branches.values()
        branch = first + remaining[0] if remaining else first
        return branch if half.skip == 0.0 else (X if half.skip == 1.0 else half.skip * X) + branch

    def _normed(self, x: Heads, weights: NormWeights) -> Heads:
        """Queries or keys through an RMSNorm, of each head or of all heads of a token."""
        if not self.arch.query_norm_across:
            return normalise(x, "rms", weights, self.arch.norm_eps)
        tokens = x.transpose(1, 2)
        return normalise(tokens.flatten(2), "rms", weights, self.arch.norm_eps).view(tokens.shape).transpose(1, 2)

    def _grouped(self, kv: Float[Tensor, "batch key_head token head_width"]) -> Heads:
        """Keys or values of every head, where several share one."""
        group = self.arch.heads // self.arch.key_heads
        return kv.repeat_interleave(group, 1) if group > 1 else kv


def contributions(layer: Layer, heads: HeadOutputs) -> Float[Tensor, "batch head token width"]:
    """What each head adds to the attention branch: `P_h X W_h`, without the output bias."""
    return heads.transpose(1, 2) @ layer.attention.output.weight


def affine(x: Tensor, linear: Linear) -> Tensor:
    """Apply a linear map to tokens, `x W + b`."""
    y = x @ linear.weight
    return y if linear.bias is None else y + linear.bias


class Step(NamedTuple):
    """What one layer gives: its number (0 is the input, which has no attention and no heads), its tokens,
    its attention, and the values that each head mixed, before the output projection."""

    layer: int
    state: Float[Tensor, "batch token width"]
    attention: Float[Tensor, "batch head token token"] | None
    heads: Float[Tensor, "batch token head head_width"] | None = None
    routing: Float[Tensor, "batch token expert"] | None = None
    """The weight of each expert for each token, of a layer that is a mixture of experts."""
    cross: Float[Tensor, "batch head token source"] | None = None
    """Attention to the memory, of a layer that has cross-attention."""

    def restored(self, order: TokenOrder) -> "Step":
        """Tokens back where they stood before padding was moved to the end."""
        moves = (order.restored_square, order.restored, order.restored, order.restored_rows)
        parts = (None if part is None else move(part) for move, part in zip(moves, self[2:], strict=True))
        return Step(self.layer, order.restored(self.state), *parts)


@dataclass(frozen=True, repr=False)
class ForwardPass:
    """The tokens after every layer of a forward pass, and its attention patterns if asked for."""

    states: tuple[Tensor, ...]  # Tokens before layer 1 and after each layer, `[batch, token, width]`
    attention: tuple[Tensor, ...]  # Of layer 1, 2, ...: `[batch, head, token, token]`; empty unless asked for
    output: Tensor  # The last state, through the final norm where there is one
    cross: tuple[Tensor, ...] = ()
    """Of a decoder its attention to the memory, `[batch, head, token, source]`, where attention is kept."""

    def __repr__(self) -> str:
        kept = "attention kept" if self.attention else "attention not kept"
        return f"ForwardPass({len(self.states) - 1} layers, output {tuple(self.output.shape)}, {kept})"
