"""What theorems need of weights: norms of each head's matrices, Lipschitz constants of MLPs, their cache.

Row vectors: a token x becomes `x W`. `||W||_1` is the largest column sum of |W|, `||W||_inf` the largest row
sum, `||W||_2` the largest singular value. Matrices of one shape, of all heads and on a GPU of all layers, are taken
together, `[..., rows, columns]`.

All are rounded up by more than float64 could have lost: of a product, `|A B| <= |fl(A B)| + g |A| |B|` with
`g = 4 (n + 8) eps` over its longest sides n, which counts where A and B all but cancel; of a sum or an eigenvalue, the
factor 1 + g; and what underflows is not zero. `||W||_2^2` is the largest eigenvalue of the smaller Gram matrix: on the
CPU by LAPACK, elsewhere by squaring that matrix (`squared_bound`), since decompositions are slow there.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rankscope.nets import Architecture, Layer, Linear, Transformer, active_heads
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
Norms = Float[Tensor, "*batch"]
Matrices = Float[Tensor, "*batch rows columns"]


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the matrices of one layer's active heads, on the CPU."""

    scores: PerHead  # `||W_QK,h||_1`, `W_QK = W_Q W_K^T`; 0 where attention does not look at tokens (uniform)
    columns: PerHead  # `||W_h||_1`, `W_h = W_V,h W_O,h`
    rows: PerHead  # `||W_h||_inf`
    spectral: PerHead  # `||W_h||_2`

    @classmethod
    def of_layers(cls, arch: Architecture, heads: Sequence[int], layers: Sequence[Layer]) -> "list[HeadNorms]":
        """The norms of the same heads of several layers whose matrices have the same shapes."""
        attention = [layer.attention for layer in layers]
        of_keys = [head // (arch.heads // arch.key_heads) for head in heads]
        if not heads:
            return [cls(*torch.zeros(4, 0, dtype=torch.float64)) for _ in layers]

        def stacked(weights: Sequence[Tensor], chosen: Sequence[int], axis: int) -> Tensor:
            return torch.stack([of_heads(weight.movedim(axis, 0), chosen, 0).double() for weight in weights])

        values = stacked([w.value.weight for w in attention], of_keys, 1)
        outputs = stacked([w.output.weight for w in attention], heads, 0)
        norms = [*sums_of_product(values, outputs), product_norm(values, outputs)]
        if arch.kernel == "uniform":
            scores = torch.zeros_like(norms[0])
        else:
            queries = stacked([w.query.weight for w in attention], heads, 1)
            keys = stacked([w.key.weight for w in attention], of_keys, 1)
            scores = sums_of_product(queries, keys.mT)[0]
        return [cls(*of_layer) for of_layer in torch.stack([scores, *norms]).movedim(1, 0).cpu()]

    @cached_property
    def logs(self) -> dict[str, Tensor]:
        """The natural logs of the norms, by name."""
        return {field.name: getattr(self, field.name).log() for field in fields(self)}

    @cached_property
    def log_beta(self) -> tuple[float, float]:
        """The natural logs of `max_h ||W_QK,h||_1 ||W_h||_1` and of `max_h ||W_QK,h||_1 ||W_h||_inf`."""
        if not len(self.scores):
            return -torch.inf, -torch.inf
        columns, rows = (float((self.logs["scores"] + self.logs[name]).max()) for name in ("columns", "rows"))
        return columns, rows


def of_heads(t: Tensor, heads: Sequence[int], axis: int = 1) -> Tensor:
    """The entries of some heads along an axis; a list of them would have to cross to where the tensor is."""
    if list(heads) == list(range(t.shape[axis])):
        return t
    return torch.stack([t.select(axis, head) for head in heads], axis) if heads else t.narrow(axis, 0, 0)


def upward(value: Norms, share: float, zero: Tensor) -> Norms:
    """Norms rounded up; exactly zero where a factor is, infinite where they left the range."""
    value = torch.where(value.isfinite(), value * (1 + share) + TINY, torch.inf)
    return value.masked_fill(zero, 0.0)


def is_zero(A: Matrices) -> Tensor:
    """True for matrices of nothing but zeros."""
    return ~A.flatten(-2).any(-1)


def sums_of_product(A: Matrices, B: Matrices) -> tuple[Norms, Norms]:
    """(`||A B||_1`, `||A B||_inf`), rounded up."""
    g, zero = lost(*A.shape[-2:], B.shape[-1]), is_zero(A) | is_zero(B)
    if not A.shape[-2] * B.shape[-1]:
        return torch.zeros_like(zero, dtype=torch.float64), torch.zeros_like(zero, dtype=torch.float64)
    W, left, right = (A @ B).abs_(), A.abs(), B.abs()
    # Sums of |fl(A B)| + g |A| |B|, of which the second product is not formed.
    columns = W.sum(-2) + g * (left.sum(-2, keepdim=True) @ right)[..., 0, :]
    rows = W.sum(-1) + g * (left @ right.sum(-1, keepdim=True))[..., 0]
    return upward(columns.amax(-1), g, zero), upward(rows.amax(-1), g, zero)


def in_units(W: Matrices) -> tuple[Matrices, Norms]:
    """(matrices divided by their largest |entry|, that entry); one in the place of zero."""
    size = W.abs().flatten(-2).amax(-1)
    size = size.masked_fill(size == 0, 1.0)
    return W / size[..., None, None], size


SQUARINGS = ((128, 36), (2**62, 24))
"""(longest side of a Gram matrix, how often it is squared): k squarings of a matrix of n rows give a bound that is
above its norm by the factor `n^(1 / 2^(k + 1))` at most, here 1 + 4e-11 and, of 10,000 rows, 1 + 3e-7."""


def squared_bound(B: Matrices, squarings: int | None = None) -> Norms:
    """`||B||_2` of square matrices, rounded up, by products alone: `||B||_2^2 = ||B B^T||_2`, again and again, and at
    last `||B||_2 <= ||B||_F`.

    Before each product B is divided by `||B||_F`, so that the product is off by g at most. The way back takes the
    roots: `||B_k||_2 <= ||B_k||_F sqrt(||B_{k+1}||_2 + g)`.
    """
    n = B.shape[-1]
    g, sizes = lost(n), []
    count = next(count for most, count in SQUARINGS if n <= most) if squarings is None else squarings
    for _ in range(count):
        sizes.append(torch.linalg.vector_norm(B, dim=(-2, -1)))
        B = B / sizes[-1].masked_fill(sizes[-1] == 0, 1.0)[..., None, None]
        B = B @ B.mT
    bound = torch.linalg.vector_norm(B, dim=(-2, -1)) * (1 + g)
    for size in reversed(sizes):
        bound = size * (bound + g).sqrt() * (1 + g)
    return bound


def spectral_norm(W: Matrices) -> Norms:
    """`||W||_2` from the smaller Gram matrix, rounded up."""
    zero = is_zero(W)
    if not W.shape[-2] * W.shape[-1]:
        return torch.zeros_like(zero, dtype=torch.float64)
    W, size = in_units(W)
    gram, g = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W, lost(*W.shape[-2:])
    finite = gram.isfinite().flatten(-2).all(-1)
    gram = gram.masked_fill(~finite[..., None, None], 0.0)
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0.0) if gram.device.type == "cpu" else squared_bound(gram)
    # The Gram matrix and its eigenvalue are off by a share of |W|^2, whose norm is its trace at most.
    largest = largest * (1 + g) + g * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return upward(torch.where(finite, size * largest.sqrt(), torch.inf), g, zero)


CANCELLED = 1e-3
"""Norms of a product below this, as a share of the product of Frobenius norms, are taken from triangles (QR): of less
the roots of Gram matrices lose digits, 1e-6 of it at this share."""


def product_norm(A: Matrices, B: Matrices) -> Norms:
    """`||A B||_2`, rounded up, of `[..., width, inner]` times `[..., inner, width]`.

    With `L L^T >= A^T A` (Cholesky, of the Gram matrix plus what rounding may have taken off it)
    `||A B||_2 <= ||L^T B||_2`, a matrix of inner rows."""
    zero = is_zero(A) | is_zero(B)
    (A, size_A), (B, size_B) = in_units(A), in_units(B)
    both = [torch.linalg.vector_norm(M, dim=(-2, -1)) for M in (A, B)]
    inner, g = A.shape[-1], lost(*A.shape[-2:])
    shift = torch.eye(inner, dtype=A.dtype, device=A.device) * (g * both[0].square())[..., None, None]
    L, failed = torch.linalg.cholesky_ex(A.mT @ A + shift)
    Y, off = L.mT @ B, lost(*B.shape[-2:]) * torch.linalg.vector_norm(L, dim=(-2, -1)) * both[1]
    norms = spectral_norm(Y) + off
    loose = ~zero & ~(norms > CANCELLED * both[0] * both[1]) | (failed != 0) & ~zero
    if bool(loose.any()):
        left, right = (torch.linalg.qr(M, mode="r").R for M in (A[loose], B[loose].mT))
        triangles = spectral_norm(left @ right.mT) + g * (both[0] * both[1])[loose]
        norms = norms.masked_scatter(loose, triangles)
    return upward(size_A * norms * size_B, 8 * EPS, zero)


def value_parts(arch: Architecture, layer: Layer, head: int) -> tuple[Tensor, Tensor]:
    """The matrices `W_V,h` and `W_O,h` of one head."""
    w, group = layer.attention, arch.heads // arch.key_heads
    return w.value.weight[:, head // group].double(), w.output.weight[head].double()


@dataclass(frozen=True)
class MLPNorms:
    """Lipschitz constants of an MLP in column sums, row sums and the 2-norm."""

    columns: float  # In column sums
    rows: float  # In row sums
    spectral: float  # In the 2-norm
    up: float = 0.0
    gate: float = 0.0
    down: float = 0.0  # 2-norms of a gated MLP's matrices

    @classmethod
    def of_layers(cls, arch: Architecture, layers: Sequence[Layer]) -> "list[MLPNorms]":
        """`Lip(act) ||W_1|| ||W_2||` of several layers whose matrices have the same shapes; infinite for a gated MLP, a
        product of two functions of the token."""
        if layers[0].experts is not None:  # nothing is known of how far a mixture stretches differences
            return [cls(*[torch.inf] * 6)] * len(layers)
        if layers[0].mlp is None:
            return [cls(0.0, 0.0, 0.0)] * len(layers)
        parts = [layer.mlp for layer in layers if layer.mlp is not None]
        up, down = (torch.stack([getattr(w, name).weight.double() for w in parts]) for name in ("up", "down"))
        if (norms := [spectral_norm(up), spectral_norm(down)]) and parts[0].gate is not None:
            gate = torch.stack([w.gate.weight.double() for w in parts if w.gate is not None])
            table = torch.stack([norms[0], spectral_norm(gate), norms[1]], 1).tolist()
            return [cls(torch.inf, torch.inf, torch.inf, *row) for row in table]
        zero, g, slope = is_zero(up) | is_zero(down), lost(*up.shape[-2:]), LIPSCHITZ[arch.activation]
        sums = [up.abs().sum(axis).amax(-1) * down.abs().sum(axis).amax(-1) for axis in (-2, -1)]
        table = torch.stack([upward(slope * size, g, zero) for size in (*sums, norms[0] * norms[1])], 1).tolist()
        return [cls(*row) for row in table]


LayerNorms = tuple[HeadNorms, MLPNorms]  # The norms of one layer's weights
PackedNorms = Float[Tensor, " number"]  # Those of all layers, which cross to where the network is as one tensor


@dataclass(frozen=True)
class DeviceNorms:
    """Norms of one layer's weights: logs of those of active heads, and those of its MLP as they are."""

    columns: Float[Tensor, " head"]
    rows: Float[Tensor, " head"]
    spectral: Float[Tensor, " head"]
    mlp: Float[Tensor, " 4"]  # `MLPNorms`: spectral, up, gate and down


def packed(layers: Sequence[LayerNorms], device: torch.device) -> PackedNorms:
    """The norms of these layers, one after the other."""
    of_mlps = torch.tensor([[mlp.spectral, mlp.up, mlp.gate, mlp.down] for _, mlp in layers], dtype=torch.float64)
    tensors: list[Tensor] = []
    for (heads, _), of_mlp in zip(layers, of_mlps, strict=True):
        tensors += [*(heads.logs[name] for name in ("columns", "rows", "spectral")), of_mlp]
    return torch.cat(tensors).to(device)


def unpacked(numbers: PackedNorms, heads: Sequence[int]) -> list[DeviceNorms]:
    """The norms of each layer from those `packed`; `heads` says how many are active in each."""
    tensors = iter(torch.split(numbers, [size for count in heads for size in (count, count, count, 4)]))
    return [DeviceNorms(*of_layer) for of_layer in zip(tensors, tensors, tensors, tensors, strict=True)]


Result = TypeVar("Result")
CACHE_SIZE = 4096  # Results that are cached, the latest, some hundred bytes each
_cache: dict[Hashable, Any] = {}
_lock = Lock()


def once(key: Hashable, compute: Callable[[], Result]) -> Result:
    """The cached result under a key, or a new one, computed now and cached."""
    if (cached := _cache.get(key)) is not None:
        return cast(Result, cached)
    computed = compute()
    with _lock:
        _cache[key] = computed
        if len(_cache) > CACHE_SIZE:
            del _cache[next(iter(_cache))]
    return computed


_keys: dict[torch.device, Tensor] = {}  # the odd random numbers of `checksums`, by device
MIXED, CHAINED = -7046029254386353131, 6364136223846793005  # odd multipliers that spread bits
BLOCK = {"cpu": 2**16}
"""The entries of a tensor whose bits are summed at once, by device: on the CPU what its cache holds, else 2^22."""


def checksums(weights: Sequence[Tensor]) -> list[int]:
    """64 bits for each tensor that differ for tensors of other bits (one of 1e19 pairs excepted).

    An entry's bits, times a random number of its place, are mixed and added up where the tensors are, so that only the
    sums cross over; off the CPU tensors of one size and dtype are taken together."""
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        alike = index if weight.device.type == "cpu" else (weight.device, weight.dtype, weight.numel())
        groups.setdefault(alike, []).append(index)
    sums = []
    for indices in groups.values():
        chosen = [weights[index].detach().reshape(-1) for index in indices]
        bits = chosen[0].contiguous()[None] if len(chosen) == 1 else torch.stack(chosen)
        bits = bits.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[bits.element_size()])
        block, total = BLOCK.get(bits.device.type, 2**22), torch.zeros(1, dtype=torch.int64, device=bits.device)
        if bits.device not in _keys:
            drawn = torch.randint(-(2**63), 2**63 - 1, (block,), generator=torch.Generator().manual_seed(0))
            _keys[bits.device] = (drawn | 1).to(bits.device)
        for part in torch.split(bits, block, 1):
            mixed = part * _keys[bits.device][: part.shape[1]]
            mixed = mixed.bitwise_xor_(mixed >> 32).mul_(MIXED)
            total = total * CHAINED + mixed.bitwise_xor_(mixed >> 29).sum(1)
        sums.append(total)
    order = [index for indices in groups.values() for index in indices]
    by_index = dict(zip(order, torch.cat(sums).tolist(), strict=True))
    return [by_index[index] for index in range(len(weights))]


def digests(layers: Sequence[Layer]) -> list[tuple[Any, ...]]:
    """Checksums, shapes and dtypes of the matrices of each layer's attention and MLP: equal for equal matrices."""
    rows: list[list[Tensor | None]] = []
    for w in layers:
        linears: list[Linear | None] = [w.attention.query, w.attention.key, w.attention.value, w.attention.output]
        linears += [] if w.mlp is None else [w.mlp.up, w.mlp.gate, w.mlp.down]
        rows.append([None if linear is None else linear.weight for linear in linears])
    sums = iter(checksums([weight for row in rows for weight in row if weight is not None]))
    return [
        tuple(None if weight is None else (next(sums), weight.dtype, tuple(weight.shape)) for weight in row)
        for row in rows
    ]


class WeightNorms:
    """Norms of the weights of a network and its variants. Weights must not change during the life of one
    of these, which reads each layer once."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], tuple[weakref.ref[Any], tuple[Any, ...]]] = {}

    def of(self, net: Transformer, index: int) -> LayerNorms:
        """The norms of layer `index` (0-based): of its heads and its MLP."""
        return self.of_layers(net)[index] if not net.streamed else self._of(net, [index])[0]

    def of_layers(self, net: Transformer) -> list[LayerNorms]:
        """The norms of all layers. Those that are not known are taken together off the CPU, one by one on it."""
        return self._of(net, range(net.arch.layers))

    def _of(self, net: Transformer, indices: Sequence[int]) -> list[LayerNorms]:
        arch, layers = net.arch, net.weights.layers
        keys = [("norms", key, arch.activation, arch.kernel == "uniform") for key in self._keys(net, indices)]
        cached = {key: _cache[key] for key in keys if key in _cache}
        missing = {key: index for key, index in zip(keys, indices, strict=True) if key not in cached}

        def alike(item: tuple[Any, int]) -> Any:
            (_, (digest, *others), *_), index = item
            shapes = [part and part[1:] for part in digest]
            return index if net.streamed or net.device.type == "cpu" else (shapes, others)

        for _, group in groupby(missing.items(), alike):
            (new_keys, numbers) = zip(*group, strict=True)
            chosen = [layers[index] for index in numbers]
            heads = HeadNorms.of_layers(arch, active_heads(arch, numbers[0]), chosen)
            for key, norms in zip(new_keys, zip(heads, MLPNorms.of_layers(arch, chosen), strict=True), strict=True):
                cached[key] = once(key, lambda norms=norms: norms)
        return [cached[key] for key in keys]

    def of_all(self, name: str, net: Transformer, compute: Callable[[], Result]) -> Result:
        """A cached result that depends only on the matrices of all layers and on which heads are active."""
        return once((name, *self._keys(net, range(net.arch.layers))), compute)

    def _keys(self, net: Transformer, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        layers: Any = net.weights.layers
        all_places = layers.places()
        places = [all_places[index] for index in indices]
        keys, unread = [(id(of), number) for of, number in places], {}
        for key, (of, _), index in zip(keys, places, indices, strict=True):
            cached = self._read.get(key)
            if cached is None or cached[0]() is not of:  # another one may have its id since
                unread[key] = of, index
        for group in [[item] for item in unread.items()] if net.streamed else [[*unread.items()]] if unread else []:
            read = digests([layers[index] for _, (_, index) in group])
            self._read.update(
                (key, (weakref.ref(of), digest)) for (key, (of, _)), digest in zip(group, read, strict=True)
            )
        return [
            (self._read[key][1], active_heads(net.arch, index), net.arch.mixes(index))
            for key, index in zip(keys, indices, strict=True)
        ]
