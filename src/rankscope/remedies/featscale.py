"""FeatScale (Wang et al. 2022): the mean of what attention adds, and what departs from it, weighed apart.

    A -> A + s * m + t * (A - m),    m = C A,    C the average over what each token sees

The published one is of the complete mask, m the mean of all tokens. Under a mask that would let tokens see
what it hides: here m is the mean over the tokens that each one sees, padding left out. Of the published
files one adds the term twice; this is the formula, once."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.remedies.base import NamedRemedy, TheoryNote
from rankscope.remedies.shaping import AttnScale
from rankscope.shapes import Float

Tokens = Float[Tensor, "*part batch token width"]


@dataclass(frozen=True)
class FeatScale(NamedRemedy):
    """`A + s * m + t * (A - m)`, A what attention adds and m its mean; s and t of each channel, trained from 0."""

    s: float = 0.0
    t: float = 0.0
    name: ClassVar[str] = "featscale"
    place: ClassVar[str] = "attention"
    sees: ClassVar[bool] = True
    formula: ClassVar[str] = "the mean of what attention adds times 1 + s, the rest times 1 + t, by channel"
    citation: ClassVar[str] = "Wang et al. 2022"
    family: ClassVar[Any] = "values"
    zero: ClassVar[dict[str, float]] = {"s": 0.0, "t": 0.0}
    theory = TheoryNote(
        3,
        "It weighs what attention adds by a constant; at its start, s = t = 0, it changes nothing.",
        "Wang et al. 2022; derived here",
    )
    claims = AttnScale.claims  # published together

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start every channel with the same s and t."""
        sizes = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return {name: torch.full((arch.width,), size, dtype=torch.float64) for name, size in sizes.items()}

    def plain(self, A: Tokens, block: Any, rules: Any, inside: Any) -> Tokens:
        """Token by token and channel by channel."""
        numbers = block.weights.parts[self.name]
        m = _averages(block, rules).to(A.dtype) @ A
        return A + numbers["s"] * m + numbers["t"] * (A - m)

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """`M C M^T`, `M = (1 + t) I + (s - t) K`, K the average over what each token sees; the mean over channels."""
        s, t = (block.weights.parts[self.name][name].to(C) for name in ("s", "t"))
        K, direct, averaged = _averages(block, rules).to(C), 1 + t, s - t
        both = (direct * averaged).mean() * (K @ C)
        return direct.square().mean() * C + both + both.mT + averaged.square().mean() * (K @ C @ K.mT)

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """The plain rule, which is linear as it is."""
        return terms._replace(parts=self.plain(terms.parts, block, rules, inside))

    def deviation(self, A: Any, block: Any, rules: Any, inside: Any) -> Any:
        """With `A = 1 a^T + R`, a the mean, and c a row of C,

            1 (a (1 + s) + (s - t) c^T R)    is shared, and
            (1 + t) R + (s - t) (C - 1 c^T) R    is not:

        under a complete mask the last of these is exactly zero."""
        s, t = (block.weights.parts[self.name][name] for name in ("s", "t"))
        mean, R = A.centred()
        C = _averages(block, rules).to(R.value).expand(len(R.value), -1, -1)
        last = torch.where(A.valid.mask, torch.arange(C.shape[-1], device=C.device), 0).amax(-1)
        c = C[torch.arange(len(C), device=C.device), last][:, None]  # of a row that sees most
        common = (A.x + mean).mapped(lambda v: v * (1 + s)) + R.mapped(lambda v: (c @ v)[:, 0] * (s - t))
        apart = (C - c) * A.valid.mask[..., None]
        return replace(A, x=common, R=R.mapped(lambda v: v * (1 + t) + apart @ v * (s - t)))


def _averages(block: Any, rules: Any) -> Float[Tensor, "#batch token token"]:
    """C: each row the average of what a token sees in this layer."""
    averages: Tensor = rules.settings.averages(block.arch.mask_of(block.index))
    return averages[:, 0]
