"""Gates on the outputs of heads (Qiu et al. 2025): `W_O (sigmoid(X W_G + b_G) * P V)`, X what attention reads.

| remedy     | a gate                                                                |
|------------|-----------------------------------------------------------------------|
| `gate`     | of each entry of each head: the architecture's `head_gate`            |
| `headgate` | of each head, the same for all its entries                            |

W_G is drawn from N(0, 0.02), b_G, where queries have a bias, is 0, as published: at first gates are half
open. No weights make a gate that changes nothing.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError
from rankscope.remedies.base import HALF, Claim, NamedRemedy, TheoryNote
from rankscope.shapes import Float

HeadOutputs = Float[Tensor, "batch token head head_width"]
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Gate(NamedRemedy):
    """A gate for every entry of every head (as in Qwen3-Next)."""

    name: ClassVar[str] = "gate"
    formula: ClassVar[str] = "outputs of heads, times a sigmoid of the token, entry by entry"
    citation: ClassVar[str] = "Qiu et al. 2025"
    family: ClassVar[Any] = "values"
    theory = TheoryNote(
        1,
        "A gate of the token's own makes equal averages differ by r: without skips the fall is "
        "exponential in place of doubly so. Half open at the start, it halves attention's branch.",
        "derived here",
        *HALF,
    )
    claims = (Claim("a lower loss", "Qiu et al. 2025 (15B mixture of experts, 1.7B)", "lower", ("pre",), "loss"),)

    def applied(self, arch: Any) -> Any:
        """Return the architecture with its `head_gate` set."""
        if arch.head_gate:
            raise ArchitectureError("gates go on heads that have none; these have gates", subject="head_gate")
        return arch.replace(head_gate=True)

    def tensors(self, arch: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with W_G and b_G of every layer, drawn by a seed of their own."""
        generator, tensors = Generator().manual_seed(0), dict(state)
        like, shape = next(iter(state.values())), (arch.width, arch.heads, arch.value_width)
        for layer in range(1 if arch.shared else arch.layers):
            prefix = f"layers.{layer}.attention.gate"
            tensors[f"{prefix}.weight"] = _normal(shape, generator).to(like)
            if arch.has_bias("query"):
                tensors[f"{prefix}.bias"] = torch.zeros(shape[1:]).to(like)
        return tensors


@dataclass(frozen=True)
class HeadGate(NamedRemedy):
    """One gate for every head."""

    name: ClassVar[str] = "headgate"
    place: ClassVar[str] = "heads"
    formula: ClassVar[str] = "outputs of heads, times a sigmoid of the token, head by head"
    citation: ClassVar[str] = "Qiu et al. 2025"
    family: ClassVar[Any] = "values"
    theory = TheoryNote(
        1,
        "As the gate by entry, with one factor a head: exponential in place of doubly exponential, and "
        "half the branch at the start.",
        "derived here",
        *HALF,
    )
    claims = (Claim("a lower loss", "Qiu et al. 2025", "lower", ("pre",), "loss"),)

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Draw W_G `[width, head]`, with b_G = 0."""
        weight = {"weight": _normal((arch.width, arch.heads), generator)}
        bias = {"bias": torch.zeros(arch.heads, dtype=torch.float64)}
        return weight | bias if arch.has_bias("query") else weight

    def plain(self, outputs: HeadOutputs, block: Any, rules: Any, inside: Any) -> HeadOutputs:
        """Multiply by the gates of each token."""
        w = block.weights.parts[self.name]
        return outputs * (inside @ w["weight"] + w.get("bias", 0.0)).sigmoid()[..., None]

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Multiply covariances by `E[g_t g_s]`, g the gates."""
        w = block.weights.parts[self.name]
        return C * rules.gate_products(inside, w["weight"], w.get("bias"))

    def deviation(self, outputs: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Multiply split head outputs: gates of tokens that are alike are alike."""
        w = block.weights.parts[self.name]
        return rules.gate_heads(outputs, inside, w["weight"], w.get("bias"))


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return STANDARD_DEVIATION * torch.randn(shape, generator=generator, dtype=torch.float64)
