"""Differential attention: `P_1 - lambda P_2`, P_2 of second queries and keys (Ye et al. 2024), and in a
second version of second queries alone, with a lambda of each token. In the first

    lambda = e^{a_1 . b_1} - e^{a_2 . b_2} + lambda_0,    lambda_0 = peak - drop e^{-0.3 index},

a and b four vectors of a layer, index from 0; what a head says then goes through an RMSNorm of its own and is
multiplied by `1 - lambda_0`. Published networks have half the heads, each with values twice as wide, so that
nothing is added; here every head of a network that is there gets a second query and key beside its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Generator, Tensor

from rankscope.nets.fields import Fields
from rankscope.nets.remedies.remedy import Built
from rankscope.shapes import Float

Arch = TypeVar("Arch", bound=Fields)
VECTORS = ("query_1", "key_1", "query_2", "key_2")
"""a_1, b_1, a_2, b_2, as `lambda_` and these."""


@dataclass(frozen=True)
class HeadNorm(Built):
    """`RMSNorm(heads) (1 - peak + drop e^{-0.3 index})`, head by head, one gain for all heads of a layer."""

    peak: float = 0.8
    drop: float = 0.6
    eps: float = 1e-5
    name: ClassVar[str] = "head_norm"
    place: ClassVar[str] = "heads"

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """A gain of one."""
        return {"gain": torch.ones(arch.value_width, dtype=torch.float64)}

    def factor(self, index: int) -> float:
        """Of layer `index`."""
        return 1 - start(self.peak, self.drop, index)

    def plain(
        self, x: Float[Tensor, "batch token head head_width"], block: Any, rules: Any, inside: Any
    ) -> Float[Tensor, "batch token head head_width"]:
        """On what heads say."""
        normed = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return normed * block.weights.parts[self.name]["gain"] * self.factor(block.index)


@dataclass(frozen=True)
class Differential(Built):
    """Two attentions, one taken from the other. `spread` is the standard deviation that the four vectors are
    drawn with, `norm` whether heads get a norm of their own."""

    peak: float = 0.8
    drop: float = 0.6
    spread: float = 0.1
    norm: int = 1
    name: ClassVar[str] = "differential"
    place: ClassVar[str] = "pattern"
    says: ClassVar[str] = "attention becomes P_1 - lambda P_2, and what heads say is normed"
    source: ClassVar[str] = "Ye et al. 2024"
    zero: ClassVar[dict[str, float]] = {"peak": 0.0, "drop": 0.0, "spread": 0.0, "norm": 0}

    def applied(self, arch: Arch) -> Arch:
        """The architecture with both parts as its last."""
        both = (self, HeadNorm(self.peak, self.drop)) if self.norm else (self,)
        replaced: Arch = arch.replace(parts=(*arch.parts, *both))  # type: ignore[attr-defined]
        return replaced

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Queries and keys as torch starts a linear layer, uniform within `1 / sqrt(inputs)`; biases zero."""
        found = {}
        for name, inputs, heads, latent in (
            ("query", arch.query_latent or arch.width, arch.heads, arch.query_latent),
            ("key", arch.latent_width if arch.key_latent else arch.width, arch.key_heads, arch.key_latent),
        ):
            found[name] = _linear(inputs, generator, heads, arch.head_width)
            if arch.has_bias(name) and not latent:
                found[f"{name}_bias"] = torch.zeros(heads, arch.head_width, dtype=torch.float64)
        for name in VECTORS:
            drawn = torch.randn(arch.head_width, generator=generator, dtype=torch.float64)
            found[f"lambda_{name}"] = self.spread * drawn
        return found

    def weight(self, block: Any) -> Tensor:
        """lambda of a layer."""
        w = block.weights.parts[self.name]
        a, b, c, d = (w[f"lambda_{name}"] for name in VECTORS)
        found: Tensor = torch.exp((a * b).sum()) - torch.exp((c * d).sum())
        return found + start(self.peak, self.drop, block.index)

    def second(self, block: Any) -> Any:
        """The same layer with the second queries and keys in the place of its own."""
        w, there = block.weights.parts[self.name], block.weights.attention
        query, key = (
            replace(getattr(there, name), weight=w[name], bias=w.get(f"{name}_bias"))
            for name in ("query", "key")
        )
        return block.with_weights(replace(block.weights, attention=replace(there, query=query, key=key)))

    def plain(
        self, P: Float[Tensor, "batch head token token"], block: Any, rules: Any, inside: Any
    ) -> Float[Tensor, "batch head token token"]:
        """`P - lambda P_2`."""
        second: Tensor = rules.pattern(self.second(block), inside)
        return P - self.weight(block) * second


@dataclass(frozen=True)
class Differential2(Built):
    """Differential attention, second version (Ye et al. 2026): `P_1 - lambda_i P_2`, both of the same keys
    and values, lambda_i a sigmoid of the token that asks, head by head, without bias, norm or schedule. Every
    head of a network that is there gets a second query beside its own, which is the published pair of query
    heads in one group. What is taken is multiplied by `weight`, published as 1."""

    weight: float = 1.0
    name: ClassVar[str] = "differential2"
    place: ClassVar[str] = "pattern"
    says: ClassVar[str] = (
        "attention becomes P_1 - lambda P_2, lambda = weight times a sigmoid of the token that asks"
    )
    source: ClassVar[str] = "Ye et al. 2026"
    zero: ClassVar[dict[str, float]] = {"weight": 0.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Queries and the sigmoid's matrix as torch starts a linear layer; biases of queries zero."""
        inputs = arch.query_latent or arch.width
        found = {
            "query": _linear(inputs, generator, arch.heads, arch.head_width),
            "share": _linear(arch.width, generator, arch.heads),
        }
        if arch.has_bias("query") and not arch.query_latent:
            found["query_bias"] = torch.zeros(arch.heads, arch.head_width, dtype=torch.float64)
        return found

    def second(self, block: Any) -> Any:
        """The same layer with the second queries in the place of its own."""
        w, there = block.weights.parts[self.name], block.weights.attention
        query = replace(there.query, weight=w["query"], bias=w.get("query_bias"))
        return block.with_weights(replace(block.weights, attention=replace(there, query=query)))

    def plain(
        self, P: Float[Tensor, "batch head token token"], block: Any, rules: Any, inside: Any
    ) -> Float[Tensor, "batch head token token"]:
        """`P - lambda_i P_2`."""
        second: Tensor = rules.pattern(self.second(block), inside)
        share = (inside @ block.weights.parts[self.name]["share"]).sigmoid()  # [batch, token, head]
        return P - self.weight * share.mT[..., None] * second


def _linear(inputs: int, generator: Generator, *outputs: int) -> Tensor:
    """Uniform within `1 / sqrt(inputs)`."""
    drawn = torch.rand(inputs, *outputs, generator=generator, dtype=torch.float64)
    return (2 * drawn - 1) / math.sqrt(inputs)


def start(peak: float, drop: float, index: int) -> float:
    """lambda_0 of layer `index`."""
    return peak - drop * math.exp(-0.3 * index)
