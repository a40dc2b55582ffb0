"""Differential attention: `P_1 - lambda P_2`, P_2 of second queries and keys (Ye et al. 2024), and in a
second version of second queries alone, with a lambda of each token. In the first

    lambda = e^{a_1 . b_1} - e^{a_2 . b_2} + lambda_0,    lambda_0 = peak - drop e^{-0.3 index},

a and b four vectors of a layer, index from 0; the output of a head then goes through an RMSNorm of its own
and is multiplied by `1 - lambda_0`. Published networks have half the heads, each with values twice as wide,
so that nothing is added; here every head of a network gets a second query and key beside its own. Paths take
the pattern as it came out, and refuse the norm on heads."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.remedies.base import HALF, Claim, NamedRemedy, TheoryNote
from rankscope.shapes import Float

HeadOutputs = Float[Tensor, "batch token head head_width"]
Pattern = Float[Tensor, "batch head token token"]
VECTORS = ("query_1", "key_1", "query_2", "key_2")  # a_1, b_1, a_2, b_2, as `lambda_` and these


@dataclass(frozen=True)
class HeadNorm(NamedRemedy):
    """`RMSNorm(heads) (1 - peak + drop e^{-0.3 index})`, head by head, one gain for all heads of a layer."""

    peak: float = 0.8
    drop: float = 0.6
    eps: float = 1e-5
    name: ClassVar[str] = "head_norm"
    by_number: ClassVar[bool] = True
    place: ClassVar[str] = "heads"

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start with a gain of one."""
        return {"gain": torch.ones(arch.value_width, dtype=torch.float64)}

    def factor(self, index: int) -> float:
        """Return `1 - lambda_0` of layer `index`."""
        return 1 - start(self.peak, self.drop, index)

    def plain(self, x: HeadOutputs, block: Any, rules: Any, inside: Any) -> HeadOutputs:
        """Normalise the outputs of heads."""
        normed = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return normed * block.weights.parts[self.name]["gain"] * self.factor(block.index)

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Divide the covariance of every head by the expected length of each token."""
        length = (C.diagonal(dim1=-2, dim2=-1) + self.eps).sqrt()
        gain = block.weights.parts[self.name]["gain"].double().square().mean() * self.factor(block.index) ** 2
        return gain.to(C) * C / (length[..., None] * length[..., None, :])

    def deviation(self, outputs: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Normalise split head outputs in deviation arithmetic."""
        normed = rules.normalise_heads(outputs, block.weights.parts[self.name]["gain"], self.eps)
        factor = self.factor(block.index)
        return replace(normed, x=normed.x * factor, R=normed.R * factor)


@dataclass(frozen=True)
class Differential(NamedRemedy):
    """Two attentions, one taken from the other (Ye et al. 2024). `spread` is the standard deviation that the
    four vectors are drawn with, `norm` whether heads get a norm of their own."""

    peak: float = 0.8
    drop: float = 0.6
    spread: float = 0.1
    norm: int = 1
    name: ClassVar[str] = "differential"
    by_number: ClassVar[bool] = True
    place: ClassVar[str] = "pattern"
    formula: ClassVar[str] = "attention becomes P_1 - lambda P_2, and outputs of heads are normed"
    citation: ClassVar[str] = "Ye et al. 2024"
    family: ClassVar[Any] = "scores"
    zero: ClassVar[dict[str, float]] = {"peak": 0.0, "drop": 0.0, "spread": 0.0, "norm": 0}
    theory = TheoryNote(
        3,
        "Both attentions have rows that sum to one number and differ by r^2: so does what is left; "
        "the norm of heads gives attention's branch a fixed size.",
        "Ye et al. 2024; derived here",
    )
    claims = (Claim("a lower loss", "Ye et al. 2024", "lower", ("pre",), "loss"),)

    def applied(self, arch: Any) -> Any:
        """Return the architecture with this part, and the norm on heads, as its last."""
        both = (self, HeadNorm(self.peak, self.drop)) if self.norm else (self,)
        return arch.replace(parts=(*arch.parts, *both))

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Draw queries and keys as torch starts a linear layer, uniform within `1 / sqrt(inputs)`; biases are zero."""
        tensors = {}
        query = ("query", arch.query_latent or arch.width, arch.heads, arch.query_latent)
        key = ("key", arch.latent_width if arch.key_latent else arch.width, arch.key_heads, arch.key_latent)
        for name, inputs, heads, latent in (query, key):
            tensors[name] = _linear(inputs, generator, heads, arch.head_width)
            if arch.has_bias(name) and not latent:
                tensors[f"{name}_bias"] = torch.zeros(heads, arch.head_width, dtype=torch.float64)
        for name in VECTORS:
            vector = torch.randn(arch.head_width, generator=generator, dtype=torch.float64)
            tensors[f"lambda_{name}"] = self.spread * vector
        return tensors

    def weight(self, block: Any) -> Tensor:
        """Return lambda of a layer."""
        w = block.weights.parts[self.name]
        a, b, c, d = (w[f"lambda_{name}"] for name in VECTORS)
        trained: Tensor = torch.exp((a * b).sum()) - torch.exp((c * d).sum())
        return trained + start(self.peak, self.drop, block.index)

    def plain(self, P: Pattern, block: Any, rules: Any, inside: Any) -> Pattern:
        """Return `P - lambda P_2`, P_2 of the second queries and keys."""
        second: Tensor = rules.pattern(second_block(block, self.name), inside)
        return P - self.weight(block) * second

    mean_field = plain  # both patterns are drawn

    def deviation(self, P: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return `P - lambda P_2` of split patterns."""
        return rules.subtract_pattern(P, rules.pattern(second_block(block, self.name), inside), self.weight(block))


@dataclass(frozen=True)
class Differential2(NamedRemedy):
    """Differential attention, second version (Ye et al. 2026): `P_1 - lambda_i P_2`, both of the same keys
    and values, lambda_i a sigmoid of the token that asks, head by head, without bias, norm or schedule. Every
    head of a network that is there gets a second query beside its own, which is the published pair of query
    heads in one group. What is taken is multiplied by `weight`, published as 1."""

    weight: float = 1.0
    name: ClassVar[str] = "differential2"
    place: ClassVar[str] = "pattern"
    formula: ClassVar = "attention becomes P_1 - lambda P_2, lambda = weight times a sigmoid of the token that asks"
    citation: ClassVar[str] = "Ye et al. 2026"
    family: ClassVar[Any] = "scores"
    zero: ClassVar[dict[str, float]] = {"weight": 0.0}
    theory = TheoryNote(
        1,
        "lambda is of the token itself, so rows sum to numbers that differ by r: as with gates the fall "
        "without skips is exponential, not doubly so. About a half at the start, it halves attention's "
        "branch.",
        "derived here",
        *HALF,
    )

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Draw queries and the sigmoid's matrix as torch starts a linear layer; biases of queries zero."""
        inputs = arch.query_latent or arch.width
        query = _linear(inputs, generator, arch.heads, arch.head_width)
        tensors = {"query": query, "share": _linear(arch.width, generator, arch.heads)}
        if arch.has_bias("query") and not arch.query_latent:
            tensors["query_bias"] = torch.zeros(arch.heads, arch.head_width, dtype=torch.float64)
        return tensors

    def plain(self, P: Pattern, block: Any, rules: Any, inside: Any) -> Pattern:
        """Return `P - lambda_i P_2`, P_2 of the second queries."""
        second: Tensor = rules.pattern(second_block(block, self.name), inside)
        share = (inside @ block.weights.parts[self.name]["share"]).sigmoid()  # [batch, token, head]
        return P - self.weight * share.mT[..., None] * second

    def mean_field(self, P: Pattern, block: Any, rules: Any, inside: Any) -> Pattern:
        """Return `P - lambda_i P_2`, both patterns and lambda drawn."""
        share = rules.drawn(inside, block.weights.parts[self.name]["share"][..., None], None).sigmoid()
        taken: Tensor = self.weight * share * rules.pattern(second_block(block, self.name), inside)
        return P - taken

    def deviation(self, P: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return `P - lambda_i P_2` of split patterns: with `lambda_i = l + d_i`, l that of the common
        token, rows sum to `total - l`, and each to `-d_i` beside."""
        second = rules.pattern(second_block(block, self.name), inside)
        common, apart = rules.sigmoid_of(inside, block.weights.parts[self.name]["share"])
        apart = apart.mapped(lambda t: t * -self.weight).normalised()  # [batch, head, token, 1]
        return rules.subtract_pattern(P, second, self.weight * common.explicit(), apart)


def second_block(block: Any, name: str) -> Any:
    """Return the layer with the second queries, and keys if there are some, in the place of the first."""
    w, attention = block.weights.parts[name], block.weights.attention
    linears = [kind for kind in ("query", "key") if kind in w]
    changed = {kind: replace(getattr(attention, kind), weight=w[kind], bias=w.get(f"{kind}_bias")) for kind in linears}
    return block.with_weights(replace(block.weights, attention=replace(attention, **changed)))


def _linear(inputs: int, generator: Generator, *outputs: int) -> Tensor:
    """Draw uniformly within `1 / sqrt(inputs)`."""
    drawn = torch.rand(inputs, *outputs, generator=generator, dtype=torch.float64)
    return (2 * drawn - 1) / math.sqrt(inputs)


def start(peak: float, drop: float, index: int) -> float:
    """Return lambda_0 of layer `index`."""
    return peak - drop * math.exp(-0.3 * index)
