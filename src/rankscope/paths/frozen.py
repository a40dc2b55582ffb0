"""A network frozen on its input: everything that depends on the tokens is kept as it was measured.

With attention matrices, norms and activations held at the values of one forward pass, the network is linear
in its input (and in every bias):

    attention   P_h as measured:                  Y -> sum_h P_h Y W_h
    norm        1 / sd_i as measured:             y_i -> gain * (y_i - mean y_i) / sd_i
    MLP         g = act(z) / z as measured:       Y -> (g * (Y W_1)) W_2
    gated MLP   g = act(x gate) as measured:      Y -> (g * (Y up)) down

At the input that it was frozen on, it gives exactly what the network gives. A path is one way through it.

`freeze` is called by `decompose`; the frozen network is traversed with the rules of `terms.py`. `frozen_pass` is the
same with gradients, for networks that are trained on some of their paths (`path_model.py` of the studies).
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from rankscope.errors import PathError
from rankscope.nets import (
    ACTIVATIONS,
    Architecture,
    Block,
    ExpertWeights,
    HeadOutputs,
    Heads,
    NormWeights,
    PassSettings,
    Plain,
    Seen,
    Square,
    TokenOrder,
    Tokens,
    Transformer,
    affine,
    named,
    norm_of,
    pieces,
    shapes,
    traverse,
)
from rankscope.paths.counts import Ways
from rankscope.shapes import Bool, Float

Parts = Float[Tensor, "part batch token width"]
MEASURED = ("query.bias", "key.bias", "gate.bias")  # biases that are part of what is measured, and start no path


@dataclass(frozen=True)
class FrozenNorm:
    """A norm at the scales it had."""

    centred: bool  # Tokens lose the mean of their entries first
    scale: Float[Tensor, "batch token 1"]  # What each token was multiplied by
    weights: NormWeights

    @classmethod
    def of(cls, arch: Architecture, weights: NormWeights, X: Tokens) -> "FrozenNorm | None":
        """The norm of these tokens; None where there is none."""
        norm = norm_of(arch.norm)
        if norm is None:
            return None
        return cls(norm.centred, 1 / norm.divisor(norm.centre(X), arch.norm_eps), weights)

    @property
    def factor(self) -> Float[Tensor, "batch token #width"]:
        """What a centred token is multiplied by."""
        return self.scale if self.weights.gain is None else self.scale * self.weights.gain

    def apply(self, Y: Parts, start: int | None) -> Parts:
        """Linear in Y; the bias goes into part `start`."""
        Y = (Y - Y.mean(-1, keepdim=True)).mul_(self.factor) if self.centred else Y * self.factor
        return with_bias(Y, start, self.weights.bias)


@dataclass
class FrozenLayer:
    """What a block did on the input: its attention, the scales of its norms, the gates of its MLP."""

    block: Block
    P: Square = field(init=False)  # attention, as measured
    norms: dict[str, FrozenNorm] = field(default_factory=dict)  # by their names in the weights
    gate: Float[Tensor, "batch token mlp_width"] | None = None  # what the MLP multiplied its entries by
    head_gate: Float[Tensor, "batch head token head_width"] | None = None  # the gates on head outputs, as measured
    kept: dict[str, Tensor] = field(default_factory=dict)  # what parts of one's own asked to keep, by name

    @property
    def ways(self) -> tuple[int | None, ...]:
        """The choices of a path in this layer: None if it can go past the heads, and the active heads."""
        half = next(half for half in self.block.halves if half.attends)
        past = half.skip != 0.0 or len(half.branches) > 1
        return (*([None] if past else []), *self.block.active_heads)


@dataclass(frozen=True, repr=False)
class Frozen:
    """A network frozen on its input, linear in its tokens and biases."""

    net: Transformer
    X: Tokens  # layer 0, as the first block reads it: valid tokens first, positions added
    valid: Bool[Tensor, "batch token"]  # tokens, and no padding
    layers: tuple[FrozenLayer, ...]
    last: FrozenNorm | None  # the norm after the last layer
    output: Tokens  # the output of the network itself
    order: TokenOrder | None  # how tokens go back to where they stood before padding was moved to the end
    whole: bool  # every position is a token
    gradients: bool = False  # frozen with gradients, which go through whatever is computed from here on

    def __repr__(self) -> str:
        return f"Frozen({self.net!r} on {tuple(self.X.shape)})"

    def restored(self, Y: Tokens) -> Tokens:
        """Tokens in the order in which the user gave them."""
        return Y if self.order is None else self.order.restored(Y)

    @property
    def ways(self) -> Ways:
        """The choices of a path in each layer."""
        return tuple(layer.ways for layer in self.layers)

    @property
    def has_constants(self) -> bool:
        """True if any bias that adds to tokens is not zero, or could become so in training: otherwise no path starts
        at a bias."""
        net = self.net
        if not net.arch.biases:
            return False
        starting = {name for name in shapes(net.arch) if name.endswith(".bias") and not name.endswith(MEASURED)}
        if self.gradients:
            return bool(starting)
        layers = ((f"layers.{index}.", named(layer)) for index, layer in enumerate(net.weights.layers))
        parts = chain([("", named(net.weights, layers=False))], layers)
        tensors = ((prefix + name, tensor) for prefix, part in parts for name, tensor in part.items())
        return any(name in starting and bool(tensor.any()) for name, tensor in tensors)


class FreezingRules(Plain):
    """The plain rules, which also record what depends on the tokens."""

    def __init__(self, arch: Architecture, settings: PassSettings) -> None:
        super().__init__(arch, settings)
        self.layers: dict[int, FrozenLayer] = {}

    def layer(self, block: Block) -> FrozenLayer:
        """What is known of a block so far."""
        return self.layers.setdefault(block.index, FrozenLayer(block))

    def norm(self, block: Block, name: str, X: Tokens) -> Tokens:
        """The norm, whose scales are recorded."""
        frozen_norm = FrozenNorm.of(self.arch, getattr(block.weights, name), X)
        assert frozen_norm is not None
        self.layer(block).norms[name] = frozen_norm
        return super().norm(block, name, X)

    def keep(self, block: Block, name: str, x: Tensor) -> None:
        """Record what a part of one's own asks to keep."""
        self.layer(block).kept[name] = x

    def mix(self, block: Block, P: Square, V: Heads) -> HeadOutputs:
        """The outputs of heads, whose attention is recorded."""
        self.layer(block).P = P
        return super().mix(block, P, V)

    def gate_values(self, block: Block, X: Tokens) -> HeadOutputs:
        """The gates on outputs of heads, which are recorded."""
        gate = super().gate_values(block, X)
        self.layer(block).head_gate = gate.transpose(1, 2)
        return gate

    def mlp(self, block: Block, X: Tokens) -> Tokens:
        """The output of the MLP, whose gates are recorded."""
        w, act = block.mlp, ACTIVATIONS[self.arch.activation]
        if block.weights.experts is not None:
            assert w.gate is not None
            self.layer(block).gate = act(affine(X, w.gate)) * self._shares(block.weights.experts, X)
            return super().mlp(block, X)
        up = affine(X, w.up)
        if w.gate is not None:
            gate = act(affine(X, w.gate))
            hidden = gate * up
        else:
            hidden, small = act(up), up.new_full((), 4 * torch.finfo(up.dtype).tiny)
            zero = up == 0
            gate = torch.where(zero, act(small) / small, hidden / up.masked_fill(zero, 1.0))  # at zero the slope there
        self.layer(block).gate = gate
        return affine(hidden, w.down)

    def _shares(self, w: ExpertWeights, X: Tokens) -> Tensor:
        """The weight of the expert that each hidden unit belongs to, all experts side by side."""
        assert self.arch.experts is not None
        p = self.routing(w, X).repeat_interleave(self.arch.experts.width, -1)
        if w.shared is None:
            return p
        return torch.cat([p, self.share(w, X).expand(*p.shape[:-1], self.arch.experts.shared_width)], -1)


def _refuse(why: str, subject: str) -> NoReturn:
    raise PathError(f"a network cannot be taken apart into paths, which {why}; measure it instead", subject=subject)


def require_linear(net: Transformer) -> None:
    """Refuse a network that has parts which no linear rule covers, with a `PathError`."""
    if net.arch.cross_attention:
        _refuse("begin at the network's own tokens; those of cross-attention begin in a memory", "cross_attention")
    for part in pieces(net.arch.parts):
        if part.place in ("values", "heads"):
            _refuse(f"average tokens in heads, and no more; {part.name} changes the {part.place} of a layer", part.name)
        if part.place != "pattern" and not hasattr(part, "frozen"):
            _refuse(f"need a linear rule named 'frozen' of every part; {part.name} has none: write one", part.name)
    if net.arch.experts is not None and (net.arch.experts.biases or net.arch.experts.limit):
        _refuse("need experts that are linear at their gates; these have biases, or are cut off", "experts")
    if net.arch.key_latent:
        _refuse("need values that are linear in tokens; a latent goes through a norm of its own", "key_latent")


@torch.no_grad()
def freeze(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Frozen:
    """Run the network once and keep everything that depends on the tokens."""
    return frozen_pass(net, X, padding)


def frozen_pass(net: Transformer, X: Tensor, padding: Tensor | None = None, seen: Seen | None = None) -> Frozen:
    """Run the network once and keep everything that depends on the tokens, with gradients where they are recorded.

    Args:
        net: The network; its tensors may be parameters.
        X: Tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padded tokens.
        seen: Who sees whom, as `unpadded` gave it before, where every position is a token.
    """
    require_linear(net)
    X, valid, order = net.prepared(X, padding)
    whole = padding is None or bool(valid.all())  # without padding, spares a question to the device
    rules = FreezingRules(net.arch, PassSettings.of(net.arch, net.weights, X, valid, seen=seen))
    first = X
    for block in net.blocks:
        X = traverse(block, rules, X).state
        X = X if whole else X.masked_fill(~valid[..., None], 0.0)
    net.weights.layers.release()
    layers = tuple(rules.layer(block) for block in net.blocks)
    last = FrozenNorm.of(net.arch, net.weights.final_norm, X) if net.arch.final_norm else None
    output = net.finish(X) * valid[..., None]
    return Frozen(net, first, valid, layers, last, output, order, whole, torch.is_grad_enabled())


def with_bias(Y: Tensor, start: int | None, bias: Tensor | None) -> Tensor:
    """Y, which nobody else holds, with a bias added to every token of part `start`."""
    if start is not None and bias is not None:
        Y[start] += bias
    return Y
