"""Weights of branches and of skips: how much of a layer is new, and how much was there before.

| remedy     | what it weighs                              | by                                              |
|------------|---------------------------------------------|-------------------------------------------------|
| `rezero`   | what branches add                           | one number of the layer, trained from 0         |
| `skipinit` | what branches add                           | one of each branch, trained from 0              |
| `sqrtl`    | what branches add                           | `L^(-1/2)`, L the depth                         |
| `lnscale`  | what branches read, after their norm        | `l^(-1/2)`, l the layer, from 1                 |
| `deepnorm` | both skips, and values, outputs and the MLP | `(2L)^(1/4)`, and `(8L)^(-1/4)`                 |
| `lambda`   | the skip around attention                   | a number                                        |

All but the last two, which are settings, are one part, a `Weight`. Beside a branch's own norm (a sandwich's
second) a weight on what it adds means nothing: the norm takes it back.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets.fields import Fields
from rankscope.nets.parts import Place
from rankscope.nets.remedies.remedy import Arch, Built

BRANCHES: tuple[Place, ...] = ("attention", "cross", "mlp")


@dataclass(frozen=True)
class Weight:
    """Tokens times a number of the layer."""

    name: str
    place: Place

    def number(self, block: Any) -> Any:
        """That number."""
        raise NotImplementedError

    def plain(self, X: Tensor, block: Any, rules: Any, inside: Any) -> Tensor:
        """Every token alike."""
        return X * self.number(block)

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Every term alike."""
        return terms._replace(parts=terms.parts * self.number(block))

    def lengthens(self, block: Any) -> float:
        """Every term by as much."""
        return abs(float(self.number(block)))


@dataclass(frozen=True)
class Trained(Weight):
    """One of the part's tensors."""

    tensor: str

    def number(self, block: Any) -> Tensor:
        """As it is."""
        found: Tensor = block.weights.parts[self.name][self.tensor]
        return found


@dataclass(frozen=True)
class ByDepth(Weight):
    """A power of the depth of the network as it is: a deeper variant has another."""

    power: float

    def number(self, block: Any) -> float:
        """`L^-power`."""
        return float(block.arch.layers**-self.power)


@dataclass(frozen=True)
class ByLayer(Weight):
    """A power of the layer, counted from 1."""

    power: float

    def number(self, block: Any) -> float:
        """`l^-power`."""
        return float((block.index + 1) ** -self.power)


class _Branches(Built):
    """What the remedies on branches have in common."""

    norms: int
    """0: every norm is taken out, as published; 1: they stay."""

    def applied(self, arch: Arch) -> Arch:
        """Without norms, or with them where a weight has a meaning."""
        if not self.norms:
            bare: Arch = arch.replace(norm="none")  # type: ignore[attr-defined]
            return super().applied(bare)
        if arch.norm_place == "sandwich" and arch.norm != "none":
            raise ArchitectureError(
                f"{self.name} weighs what a branch adds, which in this network goes through a norm of its "
                "own (norm_place 'sandwich') that takes any weight back: take norms out, variant(norm=False)"
            )
        return super().applied(arch)


@dataclass(frozen=True)
class ReZero(_Branches):
    """ReZero (Bachlechner et al. 2020): at first a layer is the identity. The published one has no norm."""

    weight: float = 0.0
    norms: int = 0
    name: ClassVar[str] = "rezero"
    says: ClassVar[str] = "branches times one number of the layer, trained from 0; no norms"
    source: ClassVar[str] = "Bachlechner et al. 2020"
    zero: ClassVar[dict[str, float]] = {"weight": 1.0, "norms": 1.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """One for all branches."""
        return {"weight": _number(self.weight)}

    @property
    def pieces(self) -> tuple[Trained, ...]:
        """On each branch the same."""
        return tuple(Trained(self.name, place, "weight") for place in BRANCHES)


@dataclass(frozen=True)
class SkipInit(_Branches):
    """SkipInit (De & Smith 2020): the same with a number of each branch."""

    weight: float = 0.0
    norms: int = 0
    name: ClassVar[str] = "skipinit"
    says: ClassVar[str] = "each branch times a number of its own, trained from 0; no norms"
    source: ClassVar[str] = "De & Smith 2020"
    zero: ClassVar[dict[str, float]] = {"weight": 1.0, "norms": 1.0}

    def initial(self, arch: Fields, layer: int, generator: Generator) -> dict[str, Tensor]:
        """One for each branch."""
        there = {"attention": True, "cross": arch.cross_attention, "mlp": arch.mlp != "none"}
        return {place: _number(self.weight) for place in BRANCHES if there[place]}

    @property
    def pieces(self) -> tuple[Trained, ...]:
        """On each branch its own."""
        return tuple(Trained(self.name, place, place) for place in BRANCHES)


@dataclass(frozen=True)
class SqrtDepth(_Branches):
    """Branches of weight 1/sqrt(L) (Noci et al. 2022), in the forward pass, not in the weights as drawn
    (`initial.py` has those). Of a variant L is its own depth."""

    power: float = 0.5
    norms: ClassVar[int] = 1
    name: ClassVar[str] = "sqrtl"
    says: ClassVar[str] = "branches times 1/L^power, L the depth: 1/sqrt(L)"
    source: ClassVar[str] = "Noci et al. 2022"
    zero: ClassVar[dict[str, float]] = {"power": 0.0}

    @property
    def pieces(self) -> tuple[ByDepth, ...]:
        """On each branch the same."""
        return tuple(ByDepth(self.name, place, self.power) for place in BRANCHES)


@dataclass(frozen=True)
class LayerNormScaling(Built):
    """LayerNorm scaling (Sun et al. 2025): after gain and bias of both norms of a block, not of the final
    norm, a factor 1/sqrt(l)."""

    power: float = 0.5
    name: ClassVar[str] = "lnscale"
    says: ClassVar[str] = "what branches read, times 1/layer^power: 1/sqrt(layer)"
    source: ClassVar[str] = "Sun et al. 2025"
    zero: ClassVar[dict[str, float]] = {"power": 0.0}

    def applied(self, arch: Arch) -> Arch:
        """Of networks whose branches read through a norm."""
        if arch.norm_place == "post":
            raise ArchitectureError(
                f"{self.name} scales the norms that branches read through: norm_place must be 'pre' or "
                f"'sandwich'; got {arch.norm_place!r}"
            )
        return super().applied(arch)

    @property
    def pieces(self) -> tuple[ByLayer, ...]:
        """On what every branch reads."""
        return (ByLayer(self.name, "read", self.power),)


@dataclass(frozen=True)
class DeepNorm(Built):
    """DeepNorm (Wang et al. 2022): `X <- norm(a X + branch(X))` with `a = (2L)^(1/4)`, and weights and biases
    of values, outputs and the MLP divided by `(8L)^(1/4)`, once, when it is put on. Of a gated MLP the matrix
    that goes through the activation is divided and the one beside it is not, as in the published code. A
    decoder that reads an encoder has `(3L)^(1/4)` and `(12L)^(1/4)`; the encoder that it reads, which is
    published with numbers of both depths, knows its own alone and is taken as one without decoder. Nothing of
    it is trained: it is its skip weight."""

    name: ClassVar[str] = "deepnorm"
    says: ClassVar[str] = "skips of weight (2L)^(1/4), branches divided by (8L)^(1/4) at the start; post-norm"
    source: ClassVar[str] = "Wang et al. 2022"

    def applied(self, arch: Arch) -> Arch:
        """Both skips."""
        if arch.norm_place != "post" or arch.norm == "none":
            raise ArchitectureError(
                f"{self.name} weighs skips under a norm: norm_place must be 'post', with a norm; got "
                f"norm_place {arch.norm_place!r}, norm {getattr(arch.norm, 'name', arch.norm)!r}"
            )
        weight = ((3 if arch.cross_attention else 2) * arch.layers) ** 0.25
        if arch.attention_skip == weight:
            raise ArchitectureError(f"{self.name} is put on once, for it divides weights; it is on already")
        skips = {"attention_skip": weight, "mlp_skip": 1.0 if arch.parallel else weight}
        found: Arch = arch.replace(**skips)  # type: ignore[attr-defined]
        return found

    def tensors(self, arch: Fields, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values, outputs and the MLP, divided."""
        divisor, divided = ((12 if arch.cross_attention else 8) * arch.layers) ** 0.25, dict[int, Tensor]()

        def concerns(name: str) -> bool:
            first = "gate" if f"{name.rsplit('.', 2)[0]}.gate.weight" in state else "up"
            part = name.rsplit(".", 2)[-2]
            return part in ("value", "output", "down") or (part == first and ".attention." not in name)

        return {
            name: _once(divided, tensor, divisor) if "." in name and concerns(name) else tensor
            for name, tensor in state.items()
        }


@dataclass(frozen=True)
class LambdaSkip(Built):
    """Lambda-skip (Joseph et al. 2024): the skip around attention has a weight. What could be read of the
    publication names no number: 2 is ours."""

    weight: float = 2.0
    name: ClassVar[str] = "lambda"
    says: ClassVar[str] = "the skip around attention has this weight, lambda in the paper"
    source: ClassVar[str] = "Joseph et al. 2024"
    zero: ClassVar[dict[str, float]] = {"weight": 1.0}

    def applied(self, arch: Arch) -> Arch:
        """The field that the architecture has for it."""
        found: Arch = arch.replace(attention_skip=self.weight)  # type: ignore[attr-defined]
        return found


def _once(divided: dict[int, Tensor], tensor: Tensor, divisor: float) -> Tensor:
    """A tensor over the divisor; one that several layers share stays shared."""
    return (
        divided.setdefault(id(tensor), tensor / divisor) if id(tensor) not in divided else divided[id(tensor)]
    )


def _number(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)
