"""The residual and mu, absolute and relative, of states on a CPU, where for small ones calling the metrics
costs more than computing them.

    ||X||_F, ||X||_{1,inf}, ||res X||_F, ||res X||_{1,inf}

are all that they ask of tokens. So these sizes are taken of each state, some samples at a time in room that
stays in the processor's cache, and what the metrics make of them is computed for all layers together, when it
is asked for. It is what they say of each state alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.metrics import METRICS, Metric, Reading
from rankscope.metrics.tokens import Tokens, unit_of
from rankscope.profiles.rows import Found

PIECE = 2**16
"""Entries of samples whose sizes are taken together: a megabyte of room."""
MOST = 2**20
"""Entries of a sample up to which it is done so."""
KNOWN = tuple(METRICS[name] for name in ("residual", "relative_residual", "mu", "relative_mu"))
NAMES = (
    ("vector norm", "frobenius norm"),
    ("composite norm",),
    ("frobenius norm of the residual about the mean",),
    ("composite norm of the residual about the mean",),
)
"""As tokens remember them."""


def suffices(metrics: Sequence[Metric]) -> bool:
    """Whether the metrics of tokens among these ask for nothing else."""
    asked = [each for each in metrics if each.of == "tokens"]
    return bool(asked) and all(any(each is known for known in KNOWN) for each in asked)


@dataclass
class Sizes:
    """Of the states of one call."""

    real: Tensor
    """Which tokens count `[batch, token]`."""
    whole: bool
    """Whether all are known to."""
    unit: float
    """The eps of the arithmetic that made them."""
    found: list[tuple[tuple[int, ...], torch.Size, torch.dtype, list[Tensor]]] = field(default_factory=list)
    """(layers, their states' shape and dtype, every sample's Frobenius norm, largest column and row sum, and
    those of its residual)."""
    room: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = self.whole or bool(self.real.all())
        self.number = self.real.sum(-1)

    def take(self, layers: Sequence[int], states: Sequence[Tensor]) -> bool:
        """Note the sizes of states of one shape and dtype; False where some leave float64's range, or are no
        numbers."""
        first, *others = states
        state = torch.cat([first, *others]) if others else first
        real, number = (self.real, self.number) if not others else self._repeated(len(states))
        samples = max(1, PIECE // first[0].numel())
        pieces = zip(*(torch.split(each, samples) for each in (state, real, number)), strict=True)
        found = [sizes for piece in pieces if (sizes := self._taken(*piece)) is not None]
        if sum(len(sizes[0]) for sizes in found) < len(state):
            return False
        sizes = found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]
        self.found.append((tuple(layers), first.shape, first.dtype, sizes))
        return True

    def _repeated(self, states: int) -> tuple[Tensor, Tensor]:
        return self.real.repeat(states, 1), self.number.repeat(states)

    def _taken(self, state: Tensor, real: Tensor, number: Tensor) -> list[Tensor] | None:
        if not self.room or self.room[0].shape != state.shape:
            self.room = [torch.empty(state.shape, dtype=torch.float64) for _ in range(2)]
        X, other = self.room
        X.copy_(state)
        if self.whole:
            x = X.sum(-2).div_(state.shape[1])
        else:
            X.masked_fill_(~real[..., None], 0.0)
            x = X.sum(-2) / number.clamp(min=1)[..., None]
        length = torch.linalg.vector_norm(X, dim=(-2, -1))
        sums = _largest_sums(torch.abs(X, out=other))
        R = torch.sub(X, x[:, None], out=other)
        if not self.whole:
            R.masked_fill_(~real[..., None], 0.0)
        deviation = torch.linalg.vector_norm(R, dim=(-2, -1))
        if unit_of(state.dtype) > unit_of(torch.float64):  # squares of such numbers stay in range
            within = all(map(math.isfinite, length.tolist()))
        else:
            within = all(1e-140 < size < 1e140 for size in (*length.tolist(), *deviation.tolist()))
        return [length, *sums, deviation, *_largest_sums(R.abs_())] if within else None

    def read(self, metrics: Sequence[Metric]) -> list[tuple[int, Found]]:
        """What the metrics say of every state, by layer."""
        asked = [each for each in metrics if each.of == "tokens"]
        read: list[tuple[int, Found]] = []
        for layers, shape, dtype, (length, columns, rows, *of_residual) in self.found:
            deviation, wide, tall = of_residual
            known = length, columns.sqrt() * rows.sqrt(), deviation, wide.sqrt() * tall.sqrt()
            remembered = {name: size for names, size in zip(NAMES, known, strict=True) for name in names}
            nothing = length.new_full((), torch.nan).expand(len(length), *shape[1:])  # no metric looks at it
            ready = Tokens(nothing, *self._repeated(len(layers)), unit_of(dtype), self.whole, remembered)
            found = [each.read(ready, unit=self.unit) for each in asked]
            parts = torch.stack([part for each in found for part in (each.value, each.log10, each.floor)])
            for layer, here in zip(layers, parts.view(-1, len(layers), shape[0]).unbind(1), strict=True):
                each = zip(*[iter(here.unbind())] * 3, strict=True)
                read.append((layer, [(one, Reading(*row)) for one, row in zip(asked, each, strict=True)]))
        return read


def _largest_sums(size: Tensor) -> tuple[Tensor, Tensor]:
    """The largest column sum and the largest row sum."""
    return size.sum(-2).amax(-1), size.sum(-1).amax(-1)
