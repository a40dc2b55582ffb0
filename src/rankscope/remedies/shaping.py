"""Shaped attention, AttnScale and centred attention: `alpha I + beta P - gamma C`, C averages what a token sees.

| remedy      | alpha | beta    | gamma | C           |
|-------------|-------|---------|-------|-------------|
| `shaped`    | alpha | beta    | gamma | of the mask |
| `attnscale` | 0     | 1 + w   | w     | of the mask |
| `centred`   | 0     | 1       | 1     | of the mask |

The published AttnScale and centred attention are of the complete mask, where C is `11^T / n`. Taken literally
under a mask they would let tokens see what it hides; here C stays within what each token sees, padding left
out. Each number is one of every head, trained where a network is. Paths take the pattern as it came out.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote
from rankscope.shapes import Float

Pattern = Float[Tensor, "batch head token token"]


class PatternShaping(NamedRemedy):
    """What the three have in common: the pattern becomes `alpha I + beta P - gamma C`."""

    place: ClassVar[str] = "pattern"
    family: ClassVar[Any] = "attention"

    def coefficients(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return alpha, beta, gamma of every head."""
        raise NotImplementedError

    def of_heads(self, block: Any, like: Tensor) -> tuple[Tensor, ...]:
        """Return the three of a layer, `[head]` or one for all."""
        return tuple(weight.to(like) for weight in self.coefficients(block.weights.parts.get(self.name, {})))

    def plain(self, P: Pattern, block: Any, rules: Any, inside: Any) -> Pattern:
        """`alpha I + beta P - gamma C`; rows of padding stay zero."""
        C = rules.settings.averages(rules.arch.mask_of(block.index))
        alpha, beta, gamma = (weight[:, None, None] for weight in self.of_heads(block, P))
        identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
        identity = identity * rules.settings.valid[:, None, :, None]
        return alpha * identity + beta * P - gamma * C.to(P.dtype)

    mean_field = plain  # patterns are drawn

    def closed_form(self, row: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return the moments of a row of `alpha I + beta P - gamma C` among many tokens (`forecasts/phases.py`)."""
        alpha, beta, gamma = (float(weight.mean()) for weight in self.of_heads(block, torch.empty(0).double()))
        rules.query_gradient *= beta**2
        squares, kept = (alpha**2 + beta**2 * square for square in (row.squares, row.own))
        return row._replace(total=alpha + beta - gamma, squares=squares, own=kept, response=beta**2 * row.response)

    def deviation(self, P: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return `alpha I + beta P - gamma C` of a split pattern, without subtracting C from a P that is near it."""
        return rules.shape_pattern(P, *self.of_heads(block, P.p), inside)


@dataclass(frozen=True)
class Shaped(PatternShaping):
    """Shaped attention (Noci et al. 2023, He & Hofmann 2023). With W_Q = 0 it starts at the identity."""

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    name: ClassVar[str] = "shaped"
    formula: ClassVar[str] = "attention becomes alpha I + beta P - gamma C"
    citation: ClassVar[str] = "Noci et al. 2023; He & Hofmann 2023"
    zero: ClassVar[dict[str, float]] = {"alpha": 0.0, "beta": 1.0, "gamma": 0.0}
    theory = TheoryNote(
        1,
        "alpha I passes deviations on as they are. With W_Q = 0 attention is C, and at 1, 1, 1 its map "
        "of tokens is the identity: no collapse at any depth, with or without skips.",
        "Noci et al. 2023; He & Hofmann 2023",
    )
    claims = (
        Claim(
            "tokens stay apart without skips, at the start",
            "He & Hofmann 2023: the identity at the start; 18 layers train without skips",
            "deeper",
            ("no skips",),
        ),
        Claim(
            "without skips it learns what a plain network does not",
            "He & Hofmann 2023: 18 layers, loss 1.245 without skips and norms, 1.155 with both",
            "lower",
            ("no skips",),
            "loss",
        ),
    )

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start every head with the same three."""
        return {name: _of_every_head(arch, getattr(self, name)) for name in ("alpha", "beta", "gamma")}

    def coefficients(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trained three as they are."""
        return weights["alpha"], weights["beta"], weights["gamma"]


@dataclass(frozen=True)
class AttnScale(PatternShaping):
    """AttnScale (Wang et al. 2022): the differences between rows of attention are strengthened."""

    w: float = 0.0
    name: ClassVar[str] = "attnscale"
    formula: ClassVar[str] = "attention becomes C + (1 + w) (P - C)"
    citation: ClassVar[str] = "Wang et al. 2022"
    zero: ClassVar[dict[str, float]] = {"w": 0.0}
    theory = TheoryNote(
        3,
        "P - C is of the order r^2, so 1 + w changes the factor and not the law; at its start, w = 0, it "
        "changes nothing at all.",
        "Wang et al. 2022; order derived here",
    )
    claims = (
        Claim("better in training", "Wang et al. 2022: up to +1.1% on ImageNet", "higher", ("pre",), "accuracy"),
        Claim(
            "tokens differ more after training",
            "Wang et al. 2022: high frequencies kept",
            "higher",
            ("pre",),
            "relative_residual",
        ),
    )

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start every head with the same w."""
        return {"w": _of_every_head(arch, self.w)}

    def coefficients(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (0, 1 + w, w) of every head."""
        w = weights["w"]
        return torch.zeros_like(w), 1 + w, w


@dataclass(frozen=True)
class Centred(PatternShaping):
    """Centred attention (Ali et al. 2023; Nait Saada et al. 2025): nothing is trained."""

    name: ClassVar[str] = "centred"
    formula: ClassVar[str] = "attention becomes P - C: rows sum to zero"
    citation: ClassVar[str] = "Ali et al. 2023; Nait Saada et al. 2025"
    theory = TheoryNote(
        1,
        "Rows sum to zero, so the common token is taken out: what is left of it is of the order r^2 and "
        "deviations r^3, relative to each other r. The eigenvalue 1 that outgrows all others is gone.",
        "Ali et al. 2023; Nait Saada et al. 2025; order derived here",
    )
    claims = (
        Claim(
            "tokens stay apart for more layers, without skips",
            "Nait Saada et al. 2025; Ali et al. 2023: the outlying eigenvalue is gone",
            "deeper",
            ("no skips",),
        ),
    )

    def of_heads(self, block: Any, like: Tensor) -> tuple[Tensor, ...]:
        """Return (0, 1, 1), made where they are used: a copy to a GPU would be waited for."""
        return like.new_zeros(1), like.new_ones(1), like.new_ones(1)


def _of_every_head(arch: Any, number: float) -> Tensor:
    return torch.full((arch.heads,), number, dtype=torch.float64)
