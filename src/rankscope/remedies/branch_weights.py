"""ReZero, SkipInit, 1/sqrt(L) and LayerNorm scaling: how much of a layer is new, and how much it had before.

| remedy     | what it weighs                              | by                                              |
|------------|---------------------------------------------|-------------------------------------------------|
| `rezero`   | what branches add                           | one number of the layer, trained from 0         |
| `skipinit` | what branches add                           | one of each branch, trained from 0              |
| `sqrtl`    | what branches add                           | `L^(-1/2)`, L the depth                         |
| `lnscale`  | what branches read, after their norm        | `l^(-1/2)`, l the layer, from 1                 |

All four are one part, a `BranchWeight`, at several places. Beside a branch's own norm (a sandwich's second) a
weight on what it adds means nothing: the norm takes it back.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError, require
from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote

BRANCHES = ("attention", "cross", "mlp")


@dataclass(frozen=True)
class BranchWeight:
    """Tokens times a number of the layer, in every arithmetic."""

    name: str
    place: str

    def factor(self, block: Any) -> Any:
        """Return the number of a layer."""
        raise NotImplementedError

    def plain(self, X: Tensor, block: Any, rules: Any, inside: Any) -> Tensor:
        """Multiply every token by the factor of the layer."""
        return X * self.factor(block)

    def deviation(self, state: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Multiply the common token and the deviations."""
        factor = self.factor(block)
        x, R = (part.mapped(lambda v: v * factor).normalised() for part in (state.x, state.R))
        return replace(state, x=x, R=R)

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Multiply covariances by the square of the factor."""
        return C * float(self.factor(block)) ** 2

    closed_form = mean_field

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Multiply every term by the factor of the layer."""
        return terms._replace(parts=terms.parts * self.factor(block))

    def lengthens(self, block: Any) -> float:
        """Return the factor: every term grows by as much."""
        return abs(float(self.factor(block)))


@dataclass(frozen=True)
class TrainedWeight(BranchWeight):
    """The number is one of the part's tensors."""

    tensor: str

    def factor(self, block: Any) -> Tensor:
        """Return the trained tensor of this layer."""
        weight: Tensor = block.weights.parts[self.name][self.tensor]
        return weight


@dataclass(frozen=True)
class PowerWeight(BranchWeight):
    """The number is a power of the depth of the network as it is, or of the layer, counted from 1."""

    power: float
    of_layer: bool

    def factor(self, block: Any) -> float:
        """Return `L^-power`, L the depth, or `l^-power`, l the layer."""
        return float((block.index + 1 if self.of_layer else block.arch.layers) ** -self.power)


class _BranchRemedy(NamedRemedy):
    """What the remedies on what branches add have in common."""

    norms: int  # 0: every norm is taken out, as published; 1: they stay
    family: ClassVar[Any] = "branches"

    def applied(self, arch: Any) -> Any:
        """Return the architecture without norms, or with them where a weight has a meaning."""
        if not self.norms:
            return super().applied(arch.replace(norm="none"))
        if arch.norm_place in ("sandwich", "output") and arch.norm != "none":
            sentence = f"{self.name} weighs what branches add, and the norm on that takes any weight back"
            raise ArchitectureError(f"{sentence}: take norms out, variant(norm=False)", subject="norm_place")
        return super().applied(arch)


@dataclass(frozen=True)
class ReZero(_BranchRemedy):
    """ReZero (Bachlechner et al. 2020): at first a layer is the identity. The published one has no norm."""

    weight: float = 0.0
    norms: int = 0
    name: ClassVar[str] = "rezero"
    formula: ClassVar[str] = "branches times one number of the layer, trained from 0; no norms"
    citation: ClassVar[str] = "Bachlechner et al. 2020"
    zero: ClassVar[dict[str, float]] = {"weight": 1.0, "norms": 1.0}
    theory = TheoryNote(
        None,
        "At its start every layer is the identity: no collapse and no signal through branches, until "
        "the weights leave zero. Without skips nothing at all passes.",
        "Bachlechner et al. 2020",
    )
    claims = (Claim("deep networks learn without norms", "Bachlechner et al. 2020", "learns", ("pre", "post")),)

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start with one number for all branches."""
        return {"weight": _scalar(self.weight)}

    @property
    def pieces(self) -> tuple[TrainedWeight, ...]:
        """One part on each branch, with one number."""
        return tuple(TrainedWeight(self.name, branch, "weight") for branch in BRANCHES)


@dataclass(frozen=True)
class SkipInit(ReZero):
    """SkipInit (De & Smith 2020): as ReZero, with a number of each branch."""

    name: ClassVar[str] = "skipinit"
    formula: ClassVar[str] = "each branch times a number of its own, trained from 0; no norms"
    citation: ClassVar[str] = "De & Smith 2020"
    theory = TheoryNote(None, "As ReZero, with a number for each branch: the identity at the start.", "De & Smith 2020")
    claims = (
        Claim("deep networks learn without norms", "De & Smith 2020 (residual networks)", "learns", ("pre", "post")),
    )

    def initial(self, arch: Any, layer: int, generator: Generator) -> dict[str, Tensor]:
        """Start with a number for each branch that the architecture has."""
        exists = {"attention": True, "cross": arch.cross_attention, "mlp": arch.mlp != "none"}
        return {branch: _scalar(self.weight) for branch in BRANCHES if exists[branch]}

    @property
    def pieces(self) -> tuple[TrainedWeight, ...]:
        """A number of its own on each branch."""
        return tuple(TrainedWeight(self.name, branch, branch) for branch in BRANCHES)


@dataclass(frozen=True)
class SqrtDepth(_BranchRemedy):
    """Branches of weight 1/sqrt(L) (Noci et al. 2022), in the forward pass, not in the weights as drawn
    (`nets/tensors.py` has those). Of a variant L is its own depth."""

    power: float = 0.5
    norms: ClassVar[int] = 1
    name: ClassVar[str] = "sqrtl"
    by_number: ClassVar[bool] = True
    formula: ClassVar[str] = "branches times 1/L^power, L the depth: 1/sqrt(L)"
    citation: ClassVar[str] = "Noci et al. 2022"
    zero: ClassVar[dict[str, float]] = {"power": 0.0}
    theory = TheoryNote(
        3,
        "L branches of weight 1/sqrt(L) add a variance that does not grow with L, so tokens stay apart at "
        "any depth. Without skips a common factor is all it is.",
        "Noci et al. 2022",
        "L^(-1/2)",
        lambda depth: depth**-0.5,
        lambda layer, depth: depth**-0.5,
    )
    claims = (
        Claim(
            "tokens stay apart for more layers",
            "Noci et al. 2022: branches of 1/sqrt(L) keep them",
            "deeper",
            ("post", "pre"),
        ),
        Claim(
            "gradients of the first layer do not vanish at the start",
            "Noci et al. 2022",
            "lasting",
            ("post",),
            "gradient_first_start",
        ),
        Claim("nor do they after training", "Noci et al. 2022", "lasting", ("post",), "gradient_first_end"),
    )

    @property
    def pieces(self) -> tuple[PowerWeight, ...]:
        """One part on each branch, with one power."""
        return tuple(PowerWeight(self.name, branch, self.power, of_layer=False) for branch in BRANCHES)


@dataclass(frozen=True)
class LayerNormScaling(NamedRemedy):
    """LayerNorm scaling (Sun et al. 2025): after gain and bias of both norms of a block, not of the final
    norm, a factor 1/sqrt(l)."""

    power: float = 0.5
    name: ClassVar[str] = "lnscale"
    by_number: ClassVar[bool] = True
    formula: ClassVar[str] = "what branches read, times 1/layer^power: 1/sqrt(layer)"
    citation: ClassVar[str] = "Sun et al. 2025"
    family: ClassVar[Any] = "branches"
    zero: ClassVar[dict[str, float]] = {"power": 0.0}
    theory = TheoryNote(
        3,
        "Branches of a pre-norm network add variance 1/l in layer l: the stream grows as log L in place "
        "of L, and late layers count for less. Without skips a common factor.",
        "Sun et al. 2025",
        layer_weight=lambda layer, depth: layer**-0.5,
    )
    claims = (Claim("a lower perplexity", "Sun et al. 2025: -5 to -8%", "lower", ("pre",), "loss"),)

    def applied(self, arch: Any) -> Any:
        """Return the architecture with it, if its branches read through a norm."""
        sentence = f"{self.name} scales the norms that branches read through: norm_place must be 'pre' or 'sandwich'"
        reads = arch.norm_place not in ("post", "output")
        require(reads, f"{sentence}; got {arch.norm_place!r}", ArchitectureError, "norm_place")
        return super().applied(arch)

    @property
    def pieces(self) -> tuple[PowerWeight, ...]:
        """On what every branch reads."""
        return (PowerWeight(self.name, "read", self.power, of_layer=True),)


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)
