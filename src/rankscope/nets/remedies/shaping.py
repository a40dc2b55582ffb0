"""Attention shaped: `alpha I + beta P - gamma C`, C the uniform average of what each token sees.

| remedy      | alpha | beta    | gamma | C           |
|-------------|-------|---------|-------|-------------|
| `shaped`    | alpha | beta    | gamma | of the mask |
| `attnscale` | 0     | 1 + w   | w     | of the mask |
| `centred`   | 0     | 1       | 1     | of the mask |

The published AttnScale and centred attention are of the complete mask, where C is `11^T / n`. Taken literally
under a mask they would let tokens see what it hides; here C stays within what each token sees, padding left
out. Each number is one of every head, trained where a network is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.nets.fields import Fields
from rankscope.nets.remedies.remedy import Built
from rankscope.shapes import Bool, Float


class Shaping(Built):
    """What the three have in common."""

    place: ClassVar[str] = "pattern"

    def numbers(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """alpha, beta, gamma of every head."""
        raise NotImplementedError

    def of_heads(self, block: Any, like: Tensor) -> tuple[Tensor, ...]:
        """The three of a layer, `[head]` or one for all."""
        return tuple(each.to(like) for each in self.numbers(block.weights.parts.get(self.name, {})))

    def plain(
        self, P: Float[Tensor, "batch head token token"], block: Any, rules: Any, inside: Any
    ) -> Float[Tensor, "batch head token token"]:
        """`alpha I + beta P - gamma C`; rows of padding stay zero."""
        visible = rules.settings.visible[rules.arch.mask_of(block.index)]
        alpha, beta, gamma = (each[:, None, None] for each in self.of_heads(block, P))
        own = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) * rules.settings.valid[:, None, :, None]
        return alpha * own + beta * P - gamma * average(visible).to(P.dtype)


def average(visible: Bool[Tensor, "batch 1 row token"]) -> Float[Tensor, "batch 1 row token"]:
    """C: each row the average of what it sees; zero where it sees nothing."""
    return visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Shaped(Shaping):
    """Shaped attention (Noci et al. 2023, He & Hofmann 2023). With W_Q = 0 it starts at the identity."""

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    name: ClassVar[str] = "shaped"
    says: ClassVar[str] = "attention becomes alpha I + beta P - gamma C"
    source: ClassVar[str] = "Noci et al. 2023; He & Hofmann 2023"
    zero: ClassVar[dict[str, float]] = {"alpha": 0.0, "beta": 1.0, "gamma": 0.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """The same three for every head."""
        return {name: _all(arch, getattr(self, name)) for name in ("alpha", "beta", "gamma")}

    def numbers(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """As they are."""
        return weights["alpha"], weights["beta"], weights["gamma"]


@dataclass(frozen=True)
class AttnScale(Shaping):
    """AttnScale (Wang et al. 2022): what tells rows apart is strengthened."""

    w: float = 0.0
    name: ClassVar[str] = "attnscale"
    says: ClassVar[str] = "attention becomes C + (1 + w) (P - C)"
    source: ClassVar[str] = "Wang et al. 2022"
    zero: ClassVar[dict[str, float]] = {"w": 0.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """The same for every head."""
        return {"w": _all(arch, self.w)}

    def numbers(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """No identity."""
        w = weights["w"]
        return torch.zeros_like(w), 1 + w, w


@dataclass(frozen=True)
class Centred(Shaping):
    """Centred attention (Ali et al. 2023; Nait Saada et al. 2025): nothing is trained."""

    name: ClassVar[str] = "centred"
    says: ClassVar[str] = "attention becomes P - C: rows sum to zero"
    source: ClassVar[str] = "Ali et al. 2023; Nait Saada et al. 2025"

    def of_heads(self, block: Any, like: Tensor) -> tuple[Tensor, ...]:
        """The same for every head, made where they are used: a copy to a GPU would be waited for."""
        return like.new_zeros(1), like.new_ones(1), like.new_ones(1)


def _all(arch: Fields, number: float) -> Tensor:
    return torch.full((arch.heads,), number, dtype=torch.float64)
