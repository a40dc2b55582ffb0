"""Gates on what heads say (Qiu et al. 2025): `W_O (sigmoid(X W_G + b_G) * P V)`, X what attention reads.

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
from rankscope.nets.fields import Fields
from rankscope.nets.parts import Place
from rankscope.nets.remedies.remedy import Arch, Built
from rankscope.shapes import Float

SPREAD = 0.02


@dataclass(frozen=True)
class Gate(Built):
    """A gate for every entry of every head (as in Qwen3-Next)."""

    name: ClassVar[str] = "gate"
    says: ClassVar[str] = "what heads say, times a sigmoid of the token, entry by entry"
    source: ClassVar[str] = "Qiu et al. 2025"

    def applied(self, arch: Arch) -> Arch:
        """The field that the architecture has for it."""
        if arch.head_gate:
            raise ArchitectureError("gates go on heads that have none; the heads of this network have gates")
        found: Arch = arch.replace(head_gate=True)  # type: ignore[attr-defined]
        return found

    def tensors(self, arch: Fields, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """W_G and b_G of every layer, drawn by a seed of their own."""
        generator, found = Generator().manual_seed(0), dict(state)
        like, shape = next(iter(state.values())), (arch.width, arch.heads, arch.value_width)
        for layer in range(1 if arch.shared else arch.layers):
            prefix = f"layers.{layer}.attention.gate"
            found[f"{prefix}.weight"] = _drawn(shape, generator).to(like)
            if arch.has_bias("query"):
                found[f"{prefix}.bias"] = torch.zeros(shape[1:]).to(like)
        return found


@dataclass(frozen=True)
class HeadGate(Built):
    """One gate for every head."""

    name: ClassVar[str] = "headgate"
    place: ClassVar[Place] = "heads"
    says: ClassVar[str] = "what heads say, times a sigmoid of the token, head by head"
    source: ClassVar[str] = "Qiu et al. 2025"

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """W_G `[width, head]` and b_G."""
        weight = {"weight": _drawn((arch.width, arch.heads), generator)}
        bias = {"bias": torch.zeros(arch.heads, dtype=torch.float64)}
        return weight | bias if arch.has_bias("query") else weight

    def plain(
        self, said: Float[Tensor, "batch token head head_width"], block: Any, rules: Any, inside: Any
    ) -> Float[Tensor, "batch token head head_width"]:
        """Times the gates of each token."""
        w = block.weights.parts[self.name]
        return said * (inside @ w["weight"] + w.get("bias", 0.0)).sigmoid()[..., None]


def _drawn(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)
