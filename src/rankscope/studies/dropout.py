"""The forward pass of a network in training: dropout as BERT has it.

Entries are set to zero with chance p and the others divided by 1 - p: of the embedding, of the attention
weights, and of what each branch adds. Rows of attention then no longer sum to one and tokens no longer
see the same average, so every layer pulls tokens apart anew. The reference network has no dropout (it is
measured as it is used); here it is put back, to train networks as the first paper's were trained, and to see
what the second paper's measurements in training mode owe to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import StudyError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.block import Setting, mlp, project, skip
from rankscope.nets.kernels import attention_matrix
from rankscope.nets.norms import normalise
from rankscope.nets.weights import Layer, NormWeights

Tokens = Float[Tensor, "batch token width"]


@dataclass(frozen=True)
class Dropout:
    """Zeros with chance p, drawn from a generator of its own: a seed gives the same pass again."""

    p: float
    generator: torch.Generator

    @classmethod
    def seeded(cls, p: float, seed: int, device: torch.device | str) -> "Dropout":
        """Drawn on that device."""
        return cls(p, torch.Generator(device=device).manual_seed(seed))

    def __call__(self, x: Tensor) -> Tensor:
        """x with some entries gone and the others larger, so that its mean stays."""
        if not self.p:
            return x
        drawn = torch.rand(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)
        return x * (drawn >= self.p) / (1 - self.p)


def training_states(
    net: Transformer, X: Tokens, drop: Dropout, padding: Bool[Tensor, "batch token"] | None = None
) -> Iterator[Tokens]:
    """Tokens at layer 0, 1, ...: `net.steps` with dropout. At p = 0 they are the same."""
    if not applies(net.arch):
        raise StudyError(
            "dropout is put back into networks built like BERT, GPT-2 or T5 (serial, ungrouped, not "
            "rotary); "
            f"got positions {net.arch.positions!r}, norm_place {net.arch.norm_place!r}, "
            f"{net.arch.key_heads} "
            f"key heads of {net.arch.heads}, parallel {net.arch.parallel}"
        )
    X, real, order = net.prepared(X, padding)
    setting = Setting.of(net.arch, net.weights, X, real)
    hidden = None if bool(real.all()) else ~real[..., None]
    X = drop(X)
    yield X if order is None else order.restored(X)
    for index, layer in enumerate(net.weights.layers):
        X = _block(net.arch, index, layer, X, setting, drop)
        X = X if hidden is None else X.masked_fill(hidden, 0.0)
        yield X if order is None else order.restored(X)


def applies(arch: Architecture) -> bool:
    """Whether the network is built like BERT, GPT-2 or T5: serial, its heads ungrouped, nothing rotated."""
    usual = arch.positions in ("none", "absolute", "bias") and arch.key_heads == arch.heads
    return usual and not arch.parallel and arch.norm_place in ("pre", "post") and not arch.query_norm


def _block(
    arch: Architecture, index: int, layer: Layer, X: Tokens, setting: Setting, drop: Dropout
) -> Tokens:
    """`nets/block.py`, with dropout on attention and on each branch."""
    X = _around(
        arch,
        layer.attention_norm,
        arch.attention_skip,
        X,
        lambda Y: drop(_attention(arch, index, layer, Y, setting, drop)),
    )
    if arch.mlp == "none":
        return X
    return _around(arch, layer.mlp_norm, arch.mlp_skip, X, lambda Y: drop(mlp(arch, layer, Y)))


def _around(
    arch: Architecture, norm: NormWeights, weight: float, X: Tokens, branch: Callable[[Tokens], Tokens]
) -> Tokens:
    """A branch with its skip and its norm, before or after."""
    if arch.norm_place == "pre":
        return skip(weight, X, branch(normalise(X, arch.norm, norm, arch.norm_eps)))
    return normalise(skip(weight, X, branch(X)), arch.norm, norm, arch.norm_eps)


def _attention(
    arch: Architecture, index: int, layer: Layer, X: Tokens, setting: Setting, drop: Dropout
) -> Tokens:
    w = layer.attention
    q, k, v = (project(X, part) for part in (w.query, w.key, w.value))
    P = drop(attention_matrix(arch, w, q, k, setting.visible[arch.mask_of(index)], setting.bias))
    Y = (P @ v).transpose(1, 2).flatten(-2) @ w.output.weight.flatten(0, 1)
    return Y if w.output.bias is None else Y + w.output.bias
