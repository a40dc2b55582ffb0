"""Norms of weights, taken once for weights that are the same, in whatever network and at whatever call.

What was found is kept under the weights' own bits (SHA-256): weights that were changed in place, in any way,
are other weights, and a network that was converted or loaded again has the same. Reading them is a
tenth of what their norms cost.
"""

import hashlib
import weakref
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar, cast

import torch

from rankscope.nets import Transformer
from rankscope.nets.order import active_heads
from rankscope.nets.weights import Layer, Linear, StreamedLayers
from rankscope.theory.constants import HeadNorms, MLPNorms

Found = TypeVar("Found")
CACHE_SIZE = 4096
"""Results that are cached, the latest, some hundred bytes each."""
_cache: dict[Hashable, Any] = {}
_lock = Lock()


def once(key: Hashable, compute: Callable[[], Found]) -> Found:
    """The cached result under a key, or a new one, computed now and cached."""
    cached = _cache.get(key)
    if cached is not None:
        return cast(Found, cached)
    result = compute()
    with _lock:
        _cache[key] = result
        if len(_cache) > CACHE_SIZE:
            del _cache[next(iter(_cache))]
    return result


def digest(layer: Layer) -> bytes:
    """SHA-256 over the matrices of a layer's attention and MLP, their shapes and dtypes."""
    w, result = layer.attention, hashlib.sha256()
    linears: list[Linear | None] = [w.query, w.key, w.value, w.output]
    linears += [] if layer.mlp is None else [layer.mlp.up, layer.mlp.gate, layer.mlp.down]
    for linear in linears:
        if linear is None:
            result.update(b"none")
            continue
        weight = linear.weight.detach()
        result.update(f"{weight.dtype} {tuple(weight.shape)}".encode())
        result.update(weight.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return result.digest()


class WeightNorms:
    """Norms of the weights of a network and its variants. Weights must not change during the life of one
    of these, which reads each layer once."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], tuple[weakref.ref[Any], bytes]] = {}

    def of(self, net: Transformer, index: int) -> tuple[HeadNorms, MLPNorms]:
        """The norms of layer `index` (0-based): of its heads and its MLP."""
        arch, layers = net.arch, net.weights.layers
        key = ("norms", self._key(net, index), arch.activation, arch.kernel == "uniform")
        return once(key, lambda: (HeadNorms.of(arch, index, layers[index]), MLPNorms.of(arch, layers[index])))

    def of_all(self, name: str, net: Transformer, compute: Callable[[], Found]) -> Found:
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
