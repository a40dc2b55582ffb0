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
    """(layers, their states' shape and dtype, the Frobenius norms, largest column sums and largest row sums
    `[2, layer, batch]` of X and of its residual)."""
    room: Tensor | None = None

    def __post_init__(self) -> None:
        self.whole = self.whole or bool(self.real.all())

    def take(self, layers: Sequence[int], states: Sequence[Tensor]) -> bool:
        """Note the sizes of states of one shape and dtype; False where some leave float64's range, or are no
        numbers."""
        shape, dtype = states[0].shape, states[0].dtype
        if several := PIECE // shape.numel():
            found = [self._taken(states[k : k + several], self.real) for k in range(0, len(states), several)]
        else:
            samples = max(1, PIECE // shape[1:].numel())
            pieces = zip(*(torch.split(each, samples) for each in (self.real, *states)), strict=True)
            found = [self._taken(parts, real) for real, *parts in pieces]
        sizes = (
            found[0]
            if len(found) == 1
            else [torch.cat(each, 1 if several else 2) for each in zip(*found, strict=True)]
        )
        length, deviation = sizes[0].flatten(1).tolist()
        if dtype != torch.float64:  # squares of such numbers stay in range
            within = all(map(math.isfinite, length))
        else:
            within = all(1e-140 < size < 1e140 for size in (*length, *deviation))
        if within:
            self.found.append((tuple(layers), shape, dtype, sizes))
        return within

    def _taken(self, states: Sequence[Tensor], real: Tensor) -> list[Tensor]:
        shape = torch.Size((2, len(states), *states[0].shape))
        if self.room is None or len(self.room) < shape.numel():
            self.room = torch.empty(shape.numel(), dtype=torch.float64)
        both = self.room[: shape.numel()].view(shape)  # side by side, X and its residual are sized in one go
        X, R = both.unbind()
        for to, state in zip(X.unbind(), states, strict=True):
            to.copy_(state)
        if self.whole:
            torch.sub(X, X.mean(-2, keepdim=True), out=R)
        else:
            hidden = ~real[..., None]
            X.masked_fill_(hidden, 0.0)
            torch.sub(X, X.sum(-2, keepdim=True) / real.sum(-1).clamp(min=1)[:, None, None], out=R)
            R.masked_fill_(hidden, 0.0)
        norms = torch.linalg.vector_norm(both, dim=(-2, -1))
        both.abs_()
        return [norms, both.sum(-2).amax(-1), both.sum(-1).amax(-1)]

    def read(self, metrics: Sequence[Metric]) -> list[tuple[int, Found]]:
        """What the metrics say of every state, by layer."""
        asked = [each for each in metrics if each.of == "tokens"]
        read: list[tuple[int, Found]] = []
        for layers, shape, dtype, sizes in self.found:
            norms, columns, rows = (each.flatten(1) for each in sizes)
            composite = columns.sqrt() * rows.sqrt()
            known = norms[0], composite[0], norms[1], composite[1]
            remembered = {name: size for names, size in zip(NAMES, known, strict=True) for name in names}
            nothing = norms.new_full((), torch.nan).expand(
                norms.shape[1], *shape[1:]
            )  # no metric looks at it
            real = self.real.repeat(len(layers), 1)
            ready = Tokens(nothing, real, real.sum(-1), unit_of(dtype), self.whole, remembered)
            found = [each.read(ready, unit=self.unit) for each in asked]
            parts = torch.stack([part for each in found for part in (each.value, each.log10, each.floor)])
            for layer, here in zip(layers, parts.view(-1, len(layers), shape[0]).unbind(1), strict=True):
                each = zip(*[iter(here.unbind())] * 3, strict=True)
                read.append((layer, [(one, Reading(*row)) for one, row in zip(asked, each, strict=True)]))
        return read
