"""Sinkhorn attention (Sander et al. 2022): the kernel `sinkhorn:rounds` (`nets/kernels.py`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rankscope.errors import ArchitectureError
from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote


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
        if arch.kernel != "softmax" and arch.sinkhorn_rounds is None:
            sentence = f"sinkhorn goes onto softmax attention; got kernel {arch.kernel!r}"
            raise ArchitectureError(f"{sentence}: take net.variant(kernel='softmax') first", subject="kernel")
        return arch.replace(kernel=f"sinkhorn:{self.rounds}")
