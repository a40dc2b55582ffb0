"""Remedies that change how scores become weights: fields of the architecture, nothing that is trained."""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from rankscope.errors import ArchitectureError
from rankscope.nets.fields import Fields
from rankscope.nets.remedies.remedy import Built

Arch = TypeVar("Arch", bound=Fields)


@dataclass(frozen=True)
class Sinkhorn(Built):
    """Sinkhorn attention (Sander et al. 2022): so many rounds in which columns, then rows, are divided by
    their sums. The published code counts half-steps, `2 rounds + 1`, and lets padded rows take part in the
    sums of columns; here only real tokens do. Published networks have the complete mask. Under another
    one weights stay within it, but sums of columns are over later tokens too: under a causal mask what a
    token says depends on tokens that it does not see, so such a network cannot be trained to predict the
    next one. There the rounds drive P to the identity, slowly."""

    rounds: int = 1
    name: ClassVar[str] = "sinkhorn"
    says: ClassVar[str] = "columns and rows of attention are divided by their sums in turn"
    source: ClassVar[str] = "Sander et al. 2022"
    zero: ClassVar[dict[str, float]] = {"rounds": 0}

    def applied(self, arch: Arch) -> Arch:
        """The kernel `sinkhorn:rounds`."""
        if arch.kernel != "softmax" and arch.sinkhorn_rounds is None:
            raise ArchitectureError(
                f"sinkhorn goes onto softmax attention; got kernel {arch.kernel!r}: take "
                "net.variant(kernel='softmax') first"
            )
        replaced: Arch = arch.replace(kernel=f"sinkhorn:{self.rounds}")  # type: ignore[attr-defined]
        return replaced


@dataclass(frozen=True)
class LogN(Built):
    """Temperature by length: scores times `gamma ln n`, n the real tokens of a sample."""

    gamma: float = 1.0
    name: ClassVar[str] = "logn"
    says: ClassVar[str] = "scores are multiplied by gamma ln n"
    source: ClassVar[str] = "Chen et al. 2026"

    def applied(self, arch: Arch) -> Arch:
        """The field `log_gain`."""
        if not self.gamma > 0:
            raise ArchitectureError(f"gamma of logn must be a number > 0; got {self.gamma!r}")
        replaced: Arch = arch.replace(log_gain=self.gamma)  # type: ignore[attr-defined]
        return replaced
