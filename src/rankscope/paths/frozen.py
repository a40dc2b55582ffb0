"""The frozen arithmetic: a network held as it was measured on its input, so that every rule on its terms is linear.

With attention matrices, norms and activations held at the values of one forward pass, the network is linear
in its input (and in every bias):

    attention   P_h as measured:                  Y -> sum_h P_h Y W_h
    norm        1 / sd_i as measured:             y_i -> gain * (y_i - mean y_i) / sd_i
    MLP         g = act(z) / z as measured:       Y -> (g * (Y W_1)) W_2
    gated MLP   g = act(x gate) as measured:      Y -> (g * (Y up)) down

At the input that it was frozen on, it gives exactly what the network gives. A path is one way through it.

`freeze`, which `decompose` calls, runs the network once by the `FreezingRules` (`frozen_pass` does so with gradients,
for networks that are trained on some of their paths: `path_model.py` of the studies). The frozen network is then
traversed (`nets/traversal.py`) by `FrozenRules`, on any number of terms side by side. `Terms.parts` is
`[part, batch, token, width]`; `start` is the part into which biases are added, None to leave them out. What the parts
are depends on the rules: the whole network (`WholeNetwork`), one path (`single_paths.py`), every way on from a path
(`heaviest.py`), all paths of each length (`lengths.py`), everything that passes through a layer (`by_part.py`).

That the terms add up to the network's own output is checked by `closure_of`; `share` says what of it a term is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from rankscope.errors import ClosureError, PathError, require
from rankscope.metrics import Values, frobenius_norm, metric, tokens, unit_of
from rankscope.nets import (
    ACTIVATIONS,
    Architecture,
    Arithmetic,
    Block,
    ExpertWeights,
    Half,
    HeadOutputs,
    Heads,
    NormWeights,
    Part,
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
"""Terms of a network side by side; what they are depends on the rules."""
HeadTerms = Float[Tensor, "part batch head token head_width"]
"""What each head mixed, of every term, before the output projection."""
MEASURED = ("query.bias", "key.bias", "gate.bias")  # biases that are part of what is measured, and start no path
DIGITS = math.log(1e-9) / math.log(unit_of(torch.float64))
"""The share of an arithmetic's digits to which parts must add up: 1e-9 in float64, 1e-4 in float32, 6e-2 in
bfloat16."""


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
    no_padding: bool  # every position is a token
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
            inner = gate * up
        else:
            inner, small = act(up), up.new_full((), 4 * torch.finfo(up.dtype).tiny)
            zero = up == 0
            gate = torch.where(zero, act(small) / small, inner / up.masked_fill(zero, 1.0))  # at zero the slope there
        self.layer(block).gate = gate
        return affine(inner, w.down)

    def _shares(self, w: ExpertWeights, X: Tokens) -> Tensor:
        """The weight of the expert that each inner entry of the MLP belongs to, all experts side by side."""
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
    no_padding = padding is None or bool(valid.all())  # without padding, spares a question to the device
    rules = FreezingRules(net.arch, PassSettings.of(net.arch, net.weights, X, valid, seen=seen))
    first = X
    for block in net.blocks:
        X = traverse(block, rules, X).state
        X = X if no_padding else X.masked_fill(~valid[..., None], 0.0)
    net.weights.layers.release()
    layers = tuple(rules.layer(block) for block in net.blocks)
    last = FrozenNorm.of(net.arch, net.weights.final_norm, X) if net.arch.final_norm else None
    output = net.finish(X) * valid[..., None]
    return Frozen(net, first, valid, layers, last, output, order, no_padding, torch.is_grad_enabled())


class Terms(NamedTuple):
    """Terms of a network that go through its layers side by side."""

    parts: Parts
    start: int | None = None


class FrozenRules(Arithmetic):
    """Linear rules on the terms of a frozen network, through all active heads or those named by layer."""

    name = "frozen"

    def __init__(self, frozen: Frozen, heads: Sequence[Sequence[int]] | None = None) -> None:
        self.frozen, self.arch, self.heads = frozen, frozen.net.arch, heads
        self.no_padding = frozen.no_padding
        self.carried: dict[str, Any] = {}

    def layer(self, block: Block) -> FrozenLayer:
        """The measured quantities of a block."""
        return self.frozen.layers[block.index]

    @cached_property
    def settings(self) -> PassSettings:
        """Masks and positions of the pass, for parts of one's own."""
        return self.frozen.net.settings(self.frozen.X, self.frozen.valid)

    def kept(self, block: Block, name: str) -> Tensor:
        """The tensor that a part's plain rule kept under a name."""
        return self.layer(block).kept[name]

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The active heads, of those named."""
        active = block.active_heads
        return active if self.heads is None else tuple(h for h in active if h in self.heads[block.index])

    def norm(self, block: Block, name: str, terms: Terms) -> Terms:
        """The norm at the scales it had; its bias starts there."""
        return terms._replace(parts=self.layer(block).norms[name].apply(*terms))

    def values(self, block: Block, terms: Terms) -> Float[Tensor, "part batch token key_head head_width"]:
        """The values that heads mix, per term."""
        w = block.weights.attention.value  # [width, key_head, head_width]
        V = terms.parts @ w.weight.flatten(1)
        V = with_bias(V, terms.start, None if w.bias is None else w.bias.flatten())
        return V.reshape(*V.shape[:-1], *w.weight.shape[1:])

    def pattern(self, block: Block, terms: Terms) -> Square:
        """The attention pattern as it was measured."""
        return self.layer(block).P

    def mix(self, block: Block, P: Square, V: Tensor) -> HeadTerms:
        """The output of each head, per term."""
        group = self.arch.heads // self.arch.key_heads
        V = V.repeat_interleave(group, 3) if group > 1 else V
        # Parts beside each other in the last axis: P multiplies them all at once.
        parts, batch, n, heads, width = V.shape
        side = V.permute(1, 3, 2, 0, 4).reshape(batch, heads, n, parts * width)
        return (P @ side).view(batch, heads, n, parts, width).permute(3, 0, 1, 2, 4)

    def gate(self, block: Block, head_terms: HeadTerms, terms: Terms) -> HeadTerms:
        """The output of each head, times the gates as measured."""
        gate = self.layer(block).head_gate
        assert gate is not None
        return head_terms * gate

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What heads add to the hidden states; the output bias starts here."""
        return self._started(block, self.added(block, head_terms))

    start: int | None = None  # the part in which an output bias starts: it passes through no head of its layer

    def _started(self, block: Block, parts: Parts) -> Terms:
        return Terms(with_bias(parts, self.start, block.weights.attention.output.bias), self.start)

    def added(self, block: Block, head_terms: HeadTerms, out: Parts | None = None) -> Parts:
        """What heads add, without the output bias; written into `out` if given."""
        weight, active = block.weights.attention.output.weight, list(self.active_heads(block))
        if len(active) < self.arch.heads:
            head_terms, weight = head_terms[:, :, active], weight[active]
        return torch.matmul(head_terms.transpose(2, 3).flatten(3), weight.flatten(0, 1), out=out)

    def mlp(self, block: Block, terms: Terms) -> Terms:
        """The MLP branch, with the gates as measured."""
        w, gate, start = block.mlp, self.layer(block).gate, terms.start
        assert gate is not None
        inner = with_bias(terms.parts @ w.up.weight, start, w.up.bias).mul_(gate)
        return Terms(with_bias(inner @ w.down.weight, start, w.down.bias), start)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """`skip Y` and the branches, attention last."""
        rest = [branches[part].parts for part in ("mlp", "attention") if part in branches]
        if not half.attends and rest:
            result = rest[0] if half.skip == 0.0 else rest[0].add_(terms.parts, alpha=half.skip)
            return terms._replace(parts=result)
        skip = torch.zeros_like(terms.parts) if half.skip == 0.0 else half.skip * terms.parts
        return terms._replace(parts=sum(rest, skip))

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """Attention weights that a part of one's own has changed were kept as they came out."""
        return x if part.place == "pattern" else super().part(block, part, x, inside)

    def through(self, block: Block, terms: Terms) -> Terms:
        """Terms after a block; padding stays zero."""
        after: Terms = traverse(block, self, terms).state
        return after if self.no_padding else after._replace(parts=after.parts * self.frozen.valid[..., None])

    def end(self, terms: Terms) -> Parts:
        """Through the final norm, where there is one."""
        last = self.frozen.last
        if last is None:
            return terms.parts
        ended = last.apply(*terms)
        return ended if self.no_padding else ended * self.frozen.valid[..., None]


class WholeNetwork(FrozenRules):
    """Rules with one term, the whole network, with its biases or without."""

    def __init__(self, frozen: Frozen, heads: Sequence[Sequence[int]] | None = None, biases: bool = True) -> None:
        super().__init__(frozen, heads)
        self.start = 0 if biases else None

    def run(self) -> Tokens:
        """The output of the frozen network, of the heads named alone if any were."""
        terms = Terms(self.frozen.X[None], self.start)
        for layer in self.frozen.layers:
            terms = self.through(layer.block, terms)
        return self.end(terms)[0]


def with_bias(Y: Tensor, start: int | None, bias: Tensor | None) -> Tensor:
    """Y, which nobody else holds, with a bias added to every token of part `start`."""
    if start is not None and bias is not None:
        Y[start] += bias
    return Y


def closure_of(total: Tensor, frozen: Frozen) -> float:
    """How far the parts are from the output, relative to it; an error where that is more than rounding."""
    output_size = float(torch.linalg.vector_norm(frozen.output))
    gap = float(torch.linalg.vector_norm(total - frozen.output))
    return require_closure(gap / output_size if output_size else gap, total.dtype)


def require_closure(closure: float, dtype: torch.dtype) -> float:
    """Return how far parts are from the output, relative to it; an error where that is more than rounding."""
    allowed = unit_of(dtype) ** DIGITS
    sentence = f"the parts must add up to the output within {allowed:.0e} of it; they miss it by {closure:.1e}"
    why = "the frozen network overflows, or its terms cancel to nothing; use float64"
    require(closure <= allowed, f"{sentence}: {why}", ClosureError, "closure")
    return closure


def share(term: Tokens, total: Tokens) -> Values:
    """`<term, total> / <total, total>`: shares of terms that add up to the total add up to one."""
    size = size_of(total.double())
    return (_divided(term, size) * _divided(total, size)).sum((1, 2))


def cosine(term: Tokens, total: Tokens) -> Values:
    """`<term, total> / (||term|| ||total||)`; 0 where either is zero."""
    term, total = (_divided(tensor, size_of(tensor.double())) for tensor in (term, total))
    return (term * total).sum((1, 2))


def _divided(X: Tokens, size: Values) -> Tokens:
    """X / size before anything is multiplied: products of small numbers would leave the range."""
    return X.double() / size[:, None, None]


def size_of(X: Tokens) -> Values:
    """The Frobenius norm of each sample, computed in float64; infinite where it is zero, to divide by."""
    size = frobenius_norm(X.double()).to(X)
    return size.masked_fill(size == 0, torch.inf)


def uniform(X: Tensor, valid: Tensor) -> Tensor:
    """True for samples whose tokens are equal as far as the arithmetic resolves: their residual is noise."""
    return metric("relative_residual").read(tokens(X, ~valid)).below_floor.to(X.device)


def centred_tokens(X: Tensor, valid: Tensor) -> Tensor:
    """X minus the mean of its valid tokens."""
    count = valid.sum(-1).clamp(min=1)[:, None, None]
    mean = (X * valid[..., None]).sum(1, keepdim=True) / count
    return (X - mean) * valid[..., None]
