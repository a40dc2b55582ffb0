"""Layer 0: what a model does to token ids, or to an image, before its first block.

    text    x_i = norm((words[id_i] * scale) A + positions[i] + segment) B
    image   x_0 = class token + positions[0],   x_i = patch_i K + b + positions[i],   through a norm (CLIP)
    sound   x_i = gelu(gelu(spectrum * K_1) * K_2)_i + positions[i],   * a convolution along time

A (OPT) and B (ALBERT) widen a narrow embedding before or after the sum; most models have neither. The
position i counts real tokens, wherever padding stands; in models that have no other way, columns.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.nets.norms import NormWeights, normalise
from rankscope.nets.origin import Encoded
from rankscope.nets.plain import affine
from rankscope.nets.weights import Linear
from rankscope.shapes import Bool, Float


@runtime_checkable
class Embedding(Protocol):
    """Turns what a model is given into tokens."""

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""


@dataclass(frozen=True, eq=False, repr=False)
class TextEmbedding:
    """Tokens from ids."""

    words: Float[Tensor, "vocabulary narrow"]
    scale: float = 1.0
    before: Linear | None = None
    """A."""
    positions: Float[Tensor, "length sum"] | None = None
    """Row i belongs to the i-th real token."""
    segment: Float[Tensor, " sum"] | None = None
    norm: NormWeights | None = None
    norm_eps: float = 1e-12
    after: Linear | None = None
    """B."""
    by_column: bool = False
    """Whether positions count padded tokens as well (BART, which cannot be told which are)."""

    def __repr__(self) -> str:
        return f"TextEmbedding({self.words.shape[0]} words, width {self.words.shape[1]})"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""
        ids = inputs
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise TokensError(
                f"token ids must be whole numbers [batch, token]; received {ids.dtype} {tuple(ids.shape)}"
            )
        if padding is None:
            padding = torch.zeros_like(ids, dtype=torch.bool)
        if padding.shape != ids.shape or padding.dtype != torch.bool:
            raise TokensError(
                f"padding must be boolean with the ids' shape {tuple(ids.shape)}; received {padding.dtype} "
                f"{tuple(padding.shape)}"
            )
        ids = ids.to(self.words.device).masked_fill(padding.to(self.words.device), 0)
        padding = padding.to(self.words.device)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < len(self.words)):
            raise TokensError(
                f"token ids must lie in 0..{len(self.words) - 1}; received {int(ids.min())}..{int(ids.max())}"
            )
        X = self.words[ids].double() * self.scale  # a table may be kept in its file's dtype
        X = X if self.before is None else affine(X, self.before)
        if self.positions is not None:
            X = X + self._positions(padding)
        if self.segment is not None:
            X = X + self.segment
        if self.norm is not None:
            X = normalise(X, "layer", self.norm, self.norm_eps)
        X = X if self.after is None else affine(X, self.after)
        return Encoded(X.masked_fill(padding[..., None], 0.0), padding)

    def _positions(self, padding: Bool[Tensor, "batch token"]) -> Float[Tensor, "batch token sum"]:
        assert self.positions is not None
        counted = torch.ones_like(padding) if self.by_column else ~padding
        place = (counted.cumsum(1) - 1).clamp(min=0)
        most = int(place.max()) + 1 if place.numel() else 0
        if most > len(self.positions):
            raise TokensError(f"this model takes at most {len(self.positions)} tokens; received {most}")
        return self.positions[place]


@dataclass(frozen=True, eq=False, repr=False)
class ImageEmbedding:
    """Tokens from images: a class token where there is one, then one token per patch, row by row."""

    kernel: Float[Tensor, "width channel patch patch"]
    bias: Float[Tensor, " width"] | None
    positions: Float[Tensor, "token width"]
    size: tuple[int, int]
    first: Float[Tensor, " width"] | None = None
    """The class token."""
    norm: NormWeights | None = None
    norm_eps: float = 1e-12

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return (self.kernel.shape[1], *self.size)

    def __repr__(self) -> str:
        patch = " x ".join(map(str, self.kernel.shape[2:]))
        return f"ImageEmbedding(images of {self.size[0]} x {self.size[1]}, patches of {patch})"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0; images have no padding."""
        if tuple(inputs.shape[1:]) != self.shape or not inputs.is_floating_point():
            raise TokensError(
                f"images must be a floating tensor [batch, {', '.join(map(str, self.shape))}]; received "
                f"{inputs.dtype} {tuple(inputs.shape)}: resize and normalise them as the model's processor "
                "does"
            )
        if padding is not None:
            raise TokensError("images have no padding; received some")
        images = inputs.to(self.kernel)
        patches = F.conv2d(images, self.kernel, self.bias, stride=self.kernel.shape[2:])
        X = patches.flatten(2).mT  # [batch, patch, width]
        X = X if self.first is None else torch.cat([self.first.expand(len(X), 1, -1), X], 1)
        X = X + self.positions
        if self.norm is not None:
            X = normalise(X, "layer", self.norm, self.norm_eps)
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device))


@dataclass(frozen=True)
class Convolution:
    """Along time."""

    weight: Float[Tensor, "output input span"]
    bias: Float[Tensor, " output"] | None
    stride: int
    padding: int

    def __call__(self, x: Float[Tensor, "batch input step"]) -> Float[Tensor, "batch output later"]:
        """Every output at every step."""
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding)


@dataclass(frozen=True, eq=False, repr=False)
class SoundEmbedding:
    """Tokens from a mel spectrum of one length."""

    first: Convolution
    second: Convolution
    positions: Float[Tensor, "token width"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one spectrum: its bins, and steps of time."""
        return self.first.weight.shape[1], len(self.positions) * self.first.stride * self.second.stride

    def __repr__(self) -> str:
        return f"SoundEmbedding({self.shape[0]} mel bins, {self.shape[1]} steps)"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0; silence is sound, and there is no padding."""
        if tuple(inputs.shape[1:]) != self.shape or not inputs.is_floating_point():
            raise TokensError(
                f"sound must be a floating tensor [batch, {', '.join(map(str, self.shape))}], a mel spectrum "
                f"as the model's processor makes it; received {inputs.dtype} {tuple(inputs.shape)}"
            )
        if padding is not None:
            raise TokensError("sound has no padding; received some")
        X = F.gelu(self.second(F.gelu(self.first(inputs.to(self.positions))))).mT + self.positions
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device))
