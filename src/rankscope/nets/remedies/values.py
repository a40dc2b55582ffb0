"""Values of the first layer, heard again in every later one.

| remedy          | from layer l = 2 on                     |
|-----------------|-----------------------------------------|
| `valueresidual` | `P (a V_l + b V_1)`                     |
| `neutreno`      | `P V_l + lambda (V_1 - V_l)`            |

V_l are the values of every head, biases and all, before heads mix them. Both act on each token by itself, so
no mask hides anything from them. `rules.memory` carries V_1 from layer to layer. Paths refuse both: what
layer 1 leaves reaches a later layer past all between, which is no path of heads and skips.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets.fields import Fields
from rankscope.nets.parts import Place
from rankscope.nets.remedies.remedy import Built
from rankscope.shapes import Float

Heads = Float[Tensor, "batch head token head_width"]
Spoken = Float[Tensor, "batch token head head_width"]
FIRST = "values of the first layer"
OWN = "values of this layer"


def first(block: Any, rules: Any, V: Any) -> Any:
    """V_1, of any arithmetic: noted in layer 1, whose values V are then."""
    if block.index == 0:
        rules.memory[FIRST] = V
    if FIRST not in rules.memory:
        raise ArchitectureError(
            "a layer that hears the values of the first one must be run after it; this pass began at layer "
            f"{block.index + 1}: begin at layer 1"
        )
    return rules.memory[FIRST]


@dataclass(frozen=True)
class ValueResidual(Built):
    """Value residual (ResFormer; Zhou et al. 2024): two numbers of each layer, trained; half and half at the
    start. V_1 is what layer 1 itself mixes."""

    a: float = 0.5
    b: float = 0.5
    name: ClassVar[str] = "valueresidual"
    place: ClassVar[Place] = "values"
    says: ClassVar[str] = "values become a V + b V_1, from layer 2 on"
    source: ClassVar[str] = "Zhou et al. 2024"
    zero: ClassVar[dict[str, float]] = {"a": 1.0, "b": 0.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Of every layer; the first does not use them."""
        return {each.name: torch.tensor(getattr(self, each.name)).double() for each in fields(self)}

    def plain(self, V: Heads, block: Any, rules: Any, inside: Any) -> Heads:
        """`a V + b V_1`."""
        V_1 = first(block, rules, V)
        if block.index == 0:
            return V
        numbers = block.weights.parts[self.name]
        mixed: Tensor = numbers["a"] * V + numbers["b"] * V_1
        return mixed


@dataclass(frozen=True)
class Neutreno(Built):
    """NeuTRENO (Nguyen et al. 2023): what a head says is drawn to the difference from the first values. The
    number is fixed: 0.6 in the published images, 0.4 in texts."""

    weight: float = 0.6
    name: ClassVar[str] = "neutreno"
    says: ClassVar[str] = "heads say P V + weight (V_1 - V), from layer 2 on"
    source: ClassVar[str] = "Nguyen et al. 2023"
    zero: ClassVar[dict[str, float]] = {"weight": 0.0}

    @property
    def pieces(self) -> tuple["Noted", "Drawn"]:
        """Values are noted where they are made, and heard where heads speak."""
        return Noted(self.name), Drawn(self.name, self.weight)


@dataclass(frozen=True)
class Noted:
    """Keeps V and V_1."""

    name: str
    place: ClassVar[Place] = "values"

    def plain(self, V: Any, block: Any, rules: Any, inside: Any) -> Any:
        """V as it is."""
        first(block, rules, V)
        rules.memory[OWN] = V
        return V

    deviation = plain


@dataclass(frozen=True)
class Drawn:
    """Adds `weight (V_1 - V)` to what heads say."""

    name: str
    weight: float
    place: ClassVar[Place] = "heads"

    def plain(self, said: Spoken, block: Any, rules: Any, inside: Any) -> Spoken:
        """Of the heads that speak."""
        V, V_1 = rules.memory.pop(OWN), rules.memory[FIRST]
        if block.index == 0:
            return said
        drawn = self.weight * (V_1 - V)  # [batch, head, token, head_width]
        if len(rules.active_heads(block)) < block.arch.heads:
            drawn = drawn * speaks(block, rules).to(drawn)[:, None, None]
        return said + drawn.transpose(1, 2)


def speaks(block: Any, rules: Any) -> Tensor:
    """[head]: whether each speaks here."""
    found = torch.zeros(block.arch.heads, dtype=torch.bool)
    found[list(rules.active_heads(block))] = True
    return found
