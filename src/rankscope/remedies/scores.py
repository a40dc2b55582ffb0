"""Temperature by length (Chen et al. 2026), the architecture's `log_gain`, and Sinkhorn attention (Sander et al. 2022),
the kernel `sinkhorn:rounds` (`nets/kernels.py`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rankscope.errors import ArchitectureError, require
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
        sentence = f"gamma of logn must be a number > 0; got {self.gamma!r}"
        require(self.gamma > 0, sentence, ArchitectureError, "gamma")
        return arch.replace(log_gain=self.gamma)


@dataclass(frozen=True)
class Sinkhorn(NamedRemedy):
    """Rounds in which columns of attention, then rows, are divided by their sums.

    The published code counts half-steps, `2 rounds + 1`, and lets padded rows take part in the sums of
    columns; here only valid tokens do. Published networks have the complete mask. Under another one weights
    stay within it, but sums of columns are over later tokens too: under a causal mask the output of a token
    depends on tokens that it does not see, so such a network cannot be trained to predict the next one.
    There the rounds drive P to the identity, slowly."""

    rounds: int = 1
    name: ClassVar[str] = "sinkhorn"
    formula: ClassVar[str] = "columns and rows of attention are divided by their sums in turn"
    citation: ClassVar[str] = "Sander et al. 2022"
    family: ClassVar[Any] = "scores"
    zero: ClassVar[dict[str, float]] = {"rounds": 0}
    theory = TheoryNote(
        3,
        "Dividing columns adds to scores what depends on j alone, which is common to all rows: the law "
        "is softmax's, doubly exponential.",
        "Lapenna et al. 2026 (abstract); derived here",
    )
    claims = (
        Claim("without skips it collapses doubly exponentially as well", "Lapenna et al. 2026 (abstract)", "order"),
        Claim("but more slowly than softmax attention", "Lapenna et al. 2026 (abstract)", "slower"),
    )

    def applied(self, arch: Any) -> Any:
        """Return the architecture with the kernel `sinkhorn:rounds`."""
        takes = arch.kernel == "softmax" or arch.sinkhorn_rounds is not None
        sentence = f"sinkhorn goes onto softmax attention; got kernel {arch.kernel!r}"
        require(takes, f"{sentence}: take net.variant(kernel='softmax') first", ArchitectureError, "kernel")
        return arch.replace(kernel=f"sinkhorn:{self.rounds}")
