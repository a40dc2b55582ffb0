"""A network frozen on its input: everything that depends on the tokens is kept as it was measured.

With attention matrices, norms and activations held at the values of one forward pass, the network is linear
in its input (and in every bias):

    attention   P_h as measured:                  Y -> sum_h P_h Y W_h
    norm        1 / sd_i as measured:             y_i -> gain * (y_i - mean y_i) / sd_i
    MLP         g = act(z) / z as measured:       Y -> (g * (Y W_1)) W_2
    gated MLP   g = act(x gate) as measured:      Y -> (g * (Y up)) down

At the input that it was frozen on, it gives exactly what the network gives. A path is one way through it.

`Y` has any number of parts in front, `[part, batch, token, width]`, which go through side by side; `start` is
the part into which a layer's biases are added, None to leave them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.nets.activations import ACTIVATIONS
from rankscope.nets.architecture import Architecture
from rankscope.nets.block import Setting, affine, attention, block, skip
from rankscope.nets.norms import normalise
from rankscope.nets.order import Order
from rankscope.nets.transformer import Transformer
from rankscope.nets.weights import Layer, Linear, NormWeights
from rankscope.paths.counts import Ways

Parts = Float[Tensor, "part batch token width"]
Tokens = Float[Tensor, "batch token width"]


@dataclass(frozen=True)
class FrozenNorm:
    """A norm at the scales it had."""

    centred: bool
    scale: Float[Tensor, "batch token 1"]
    weights: NormWeights

    @classmethod
    def of(cls, arch: Architecture, weights: NormWeights, X: Tokens) -> "FrozenNorm | None":
        """The norm of these tokens; None where there is none."""
        if arch.norm == "none":
            return None
        if arch.norm == "layer":
            X = X - X.mean(-1, keepdim=True)
        square = X.square().sum(-1, keepdim=True)
        variance = square + arch.norm_eps if arch.norm == "scale" else square / X.shape[-1] + arch.norm_eps
        scale = 1 / variance.masked_fill(variance == 0, 1.0).sqrt()
        return cls(arch.norm == "layer", scale, weights)

    def apply(self, Y: Parts, start: int | None) -> Parts:
        """Linear in Y; the bias goes into part `start`."""
        scale = self.scale if self.weights.gain is None else self.scale * self.weights.gain
        Y = (Y - Y.mean(-1, keepdim=True)).mul_(scale) if self.centred else Y * scale
        return _with(Y, start, self.weights.bias)


@dataclass(frozen=True)
class FrozenLayer:
    """One block, frozen: what its heads add, what goes past them, and what closes the layer."""

    arch: Architecture
    index: int
    weights: Layer
    P: Float[Tensor, "batch head token token"]
    real: Bool[Tensor, "batch token"]
    attention_norm: FrozenNorm | None
    attention_after: FrozenNorm | None
    mlp_norm: FrozenNorm | None
    mlp_after: FrozenNorm | None
    gate: Float[Tensor, "batch token mlp_width"] | None

    @property
    def reads_through(self) -> FrozenNorm | None:
        """The norm between the stream and the heads, where there is one."""
        bare = self.arch.norm_place == "post" or self.index in self.arch.bare_layers
        return None if bare else self.attention_norm

    def inside(self, Y: Parts, start: int | None = None) -> Parts:
        """What the heads read."""
        return _normed(self.reads_through, Y, start)

    def spoken(self, Y: Parts, start: int | None = None) -> Float[Tensor, "part batch head token head_width"]:
        """What each head mixes, before the output projection."""
        Y = self.inside(Y, start)
        weight = self.weights.attention.value.weight  # [width, key_head, head_width]
        V = Y @ weight.flatten(1)
        bias = self.weights.attention.value.bias
        V = _with(V, start, None if bias is None else bias.flatten())
        V = V.reshape(*V.shape[:-1], *weight.shape[1:])  # [part, batch, token, key_head, head_width]
        group = self.arch.heads // self.arch.key_heads
        V = V.repeat_interleave(group, 3) if group > 1 else V
        # Parts beside each other in the last axis: P multiplies them all at once.
        parts, batch, n, heads, width = V.shape
        side = V.permute(1, 3, 2, 0, 4).reshape(batch, heads, n, parts * width)
        return (self.P @ side).view(batch, heads, n, parts, width).permute(3, 0, 1, 2, 4)

    def added(self, spoken: Tensor, heads: Sequence[int] | None = None) -> Parts:
        """What heads add to the stream, without the output bias: all that speak, or those named."""
        weight = self.weights.attention.output.weight  # [head, head_width, width]
        chosen = [h for h in self.ways if h is not None and (heads is None or h in heads)]
        if len(chosen) < self.arch.heads:
            spoken, weight = spoken[:, :, chosen], weight[chosen]
        return self.after_heads(spoken.transpose(2, 3).flatten(3) @ weight.flatten(0, 1))

    def after_heads(self, Y: Parts) -> Parts:
        """The norm on what heads add, where there is one."""
        return _normed(self.attention_after, Y, None) if self.arch.norm_place == "sandwich" else Y

    def through(self, Y: Parts, heads: Sequence[int] | None = None, start: int | None = None) -> Parts:
        """What goes through heads."""
        return self.added(self.spoken(Y, start), heads)

    def past(self, Y: Parts, start: int | None = None) -> Parts:
        """What goes past the heads: the skip, and in a parallel block the MLP beside them. The output bias,
        and the bias of a norm after the heads, start here: they pass through no head of this layer."""
        rest = torch.zeros_like(Y) if self.arch.attention_skip == 0.0 else self.arch.attention_skip * Y
        if start is not None:
            one = _with(torch.zeros_like(Y[:1]), 0, self.weights.attention.output.bias)
            if self.arch.norm_place == "sandwich":
                one = _normed(self.attention_after, one, 0)
            rest[start] += one[0]
        if self.arch.parallel and self.arch.mlp != "none":
            rest = rest + self.mlp(Y, start)
        return rest

    def mlp(self, Y: Parts, start: int | None = None) -> Parts:
        """The MLP branch, at the gates it had."""
        w = self.weights.mlp
        assert w is not None and self.gate is not None
        if self.arch.norm_place != "post":
            Y = _normed(self.mlp_norm, Y, start)
        hidden = _with(Y @ w.up.weight, start, w.up.bias).mul_(self.gate)
        Y = _with(hidden @ w.down.weight, start, w.down.bias)
        return _normed(self.mlp_after, Y, start) if self.arch.norm_place == "sandwich" else Y

    def settle(self, Y: Parts, start: int | None = None) -> Parts:
        """The norm after the attention step, where there is one."""
        return _normed(self.attention_norm, Y, start) if self.arch.norm_place == "post" else Y

    def finish(self, Y: Parts, start: int | None = None) -> Parts:
        """The norm after the MLP step, where there is one; padding stays zero."""
        if self.arch.norm_place == "post" and self.serial:
            Y = _normed(self.mlp_norm, Y, start)
        return Y if bool(self.real.all()) else Y * self.real[..., None]

    def close(self, Y: Parts, start: int | None = None) -> Parts:
        """From what the attention step left to the layer's end: the MLP step and the norms after both."""
        Y = self.settle(Y, start)
        if self.serial:
            rest = self.mlp(Y, start)
            Y = rest if self.arch.mlp_skip == 0.0 else rest.add_(Y, alpha=self.arch.mlp_skip)
        return self.finish(Y, start)

    @property
    def ways(self) -> tuple[int | None, ...]:
        """What a path can do here: None where there is a way past the heads, and the heads that speak."""
        arch = self.arch
        past = arch.attention_skip != 0.0 or (arch.parallel and arch.mlp != "none")
        kept = range(arch.heads) if arch.kept_heads is None else sorted(set(arch.kept_heads[self.index]))
        return (*([None] if past else []), *kept)

    @property
    def serial(self) -> bool:
        """Whether an MLP follows the attention step."""
        return self.arch.mlp != "none" and not self.arch.parallel


@dataclass(frozen=True, repr=False)
class Frozen:
    """A network frozen on its input."""

    net: Transformer
    X: Tokens
    """Layer 0, as the first block reads it: real tokens first, positions added."""
    real: Bool[Tensor, "batch token"]
    layers: tuple[FrozenLayer, ...]
    last: FrozenNorm | None
    output: Tokens
    """What the network itself gives."""
    order: Order | None
    """How tokens go back to where they stood before padding was moved to the end."""

    def __repr__(self) -> str:
        return f"Frozen({self.net!r} on {tuple(self.X.shape)})"

    def restored(self, Y: Tokens) -> Tokens:
        """Tokens where the user had them."""
        return Y if self.order is None else self.order.restored(Y)

    def end(self, Y: Parts, start: int | None = None) -> Parts:
        """Through the final norm, where there is one."""
        return Y if self.last is None else self.last.apply(Y, start) * self.real[..., None]

    def run(self, heads: Sequence[Sequence[int]] | None = None, biases: bool = True) -> Tokens:
        """The whole frozen network, or with these heads of each layer alone."""
        Y, start = self.X[None], 0 if biases else None
        for layer in self.layers:
            kept = None if heads is None else heads[layer.index]
            Y = layer.close(layer.past(Y, start) + layer.through(Y, kept, start), start)
        return self.end(Y, start)[0]

    @property
    def ways(self) -> Ways:
        """What a path can do in each layer."""
        return tuple(layer.ways for layer in self.layers)

    @property
    def has_constants(self) -> bool:
        """Whether any bias is not zero: otherwise nothing starts at one."""
        arch = self.net.arch
        biases = [tensor for name, tensor in self.net.state().items() if name.endswith(".bias")]
        return bool(arch.biases) and any(bool(bias.any()) for bias in biases)


@torch.no_grad()
def freeze(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Frozen:
    """Run the network once and keep what depends on the tokens."""
    X, real, order = net.prepared(X, padding)
    arch, first = net.arch, X
    setting = Setting.of(arch, net.weights, X, real)
    layers = []
    for index, weights in enumerate(net.weights.layers):
        layers.append(_frozen_layer(arch, index, weights, X, real, setting))
        X = block(arch, index, weights, X, setting)[0].masked_fill(~real[..., None], 0.0)
    last = FrozenNorm.of(arch, net.weights.final_norm, X) if arch.final_norm else None
    return Frozen(net, first, real, tuple(layers), last, net.finish(X) * real[..., None], order)


def _frozen_layer(
    arch: Architecture, index: int, w: Layer, X: Tokens, real: Tensor, setting: Setting
) -> FrozenLayer:
    """One block of `nets/block.py`, noting each norm's scale and the MLP's gate on the way."""
    post, sandwich, has_mlp = arch.norm_place == "post", arch.norm_place == "sandwich", arch.mlp != "none"

    def normed(weights: NormWeights, Y: Tokens) -> tuple[FrozenNorm | None, Tokens]:
        return FrozenNorm.of(arch, weights, Y), normalise(Y, arch.norm, weights, arch.norm_eps)

    def mlp_branch(Y: Tokens) -> tuple[FrozenNorm | None, FrozenNorm | None, Tensor, Tokens]:
        before, inside = (None, Y) if post else normed(w.mlp_norm, Y)
        gate, out = _gated(arch, w, inside)
        after, out = normed(w.mlp_after, out) if sandwich else (None, out)
        return before, after, gate, out

    bare = post or index in arch.bare_layers
    attention_norm, inside = (None, X) if bare else normed(w.attention_norm, X)
    branch, P, _ = attention(arch, index, w, inside, setting)
    attention_after, branch = normed(w.attention_after, branch) if sandwich else (None, branch)
    mlp_norm, mlp_after, gate = None, None, None
    if arch.parallel and has_mlp:
        mlp_norm, mlp_after, gate, out = mlp_branch(X)
        branch = branch + out
    X = skip(arch.attention_skip, X, branch)
    if post:
        attention_norm, X = normed(w.attention_norm, X)
    if has_mlp and not arch.parallel:
        mlp_norm, mlp_after, gate, out = mlp_branch(X)
        if post:
            mlp_norm = FrozenNorm.of(arch, w.mlp_norm, skip(arch.mlp_skip, X, out))
    return FrozenLayer(arch, index, w, P, real, attention_norm, attention_after, mlp_norm, mlp_after, gate)


def _gated(arch: Architecture, w: Layer, X: Tokens) -> tuple[Tensor, Tokens]:
    """The gate of every hidden unit, and what the MLP gives."""
    mlp, act = w.mlp, ACTIVATIONS[arch.activation]
    assert mlp is not None
    up = affine(X, mlp.up)
    if mlp.gate is not None:
        gate = act(affine(X, mlp.gate))
    else:
        z = up.masked_fill(up == 0, 4 * torch.finfo(up.dtype).tiny)  # there the gate is the slope at zero
        gate = act(z) / z
    return gate, affine(gate * up, Linear(mlp.down.weight, mlp.down.bias))


def _normed(norm: FrozenNorm | None, Y: Parts, start: int | None) -> Parts:
    return Y if norm is None else norm.apply(Y, start)


def _with(Y: Tensor, start: int | None, bias: Tensor | None) -> Tensor:
    """Y, which nobody else holds, with a bias added to every token of part `start`."""
    if start is not None and bias is not None:
        Y[start] += bias
    return Y
