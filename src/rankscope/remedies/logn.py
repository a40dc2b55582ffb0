"""Temperature by length (Chen et al. 2026): the architecture's `log_gain`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rankscope.errors import ArchitectureError
from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote


@dataclass(frozen=True)
class LogN(NamedRemedy):
    """Scores times `gamma ln n`, n the valid tokens of a sample."""

    gamma: float = 1.0
    name: ClassVar[str] = "logn"
    formula: ClassVar[str] = "scores are multiplied by gamma ln n"
    citation: ClassVar[str] = "Chen et al. 2026"
    family: ClassVar[Any] = "scores"
    theory = TheoryNote(
        3,
        "A factor on scores sharpens attention while tokens differ, and is a constant in front of r^3 "
        "once they do not. In their model tokens contract where gamma < 1 / (1 - rho), rho their cosine.",
        "Chen et al. 2026 (abstract); order derived here",
    )
    claims = (
        Claim(
            "a temperature of ln n keeps tokens apart for more layers",
            "Chen et al. 2026 (abstract): no contraction above a critical gamma",
            "deeper",
            ("post", "pre"),
        ),
    )

    def applied(self, arch: Any) -> Any:
        """Return the architecture with its `log_gain` set."""
        if not self.gamma > 0:
            raise ArchitectureError(f"gamma of logn must be a number > 0; got {self.gamma!r}", subject="gamma")
        return arch.replace(log_gain=self.gamma)
