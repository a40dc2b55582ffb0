"""DeepNorm and lambda-skip: skips with a weight of their own.

Lambda-skip (Joseph et al. 2024) is a weight on the skip around attention. DeepNorm (Wang et al. 2022): heavier skips,
and lighter weights of branches at the start.

    X <- norm(a X + branch(X)),    a = (2L)^(1/4),    L the depth

and weights and biases of values, outputs and the MLP divided by `(8L)^(1/4)`, once, when it is put on. Of a gated MLP
the matrix that goes through the activation is divided and the one beside it is not, as in the published code. A decoder
that reads an encoder has `(3L)^(1/4)` and `(12L)^(1/4)`; the encoder that it reads, which is published with numbers of
both depths, knows its own alone and is taken as one without decoder. Nothing of it is trained: it is its skip weight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.remedies.base import HALF, Claim, NamedRemedy, TheoryNote


@dataclass(frozen=True)
class DeepNorm(NamedRemedy):
    """Skips of weight `(2L)^(1/4)` in a post-norm network, branches divided by `(8L)^(1/4)` at the start."""

    name: ClassVar[str] = "deepnorm"
    formula: ClassVar[str] = "skips of weight (2L)^(1/4), branches divided by (8L)^(1/4) at the start; post-norm"
    citation: ClassVar[str] = "Wang et al. 2022"
    family: ClassVar[Any] = "branches"
    sets_skip: ClassVar[bool] = True
    theory = TheoryNote(
        3,
        "The branch has weight (8L)^(-1/2) beside a skip of (2L)^(1/4): updates are bounded at any depth. "
        "Without skips a common factor.",
        "Wang et al. 2022",
        "(8L)^(-1/2) (2L)^(-1/4)",
        lambda depth: (8 * depth) ** -0.5 * (2 * depth) ** -0.25,
    )
    claims = (
        Claim(
            "post-norm networks of any depth keep tokens apart",
            "Wang et al. 2022: 1000 layers train",
            "deeper",
            ("post",),
        ),
        Claim("deep post-norm networks learn", "Wang et al. 2022: 1000 layers train", "learns", ("post",)),
    )

    def applied(self, arch: Any) -> Any:
        """Return the architecture with both skips set."""
        if arch.norm_place != "post" or arch.norm == "none":
            got = f"norm_place {arch.norm_place!r}, norm {getattr(arch.norm, 'name', arch.norm)!r}"
            sentence = f"{self.name} weighs skips under a norm: norm_place must be 'post', with a norm"
            raise ArchitectureError(f"{sentence}; got {got}", subject="norm_place")
        weight = ((3 if arch.cross_attention else 2) * arch.layers) ** 0.25
        if arch.attention_skip == weight:
            raise ArchitectureError(f"{self.name} divides weights and goes on once; it is on", subject="remedy")
        return arch.replace(attention_skip=weight, mlp_skip=1.0 if arch.parallel else weight)

    def tensors(self, arch: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with values, outputs and the MLP divided; those that layers share stay shared."""
        divisor, quotients = ((12 if arch.cross_attention else 8) * arch.layers) ** 0.25, dict[int, Tensor]()
        tensors = dict(state)
        for name, tensor in state.items():
            module, _, part = name.rpartition(".")[0].rpartition(".")
            first = "gate" if f"{module}.gate.weight" in state else "up"
            if part in ("value", "output", "down") or (part == first and not module.endswith(".attention")):
                tensors[name] = quotients.setdefault(id(tensor), tensor / divisor)
        return tensors


@dataclass(frozen=True)
class LambdaSkip(NamedRemedy):
    """The skip around attention has a weight. What could be read of the publication names no number: 2 is ours."""

    weight: float = 2.0
    name: ClassVar[str] = "lambda"
    formula: ClassVar[str] = "the skip around attention has this weight, lambda in the paper"
    citation: ClassVar[str] = "Joseph et al. 2024"
    family: ClassVar[Any] = "branches"
    zero: ClassVar[dict[str, float]] = {"weight": 1.0}
    sets_skip: ClassVar[bool] = True
    theory = TheoryNote(
        3,
        "Beside a skip of weight lambda attention's branch weighs 1/lambda: the fall is slower, and stays "
        "exponential. Without skips there is nothing to weigh.",
        "Joseph et al. 2024; derived here",
        *HALF,
    )
    claims = (
        Claim(
            "a heavier skip keeps tokens apart", "Joseph et al. 2024: collapse is prevented", "deeper", ("post", "pre")
        ),
    )

    def applied(self, arch: Any) -> Any:
        """Return the architecture with its `attention_skip` set."""
        return arch.replace(attention_skip=self.weight)
