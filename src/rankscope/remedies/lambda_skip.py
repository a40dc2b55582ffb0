"""Lambda-skip (Joseph et al. 2024): a weight on the skip around attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote


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
        "1/2",
        lambda depth: 0.5,
    )
    claims = (
        Claim(
            "a heavier skip keeps tokens apart", "Joseph et al. 2024: collapse is prevented", "deeper", ("post", "pre")
        ),
    )

    def applied(self, arch: Any) -> Any:
        """Return the architecture with its `attention_skip` set."""
        return arch.replace(attention_skip=self.weight)
