"""What the theorems need to know of the weights: norms of each head's matrices, Lipschitz constants of MLPs.

Row vectors: a token x becomes `x W`. `||W||_1` is the largest column sum of |W|, `||W||_inf` the largest row
sum, `||W||_2` the largest singular value.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.nets import Architecture
from rankscope.nets.order import speaking
from rankscope.nets.weights import Layer

LIPSCHITZ = {
    "gelu": 1.12891,
    "gelu_tanh": 1.12901,
    "quick_gelu": 1.09985,
    "relu": 1.0,
    "silu": 1.09984,
    "tanh": 1.0,
    "identity": 1.0,
}
"""The largest slope of each activation, rounded up in its last digit."""

PerHead = Float[Tensor, " head"]


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the heads of one layer that speak."""

    scores: PerHead
    """`||W_QK,h||_1`, `W_QK = W_Q W_K^T`; 0 where attention does not look at tokens (uniform)."""
    columns: PerHead
    """`||W_h||_1`, `W_h = W_V,h W_O,h`."""
    rows: PerHead
    """`||W_h||_inf`."""
    spectral: PerHead
    """`||W_h||_2`."""

    @classmethod
    def of(cls, arch: Architecture, index: int, layer: Layer) -> "HeadNorms":
        """Of layer `index` (0-based)."""
        w, kept = layer.attention, speaking(arch, index)
        group = arch.heads // arch.key_heads
        found = torch.zeros(4, len(kept), dtype=torch.float64)
        for place, head in enumerate(kept):
            value, output = w.value.weight[:, head // group].double(), w.output.weight[head].double()
            W = value @ output
            if arch.kernel != "uniform":
                QK = w.query.weight[:, head].double() @ w.key.weight[:, head // group].double().mT
                found[0, place] = QK.abs().sum(0).max()
            found[1, place], found[2, place] = W.abs().sum(0).max(), W.abs().sum(1).max()
            found[3, place] = product_norm(value, output)
        return cls(*found)


def spectral_norm(W: Float[Tensor, "rows columns"]) -> float:
    """`||W||_2` from the smaller Gram matrix: to full precision, at a fraction of a decomposition's cost."""
    size = float(W.abs().max()) if W.numel() else 0.0
    if size == 0.0:
        return 0.0
    W = W / size
    gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
    return size * float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0.0).sqrt())


def product_norm(A: Float[Tensor, "width inner"], B: Float[Tensor, "inner width"]) -> float:
    """`||A B||_2` from the triangles of both, of the size of the inner width."""
    left, right = torch.linalg.qr(A, mode="r").R, torch.linalg.qr(B.mT, mode="r").R
    return spectral_norm(left @ right.mT)


def value_matrix(arch: Architecture, layer: Layer, head: int) -> Float[Tensor, "width width"]:
    """`W_h = W_V,h W_O,h`."""
    w, group = layer.attention, arch.heads // arch.key_heads
    return w.value.weight[:, head // group].double() @ w.output.weight[head].double()


@dataclass(frozen=True)
class MLPNorms:
    """A plain MLP does not stretch differences by more: in column sums, row sums and 2-norms."""

    columns: float
    rows: float
    spectral: float

    @classmethod
    def of(cls, arch: Architecture, layer: Layer) -> "MLPNorms":
        """`Lip(act) ||W_1|| ||W_2||`; infinite for a gated MLP, a product of two functions of the token."""
        w = layer.mlp
        if w is None:
            return cls(0.0, 0.0, 0.0)
        if w.gate is not None:
            return cls(torch.inf, torch.inf, torch.inf)
        up, down, slope = w.up.weight.double(), w.down.weight.double(), LIPSCHITZ[arch.activation]
        return cls(
            slope * float(up.abs().sum(0).max() * down.abs().sum(0).max()),
            slope * float(up.abs().sum(1).max() * down.abs().sum(1).max()),
            slope * spectral_norm(up) * spectral_norm(down),
        )
