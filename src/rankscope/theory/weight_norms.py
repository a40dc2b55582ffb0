"""What theorems need of weights: norms of each head's matrices, Lipschitz constants of MLPs, their cache.

Row vectors: a token x becomes `x W`. `||W||_1` is the largest column sum of |W|, `||W||_inf` the largest row
sum, `||W||_2` the largest singular value.

All are rounded up by more than float64 could have lost: of a product, `|A B| <= |fl(A B)| + g |A| |B|` with
`g = 4 (n + 8) eps` over its longest side n, which counts where A and B all but cancel; of a sum or a singular
value, the factor 1 + g; and what underflows is not zero.
"""

import hashlib
import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from rankscope.nets.order import active_heads
from rankscope.nets.weights import Layer, Linear, StreamedLayers
from rankscope.shapes import Float

LIPSCHITZ = {
    "gelu": 1.12891, "gelu_tanh": 1.12901, "quick_gelu": 1.09985, "relu": 1.0, "silu": 1.09984, "tanh": 1.0,
    "identity": 1.0,
}  # fmt: skip
"""The largest slope of each activation, rounded up in its last digit."""

EPS = torch.finfo(torch.float64).eps
TINY = 1e-290  # More than what underflows in a norm of matrices that are not zero


def lost(*sides: int) -> float:
    """g: the share that sums and products over sides so long may have lost, and more."""
    return 4 * (sum(sides) + 8) * EPS


PerHead = Float[Tensor, " head"]


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the matrices of one layer's active heads."""

    scores: PerHead  # `||W_QK,h||_1`, `W_QK = W_Q W_K^T`; 0 where attention does not look at tokens (uniform)
    columns: PerHead  # `||W_h||_1`, `W_h = W_V,h W_O,h`
    rows: PerHead  # `||W_h||_inf`
    spectral: PerHead  # `||W_h||_2`

    @classmethod
    def of(cls, arch: Architecture, index: int, layer: Layer) -> "HeadNorms":
        """The norms of the heads of layer `index` (0-based)."""
        w, heads = layer.attention, active_heads(arch, index)
        group = arch.heads // arch.key_heads
        norms = torch.zeros(4, len(heads), dtype=torch.float64)
        for row, head in enumerate(heads):
            value, output = value_parts(arch, layer, head)
            if arch.kernel != "uniform":
                query, key = (w.query.weight[:, head].double(), w.key.weight[:, head // group].double())
                norms[0, row] = sums_of_product(query, key.mT)[0]
            norms[1, row], norms[2, row] = sums_of_product(value, output)
            norms[3, row] = product_norm(value, output)
        return cls(*norms)


def upward(value: float, share: float, zero: bool) -> float:
    """A norm rounded up; exactly zero where a factor is, infinite where it left the range."""
    if zero:
        return 0.0
    return value * (1 + share) + TINY if math.isfinite(value) else math.inf


def sums_of_product(A: Tensor, B: Tensor) -> tuple[float, float]:
    """(`||A B||_1`, `||A B||_inf`), rounded up."""
    g, zero = lost(*A.shape, B.shape[1]), not (A.any() and B.any())
    W = (A @ B).abs() + g * (A.abs() @ B.abs())
    if not W.numel():
        return 0.0, 0.0
    return upward(float(W.sum(0).max()), g, zero), upward(float(W.sum(1).max()), g, zero)


def spectral_norm(W: Float[Tensor, "rows columns"]) -> float:
    """`||W||_2` from the smaller Gram matrix, rounded up: at a fraction of a decomposition's cost."""
    size = float(W.abs().max()) if W.numel() else 0.0
    if size == 0.0:
        return 0.0
    W = W / size
    gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
    if not bool(gram.isfinite().all()):
        return math.inf
    return size * float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0.0).sqrt()) * (1 + lost(*W.shape))


def product_norm(A: Float[Tensor, "width inner"], B: Float[Tensor, "inner width"]) -> float:
    """`||A B||_2` from the triangles of both, of the size of the inner width."""
    if not (A.any() and B.any()):
        return 0.0
    largest = float(A.abs().max()), float(B.abs().max())
    A, B = A / largest[0], B / largest[1]
    left, right = torch.linalg.qr(A, mode="r").R, torch.linalg.qr(B.mT, mode="r").R
    norms = spectral_norm(left @ right.mT) + lost(*A.shape) * float(A.norm() * B.norm())
    return upward(largest[0] * norms * largest[1], 4 * EPS, zero=False)


def value_parts(arch: Architecture, layer: Layer, head: int) -> tuple[Tensor, Tensor]:
    """The matrices `W_V,h` and `W_O,h` of one head."""
    w, group = layer.attention, arch.heads // arch.key_heads
    return w.value.weight[:, head // group].double(), w.output.weight[head].double()


@dataclass(frozen=True)
class MLPNorms:
    """Lipschitz constants of an MLP in column sums, row sums and the 2-norm."""

    columns: float
    rows: float
    spectral: float
    up: float = 0.0
    gate: float = 0.0
    down: float = 0.0  # 2-norms of a gated MLP's matrices

    @classmethod
    def of(cls, arch: Architecture, layer: Layer) -> "MLPNorms":
        """`Lip(act) ||W_1|| ||W_2||`; infinite for a gated MLP, a product of two functions of the token."""
        w = layer.mlp
        if layer.experts is not None:  # nothing is known of how far a mixture stretches differences
            return cls(torch.inf, torch.inf, torch.inf, torch.inf, torch.inf, torch.inf)
        if w is None:
            return cls(0.0, 0.0, 0.0)
        if w.gate is not None:
            parts = tuple(spectral_norm(part.weight.double()) for part in (w.up, w.gate, w.down))
            return cls(torch.inf, torch.inf, torch.inf, *parts)
        up, down, slope = (w.up.weight.double(), w.down.weight.double(), LIPSCHITZ[arch.activation])
        zero, g = not (up.any() and down.any()), lost(*up.shape)
        sums = [float(up.abs().sum(axis).max()) * float(down.abs().sum(axis).max()) for axis in (0, 1)]
        spectral = spectral_norm(up) * spectral_norm(down)
        return cls(*(upward(slope * size, g, zero) for size in (*sums, spectral)))


LayerNorms = tuple[HeadNorms, MLPNorms]  # The norms of one layer's weights

Result = TypeVar("Result")
CACHE_SIZE = 4096  # Results that are cached, the latest, some hundred bytes each
_cache: dict[Hashable, Any] = {}
_lock = Lock()


def once(key: Hashable, compute: Callable[[], Result]) -> Result:
    """The cached result under a key, or a new one, computed now and cached."""
    cached = _cache.get(key)
    if cached is not None:
        return cast(Result, cached)
    computed = compute()
    with _lock:
        _cache[key] = computed
        if len(_cache) > CACHE_SIZE:
            del _cache[next(iter(_cache))]
    return computed


def digest(layer: Layer) -> bytes:
    """SHA-256 over the matrices of a layer's attention and MLP, their shapes and dtypes."""
    w, sha = layer.attention, hashlib.sha256()
    linears: list[Linear | None] = [w.query, w.key, w.value, w.output]
    linears += [] if layer.mlp is None else [layer.mlp.up, layer.mlp.gate, layer.mlp.down]
    for weight in (None if linear is None else linear.weight.detach() for linear in linears):
        if weight is None:
            sha.update(b"none")
        else:
            sha.update(f"{weight.dtype} {tuple(weight.shape)}".encode())
            sha.update(weight.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return sha.digest()


class WeightNorms:
    """Norms of the weights of a network and its variants. Weights must not change during the life of one
    of these, which reads each layer once."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], tuple[weakref.ref[Any], bytes]] = {}

    def of(self, net: Transformer, index: int) -> LayerNorms:
        """The norms of layer `index` (0-based): of its heads and its MLP."""
        arch, layers = net.arch, net.weights.layers
        key = ("norms", self._key(net, index), arch.activation, arch.kernel == "uniform")
        return once(key, lambda: (HeadNorms.of(arch, index, layers[index]), MLPNorms.of(arch, layers[index])))

    def of_all(self, name: str, net: Transformer, compute: Callable[[], Result]) -> Result:
        """A cached result that depends only on the matrices of all layers and on which heads are active."""
        return once((name, *(self._key(net, index) for index in range(net.arch.layers))), compute)

    def _key(self, net: Transformer, index: int) -> tuple[bytes, tuple[int, ...], bool]:
        layers: Any = net.weights.layers
        stored = isinstance(layers, StreamedLayers)  # a layer that is read is another object each time
        of, index_in_source = (layers.source, layers.numbers[index]) if stored else (layers[index], 0)
        cached = self._read.get((id(of), index_in_source))
        if cached is None or cached[0]() is not of:  # another one may have its id since
            cached = self._read[id(of), index_in_source] = weakref.ref(of), digest(layers[index])
        return cached[1], active_heads(net.arch, index), net.arch.mixes(index)
