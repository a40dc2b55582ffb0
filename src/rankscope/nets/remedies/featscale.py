"""FeatScale: the mean of what attention adds, and what departs from it, weighed apart."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.nets.fields import Fields
from rankscope.nets.parts import Place
from rankscope.nets.remedies.remedy import Built
from rankscope.nets.remedies.shaping import average
from rankscope.shapes import Float

Tokens = Float[Tensor, "*part batch token width"]


@dataclass(frozen=True)
class FeatScale(Built):
    """FeatScale (Wang et al. 2022): `A + s * m + t * (A - m)`, A what attention adds and m its mean, s and t
    of each channel, trained from 0.

    The published one is of the complete mask, m the mean of all tokens. Under a mask that would let tokens
    see what it hides: here m is the mean over the tokens that each one sees, padding left out. Of the
    published files one adds the term twice; this is the formula, once."""

    s: float = 0.0
    t: float = 0.0
    name: ClassVar[str] = "featscale"
    place: ClassVar[Place] = "attention"
    sees: ClassVar[bool] = True
    says: ClassVar[str] = "the mean of what attention adds times 1 + s, the rest times 1 + t, by channel"
    source: ClassVar[str] = "Wang et al. 2022"
    zero: ClassVar[dict[str, float]] = {"s": 0.0, "t": 0.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """The same for every channel."""
        sizes = {each.name: float(getattr(self, each.name)) for each in fields(self)}
        return {name: torch.full((arch.width,), size, dtype=torch.float64) for name, size in sizes.items()}

    def plain(self, A: Tokens, block: Any, rules: Any, inside: Any) -> Tokens:
        """Token by token and channel by channel."""
        numbers = block.weights.parts[self.name]
        m = averages(block, rules).to(A.dtype) @ A
        return A + numbers["s"] * m + numbers["t"] * (A - m)

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Linear as it is."""
        return terms._replace(parts=self.plain(terms.parts, block, rules, inside))


def averages(block: Any, rules: Any) -> Float[Tensor, "#batch token token"]:
    """C: each row the average of what a token sees in this layer."""
    return average(rules.settings.visible[block.arch.mask_of(block.index)])[:, 0]
