"""Value residual and NeuTRENO: values of the first layer, used again in every later one.

| remedy          | from layer l = 2 on                     |
|-----------------|-----------------------------------------|
| `valueresidual` | `P (a V_l + b V_1)`                     |
| `neutreno`      | `P V_l + lambda (V_1 - V_l)`            |

V_l are the values of every head, biases and all, before heads mix them. Both act on each token by itself, so
no mask hides anything from them. `rules.carried` carries V_1 from layer to layer. Paths refuse both: what
layer 1 leaves reaches a later layer past all between, which is no path of heads and skips.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError, require
from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote
from rankscope.shapes import Float

Heads = Float[Tensor, "batch head token head_width"]
HeadOutputs = Float[Tensor, "batch token head head_width"]
FIRST = "values of the first layer"
CURRENT = "values of this layer"


def first_values(block: Any, rules: Any, V: Any) -> Any:
    """Return V_1, in any arithmetic; in layer 1 these are V, and are remembered."""
    if block.index == 0:
        rules.carried[FIRST] = V
    sentence = f"values of the first layer are used after it; this pass began at layer {block.index + 1}"
    require(FIRST in rules.carried, f"{sentence}: begin at layer 1", ArchitectureError, "layers")
    return rules.carried[FIRST]


@dataclass(frozen=True)
class ValueResidual(NamedRemedy):
    """Value residual (ResFormer; Zhou et al. 2024): two numbers of each layer, trained; half and half at the
    start. V_1 is what layer 1 itself mixes."""

    a: float = 0.5
    b: float = 0.5
    name: ClassVar[str] = "valueresidual"
    by_number: ClassVar[bool] = True
    place: ClassVar[str] = "values"
    formula: ClassVar[str] = "values become a V + b V_1, from layer 2 on"
    citation: ClassVar[str] = "Zhou et al. 2024"
    family: ClassVar[Any] = "values"
    zero: ClassVar[dict[str, float]] = {"a": 1.0, "b": 0.0}
    theory = TheoryNote(
        2,
        "Rows that differ by r^2 mix first-layer values that differ by a constant: r^2 in place of r^3. "
        "The log doubles in place of tripling: doubly exponential still.",
        "derived here",
    )
    claims = (Claim("a lower loss", "Zhou et al. 2024", "lower", ("pre",), "loss"),)

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start every layer with a and b; the first does not use them."""
        return {field.name: torch.tensor(getattr(self, field.name)).double() for field in fields(self)}

    def plain(self, V: Heads, block: Any, rules: Any, inside: Any) -> Heads:
        """`a V + b V_1`."""
        V_1 = first_values(block, rules, V)
        if block.index == 0:
            return V
        numbers = block.weights.parts[self.name]
        mixed: Tensor = numbers["a"] * V + numbers["b"] * V_1
        return mixed

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Add the covariances of V and V_1, which are made by independent weights."""
        C_1 = first_values(block, rules, C)
        if block.index == 0:
            return C
        numbers = block.weights.parts[self.name]
        return C * float(numbers["a"]) ** 2 + C_1 * float(numbers["b"]) ** 2

    def deviation(self, V: Any, block: Any, rules: Any, inside: Any) -> Any:
        """`a V + b V_1`, of common values and deviations alike."""
        V_1 = first_values(block, rules, V)
        if block.index == 0:
            return V
        numbers = block.weights.parts[self.name]
        x, R = (_combined(v, v_1, numbers["a"], numbers["b"]) for v, v_1 in ((V.x, V_1.x), (V.R, V_1.R)))
        return replace(V, x=x, R=R)


@dataclass(frozen=True)
class Neutreno(NamedRemedy):
    """NeuTRENO (Nguyen et al. 2023): the output of a head is drawn to the difference from the first values.
    The number is fixed: 0.6 in the published images, 0.4 in texts."""

    weight: float = 0.6
    name: ClassVar[str] = "neutreno"
    by_number: ClassVar[bool] = True
    formula: ClassVar[str] = "heads give P V + weight (V_1 - V), from layer 2 on"
    citation: ClassVar[str] = "Nguyen et al. 2023"
    family: ClassVar[Any] = "values"
    zero: ClassVar[dict[str, float]] = {"weight": 0.0}
    theory = TheoryNote(
        0,
        "V_1 reaches every layer past attention, so a difference of fixed size is added in each: tokens "
        "cannot become more alike than the first values let them.",
        "Nguyen et al. 2023; derived here",
    )
    claims = (
        Claim(
            "tokens stay apart for more layers",
            "Nguyen et al. 2023: less over-smoothing",
            "deeper",
            ("post", "pre", "no skips"),
        ),
        Claim("better in training", "Nguyen et al. 2023: images and WikiText-103", "lower", ("pre",), "loss"),
    )

    @property
    def pieces(self) -> tuple["ValueMemory", "FirstValuePull"]:
        """Values are remembered where they are made, and used on the outputs of heads."""
        return ValueMemory(self.name), FirstValuePull(self.name, self.weight)


@dataclass(frozen=True)
class ValueMemory:
    """Remembers the values of this layer and of the first."""

    name: str
    place: ClassVar[str] = "values"

    def plain(self, V: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return V as it is."""
        first_values(block, rules, V)
        rules.carried[CURRENT] = V
        return V

    deviation = mean_field = plain


@dataclass(frozen=True)
class FirstValuePull:
    """Adds `weight (V_1 - V)` to the outputs of the active heads."""

    name: str
    weight: float
    place: ClassVar[str] = "heads"

    def plain(self, outputs: HeadOutputs, block: Any, rules: Any, inside: Any) -> HeadOutputs:
        """`P V + weight (V_1 - V)`."""
        V, V_1 = rules.carried.pop(CURRENT), rules.carried[FIRST]
        if block.index == 0:
            return outputs
        pull = self.weight * (V_1 - V)  # [batch, head, token, head_width]
        if len(rules.active_heads(block)) < block.arch.heads:
            pull = pull * active(block, rules).to(pull)[:, None, None]
        return outputs + pull.transpose(1, 2)

    def mean_field(self, outputs: Any, block: Any, rules: Any, inside: Any) -> Any:
        """`(P - weight) C (P - weight)^T + weight^2 C_1`, of covariances of V and V_1, for every draw of P."""
        C, C_1 = rules.carried.pop(CURRENT)[:, None, None], rules.carried[FIRST][:, None, None]
        if block.index == 0:
            return outputs
        crossed = self.weight * (rules.patterns @ C)
        pull = self.weight**2 * (C + C_1) - crossed - crossed.mT
        return outputs + pull * active(block, rules).to(pull)[:, None, None]

    def deviation(self, outputs: Any, block: Any, rules: Any, inside: Any) -> Any:
        """The outputs of all heads, plus `weight (V_1 - V)` at active ones: common values x and deviations R alike."""
        V, V_1 = rules.carried.pop(CURRENT), rules.carried[FIRST]
        if block.index == 0:
            return outputs
        weight = self.weight * active(block, rules).to(V.x.log)
        x, R = (_combined(v_1, v, weight, -weight) for v_1, v in ((V_1.x, V.x), (V_1.R, V.R)))
        return replace(outputs, x=outputs.x + x, R=outputs.R + R)


def active(block: Any, rules: Any) -> Tensor:
    """Return `[head]`, True at heads that are active in this layer."""
    heads = torch.zeros(block.arch.heads, dtype=torch.bool)
    heads[list(rules.active_heads(block))] = True
    return heads


def _combined(one: Any, other: Any, a: Tensor, b: Tensor) -> Any:
    """`a one + b other` of scaled tensors, numbers of all heads or one of each; zeros do not set the scale."""

    def weighed(part: Any, number: Tensor) -> Any:
        shaped = number.reshape(-1, *[1] * (part.value.ndim - 2))
        return part.mapped(lambda v: v * shaped).normalised()

    return weighed(one, a) + weighed(other, b)
