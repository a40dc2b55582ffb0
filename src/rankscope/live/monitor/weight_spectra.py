"""Measures the spectral norm and the stable rank of a block's weights, which move before some trainings explode.

Of each weight W of a group (`weight_gradients.parameter_groups`), a matrix or a stack of them:

    spectral_norm_GROUP = ||W||_2, the largest of the group
    stable_rank_GROUP   = ||W||_F^2 / ||W||_2^2, the smallest of the group

The norm is found by subspace iteration: `COLUMNS` vectors go through `W^T W` and are made orthonormal again, `FIRST`
times at the first measurement and `LATER` times at later ones, from where the last measurement left them. It approaches
the norm from below, so that a stable rank is never too small. A measurement costs `4 COLUMNS` operations for each entry
of the weights and iteration: of a 1B model two iterations are 64 GFlop, as a forward pass of 32 tokens.
`Monitor` calls `values` when it measures; training is not touched.
"""

import torch
from torch import Tensor

from rankscope.live.monitor import distributed
from rankscope.live.monitor.running_sums import MetricValues
from rankscope.live.monitor.weight_gradients import ParameterGroups, ParameterSlice, SliceKey, counted_once
from rankscope.shapes import Float

COLUMNS, FIRST, LATER = 8, 32, 2


class WeightSpectra:
    """Measures weights of groups again and again, from one measurement's singular vectors to the next one's. Of the
    ranks that have the same blocks, one `counts`."""

    def __init__(self, groups: ParameterGroups, counts: bool = True) -> None:
        self.groups, self.counts = groups, counts
        self._vectors: dict[tuple[SliceKey, tuple[int | None, int | None]], Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names of what is measured."""
        groups = dict.fromkeys(group for _, group in self.groups)
        return [f"{kind}_{group}" for group in groups for kind in ("spectral_norm", "stable_rank")]

    @torch.no_grad()
    def values(self) -> MetricValues:
        """The numbers of every block and group."""
        values = MetricValues()
        for (layer, group), parts in self.groups.items():
            norms, ranks = zip(*(self._measured(part) for part in parts), strict=True)
            for kind, value in (
                ("spectral_norm", torch.stack(norms).amax()),
                ("stable_rank", torch.stack(ranks).amin()),
            ):
                values.add(layer, f"{kind}_{group}", counted_once(value, self.counts))
        return values

    def _measured(self, part: ParameterSlice) -> tuple[Tensor, Tensor]:
        """(The largest spectral norm, the smallest stable rank) of one slice."""
        W, key = matrices(part), (part.key, part.outputs)
        V = self._vectors.get(key)
        again = V is not None and V.shape[:-1] == (*W.shape[:-2], W.shape[-1])
        norm, self._vectors[key] = spectral_norms(W, V if again else None, LATER if again else FIRST)
        square = W.square().sum((-2, -1)).double()
        rank = torch.where(norm > 0, square / norm.square(), 0.0)
        return norm.amax(), rank.amin()


def matrices(part: ParameterSlice) -> Float[Tensor, "... output input"]:
    """The matrix of a slice, or the stack of matrices, outputs in its rows, in float32 or wider."""
    W = distributed.full_tensor(part.weight.detach())
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    if W.ndim > 2 or part.outputs == (None, None):
        return W
    rows = W if part.axis == 0 else W.mT
    return rows.reshape(part.heads, -1, rows.shape[-1])[:, slice(*part.outputs)].reshape(-1, rows.shape[-1])


def spectral_norms(
    W: Float[Tensor, "... output input"], V: Float[Tensor, "... input vector"] | None = None, iterations: int = FIRST
) -> tuple[Float[Tensor, "..."], Float[Tensor, "... input vector"]]:
    """(The spectral norm of each matrix, from below; vectors to go on from).

    Args:
        W: Matrices.
        V: Orthonormal vectors of an earlier call; drawn at random if left out.
        iterations: How often vectors go through `W^T W`.

    >>> norm, V = spectral_norms(torch.diag(torch.tensor([3.0, 1.0, 0.5])))
    >>> round(float(norm), 5), V.shape
    (3.0, torch.Size([3, 3]))
    """
    if V is None:
        count = min(COLUMNS, *W.shape[-2:])
        generator = torch.Generator().manual_seed(0)
        V = torch.randn(*W.shape[:-2], W.shape[-1], count, generator=generator).to(W)
        V = torch.linalg.qr(V).Q
    for _ in range(iterations):
        V = torch.linalg.qr(W.mT @ (W @ V)).Q
    stretched = (W @ V).double()
    squares = torch.linalg.eigvalsh(stretched.mT @ stretched)[..., -1]  # of few rows: quicker than singular values
    return squares.clamp(min=0.0).sqrt(), V
