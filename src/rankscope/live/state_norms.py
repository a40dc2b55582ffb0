"""The residual and mu, absolute and relative, of hidden states on a CPU, computed from four norms of each:

    ||X||_F,  ||X||_{1,inf},  ||res X||_F,  ||res X||_{1,inf}

For small states, calling each metric costs more than computing it. So `StateReadings` calls `StateNorms.take`
for states as they come, some samples at a time in a buffer that stays in the processor's cache, and
`readings` when it is asked for the numbers: the metrics are then computed from the norms, for all layers
together. They give what they give of each state alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.metrics import METRICS, Metric, Reading
from rankscope.metrics.tokens import Tokens, unit_of
from rankscope.profiles.readings import Readings

PIECE = 2**16
"""Entries whose norms are taken together: the buffer for them takes a megabyte."""
LARGEST_SAMPLE = 2**20
"""Entries of a sample up to which its norms are taken here."""
SUPPORTED = tuple(METRICS[name] for name in ("residual", "relative_residual", "mu", "relative_mu"))
MEMO_NAMES = (
    ("vector norm", "frobenius norm"),
    ("composite norm",),
    ("frobenius norm of the residual about the mean",),
    ("composite norm of the residual about the mean",),
)
"""The names under which `Tokens.memo` holds each of the four norms."""


def norms_suffice(metrics: Sequence[Metric]) -> bool:
    """True if the metrics of tokens among these can be computed from the four norms."""
    of_tokens = [metric for metric in metrics if metric.of == "tokens"]
    return bool(of_tokens) and all(any(metric is known for known in SUPPORTED) for metric in of_tokens)


class LayerNorms(NamedTuple):
    """Norms of the states of several layers, which have one shape and dtype."""

    layers: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype
    sizes: list[Tensor]
    """Frobenius norms, largest column sums and largest row sums, `[2, layer, batch]` of X and of res X."""


@dataclass
class StateNorms:
    """Norms of the hidden states of one call."""

    valid: Tensor  # [batch, token], False at padding
    all_valid: bool  # there is known to be no padding
    unit: float  # the eps of the arithmetic that the model ran in
    taken: list[LayerNorms] = field(default_factory=list)
    buffer: Tensor | None = None

    def __post_init__(self) -> None:
        self.all_valid = self.all_valid or bool(self.valid.all())

    def take(self, layers: Sequence[int], states: Sequence[Tensor]) -> bool:
        """Take the norms of states of one shape and dtype; False if some leave float64's range or are NaN."""
        shape, dtype = states[0].shape, states[0].dtype
        if several := PIECE // shape.numel():
            pieces = [
                self._norms(states[k : k + several], self.valid) for k in range(0, len(states), several)
            ]
        else:
            samples = max(1, PIECE // shape[1:].numel())
            splits = zip(*(torch.split(x, samples) for x in (self.valid, *states)), strict=True)
            pieces = [self._norms(parts, valid) for valid, *parts in splits]
        sizes = (
            pieces[0]
            if len(pieces) == 1
            else [torch.cat(parts, 1 if several else 2) for parts in zip(*pieces, strict=True)]
        )
        length, deviation = sizes[0].flatten(1).tolist()
        if dtype != torch.float64:  # squares of such numbers stay in range
            within = all(map(math.isfinite, length))
        else:
            within = all(1e-140 < size < 1e140 for size in (*length, *deviation))
        if within:
            self.taken.append(LayerNorms(tuple(layers), shape, dtype, sizes))
        return within

    def _norms(self, states: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
        """The `LayerNorms.sizes` of states, `[2, state, sample]`, taken in one buffer."""
        shape = torch.Size((2, len(states), *states[0].shape))
        if self.buffer is None or len(self.buffer) < shape.numel():
            self.buffer = torch.empty(shape.numel(), dtype=torch.float64)
        both = self.buffer[: shape.numel()].view(shape)  # X and res X side by side, for one call of each norm
        X, R = both.unbind()
        for target, state in zip(X.unbind(), states, strict=True):
            target.copy_(state)
        if self.all_valid:
            torch.sub(X, X.mean(-2, keepdim=True), out=R)
        else:
            padding = ~valid[..., None]
            X.masked_fill_(padding, 0.0)
            torch.sub(X, X.sum(-2, keepdim=True) / valid.sum(-1).clamp(min=1)[:, None, None], out=R)
            R.masked_fill_(padding, 0.0)
        norms = torch.linalg.vector_norm(both, dim=(-2, -1))
        both.abs_()
        return [norms, both.sum(-2).amax(-1), both.sum(-1).amax(-1)]

    def readings(self, metrics: Sequence[Metric]) -> list[tuple[int, Readings]]:
        """(layer, readings) of every state, computed by the metrics from its norms."""
        of_tokens = [metric for metric in metrics if metric.of == "tokens"]
        by_layer: list[tuple[int, Readings]] = []
        for layers, shape, dtype, sizes in self.taken:
            norms, columns, rows = (size.flatten(1) for size in sizes)
            composite = columns.sqrt() * rows.sqrt()
            four = norms[0], composite[0], norms[1], composite[1]
            memo = {name: norm for names, norm in zip(MEMO_NAMES, four, strict=True) for name in names}
            # No metric looks at the entries themselves: the memo has all that is asked of them.
            X = norms.new_full((), torch.nan).expand(norms.shape[1], *shape[1:])
            valid = self.valid.repeat(len(layers), 1)
            tokens = Tokens(X, valid, valid.sum(-1), unit_of(dtype), self.all_valid, memo)
            measured = [metric.read(tokens, unit=self.unit) for metric in of_tokens]
            parts = torch.stack([part for row in measured for part in (row.value, row.log10, row.floor)])
            for layer, numbers in zip(layers, parts.view(-1, len(layers), shape[0]).unbind(1), strict=True):
                triples = zip(*[iter(numbers.unbind())] * 3, strict=True)
                by_layer.append(
                    (layer, [(metric, Reading(*row)) for metric, row in zip(of_tokens, triples, strict=True)])
                )
        return by_layer
