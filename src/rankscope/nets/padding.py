"""Padding wherever it stands: real tokens first, and back again.

Masks and positions count tokens from the first real one. Where padding stands to the left or in between, the
real tokens are moved to the front for the run, and what comes out is put back in its place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.shapes import Bool, Float, Int, Shaped


@dataclass(frozen=True)
class TokenOrder:
    """A permutation of the tokens of each sample."""

    forth: Int[Tensor, "batch token"]
    back: Int[Tensor, "batch token"]

    @classmethod
    def of(cls, real: Bool[Tensor, "batch token"]) -> "TokenOrder | None":
        """Real tokens first, otherwise in the order they have; None where they already are."""
        if bool((real[:, 1:] <= real[:, :-1]).all()):
            return None
        forth = (~real).to(torch.int8).argsort(dim=-1, stable=True)
        return cls(forth, forth.argsort(dim=-1))

    def sorted(self, X: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The real tokens moved to the front."""
        return X.gather(1, self.forth[..., None].expand_as(X))

    def restored(self, X: Float[Tensor, "batch token ..."]) -> Float[Tensor, "batch token ..."]:
        """Every token back in its place."""
        return X.gather(1, self.back.reshape(*self.back.shape, *[1] * (X.ndim - 2)).expand_as(X))

    def restored_rows(
        self, P: Shaped[Tensor, "batch head token source"]
    ) -> Shaped[Tensor, "batch head token source"]:
        """Rows of attention back in their places; columns are of something else."""
        return P.gather(2, self.back[:, None, :, None].expand_as(P))

    def restored_columns(self, p: Float[Tensor, "batch head token"]) -> Float[Tensor, "batch head token"]:
        """Weights on tokens, back in their places."""
        return p.gather(2, self.back[:, None].expand_as(p))

    def restored_square(
        self, P: Shaped[Tensor, "batch head token token"]
    ) -> Shaped[Tensor, "batch head token token"]:
        """Rows and columns of attention back in their places."""
        rows = P.gather(2, self.back[:, None, :, None].expand_as(P))
        return rows.gather(3, self.back[:, None, None].expand_as(P))
