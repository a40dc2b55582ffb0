"""Measures the spectral norm and the stable rank of a block's weights, which move before some trainings explode.

Of each weight W of a group (`weight_gradients.parameter_groups`), a matrix or a stack of them, as the block applies it
(parametrized, and with adapters merged):

    spectral_norm_GROUP = ||W||_2, the largest of the group
    stable_rank_GROUP   = ||W||_F^2 / ||W||_2^2, the smallest of the group

Of a weight with NaN or infinity both are NaN. A group is one of trained weights; a weight `[width, head, d_head]` of
attention is one matrix, of all heads, and so is a convolution of kernel 1.
The norm is found by subspace iteration: `COLUMNS` vectors go through `W^T W` and are made orthonormal again, `FIRST`
times at the first measurement and `LATER` times at later ones, from where the last measurement left them. It approaches
the norm from below, so that a stable rank is never too small. A measurement costs `4 COLUMNS` operations for each entry
of the weights and iteration: of a 1B model two iterations are 64 GFlop, as a forward pass of 32 tokens.
Training is not touched.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from rankscope.live import isolated, processes
from rankscope.monitor.weight_gradients import Group, ParameterSlice, Place, WeightInstrument
from rankscope.shapes import Float

COLUMNS, FIRST, LATER = 8, 32, 2


class WeightSpectra(WeightInstrument):
    """Measures weights of groups again and again, from one measurement's singular vectors to the next one's."""

    name, subject, applied = "spectra", "spectra of weights are", True
    kinds = ("spectral_norm", "stable_rank")

    def attach(self) -> None:
        """Find the weights of each group."""
        super().attach()
        # Of each stack, by number of the block, group and index in the group.
        self._vectors: list[dict[str, Tensor]] = [{} for _ in self.groups]

    def read_group(self, stack: str, place: Place, parts: list[ParameterSlice]) -> tuple[Tensor, ...]:
        """The largest spectral norm and the smallest stable rank."""
        vectors, (block_number, group) = self._vectors[list(self.groups).index(stack)], place
        named = [(vectors, f"{block_number} {group} {k}", part, group) for k, part in enumerate(parts)]
        norms, ranks = zip(*itertools.starmap(_measured, named), strict=True)
        return torch.stack(norms).amax(), torch.stack(ranks).amin()

    def state_dict(self) -> dict[str, list[dict[str, Tensor]]]:
        """The vectors from which the next measurement goes on, of this pipeline stage."""
        return {str(self.monitor.stage.first_block): [dict(vectors) for vectors in self._vectors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; begin anew if that is nothing."""
        vectors = state.get(str(self.monitor.stage.first_block), [{}] * len(self._vectors))
        self._vectors = [dict(of_stack) for of_stack in vectors]


def _measured(vectors: dict[str, Tensor], name: str, part: ParameterSlice, group: Group) -> tuple[Tensor, Tensor]:
    """(The largest spectral norm, the smallest stable rank) of one slice; its vectors are kept under its name."""
    with isolated(next(part.owner.parameters()).device):
        W, V = matrices(part, processes.full_tensor(part.applied), group), vectors.get(name)
        start = V.to(W) if V is not None and V.shape[:-1] == (*W.shape[:-2], W.shape[-1]) else None
        norm, vectors[name] = spectral_norms(W, start, FIRST if start is None else LATER)
        size = torch.linalg.matrix_norm(W, dtype=torch.float64)
        rank = torch.where(norm > 0, (size / norm).square(), torch.where(norm == 0, 0.0, torch.nan))
        return norm.amax(), rank.amin()


def matrices(part: ParameterSlice, weight: Tensor, group: Group) -> Float[Tensor, "... output input"]:
    """The matrix of a slice, or the stack of matrices, outputs in its rows, in float32 or wider.

    Args:
        part: The slice.
        weight: The weight that the module of the slice applies.
        group: Whether it is of attention, where three axes are those of one matrix.
    """
    W = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if isinstance(part.owner, _ConvNd):
        W = torch.block_diag(*W.flatten(1).chunk(part.owner.groups))  # type: ignore[no-untyped-call]
    if W.ndim == 3 and group != "mlp":  # the axis of the width is as long as both others together
        for axis, length in enumerate(W.shape):
            if length**2 == W[0].numel() * len(W):
                return W.movedim(axis, 0).flatten(1)
    if W.ndim > 2 or part.outputs == (None, None):
        return W
    rows = W if part.axis == 0 else W.mT
    return rows.reshape(part.heads, -1, rows.shape[-1])[:, slice(*part.outputs)].reshape(-1, rows.shape[-1])


def spectral_norms(
    W: Float[Tensor, "... output input"], V: Float[Tensor, "... input vector"] | None = None, iterations: int = FIRST
) -> tuple[Float[Tensor, "..."], Float[Tensor, "... input vector"]]:
    """(The spectral norm of each matrix, from below, or NaN if an entry is no number; vectors to go on from).

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
    finite = W.isfinite().all(-1).all(-1)[..., None, None]
    W = torch.where(finite, W, 0.0)
    largest = torch.linalg.vector_norm(W, torch.inf, (-2, -1), keepdim=True)
    W, start = W / torch.where(largest > 0, largest, 1.0), V  # else `W^T W` of large and of tiny weights is no number
    for _ in range(iterations):
        V = torch.linalg.qr(W.mT @ (W @ V)).Q
    stretched = (W @ V).double()
    squares = torch.linalg.eigvalsh(stretched.mT @ stretched)[..., -1]  # of few rows: quicker than singular values
    norms = squares.clamp(min=0.0).sqrt() * largest[..., 0, 0]
    return torch.where(finite[..., 0, 0], norms, torch.nan), torch.where(finite & (largest > 0), V, start)
