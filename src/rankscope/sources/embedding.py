"""Layer 0: what a model does to token ids, or to an image, before its first block.

    text    x_i = norm((words[id_i] * scale) A + positions[i] + segment) B
    image   x_0 = class token + positions[0],   x_i = patch_i K + b + positions[i],   through a norm (CLIP)
    sound   x_i = gelu(gelu(spectrum * K_1) * K_2)_i + positions[i],   * a convolution along time

A (OPT) and B (ALBERT) widen a narrow embedding before or after the sum; most models have neither. The
position i counts real tokens, wherever padding stands; in models that have no other way, columns.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import FileError, SourceError, TokensError
from rankscope.nets.norms import NormWeights, normalise
from rankscope.nets.origin import Encoded
from rankscope.nets.plain import affine
from rankscope.nets.storage import read_tensors, write_tensors
from rankscope.nets.weights import Linear
from rankscope.shapes import Bool, Float


@runtime_checkable
class Embedding(Protocol):
    """Turns the inputs of a model (ids, images, sound) into tokens of layer 0."""

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""


@dataclass(frozen=True, eq=False, repr=False)
class TextEmbedding:
    """The embedding of token ids: word, position and segment vectors, summed and normalised."""

    words: Float[Tensor, "vocabulary narrow"]
    scale: float = 1.0
    before: Linear | None = None
    """The map A, which widens words before positions are added."""
    positions: Float[Tensor, "length sum"] | None = None
    """Row i belongs to the i-th valid token."""
    segment: Float[Tensor, " sum"] | None = None
    norm: NormWeights | None = None
    norm_eps: float = 1e-12
    after: Linear | None = None
    """The map B, which widens the normalised sum."""
    by_column: bool = False
    """Whether positions count padded tokens as well (BART, which cannot be told which are)."""

    def __repr__(self) -> str:
        return f"TextEmbedding({self.words.shape[0]} words, width {self.words.shape[1]})"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""
        ids = inputs
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise TokensError(
                f"token ids must be whole numbers [batch, token]; received {ids.dtype} {tuple(ids.shape)}",
                subject="input_ids",
            )
        if padding is None:
            padding = torch.zeros_like(ids, dtype=torch.bool)
        if padding.shape != ids.shape or padding.dtype != torch.bool:
            raise TokensError(
                f"padding must be boolean with the ids' shape {tuple(ids.shape)}; received {padding.dtype} "
                f"{tuple(padding.shape)}",
                subject="padding",
            )
        ids = ids.to(self.words.device).masked_fill(padding.to(self.words.device), 0)
        padding = padding.to(self.words.device)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < len(self.words)):
            raise TokensError(
                f"token ids must lie in 0..{len(self.words) - 1}; received "
                f"{int(ids.min())}..{int(ids.max())}",
                subject="input_ids",
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
        counts = torch.ones_like(padding) if self.by_column else ~padding
        row = (counts.cumsum(1) - 1).clamp(min=0)
        longest = int(row.max()) + 1 if row.numel() else 0
        if longest > len(self.positions):
            raise TokensError(
                f"this model takes at most {len(self.positions)} tokens; received {longest}", subject="tokens"
            )
        return self.positions[row]


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
        """The shape of one image: channels, height, width."""
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
                "does",
                subject="images",
            )
        if padding is not None:
            raise TokensError("images have no padding; received some", subject="padding")
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
    """A convolution along time, with its weights."""

    weight: Float[Tensor, "output input span"]
    bias: Float[Tensor, " output"] | None
    stride: int
    padding: int

    def __call__(self, x: Float[Tensor, "batch input step"]) -> Float[Tensor, "batch output later"]:
        """Apply the convolution to every step."""
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding)


@dataclass(frozen=True, eq=False, repr=False)
class SoundEmbedding:
    """Tokens from a mel spectrum of one length."""

    first: Convolution
    second: Convolution
    positions: Float[Tensor, "token width"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one spectrum: mel bins, time steps."""
        return self.first.weight.shape[1], len(self.positions) * self.first.stride * self.second.stride

    def __repr__(self) -> str:
        return f"SoundEmbedding({self.shape[0]} mel bins, {self.shape[1]} steps)"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0; silence is sound, and there is no padding."""
        if tuple(inputs.shape[1:]) != self.shape or not inputs.is_floating_point():
            raise TokensError(
                f"sound must be a floating tensor [batch, {', '.join(map(str, self.shape))}], a mel spectrum "
                f"as the model's processor makes it; received {inputs.dtype} {tuple(inputs.shape)}",
                subject="sound",
            )
        if padding is not None:
            raise TokensError("sound has no padding; received some", subject="padding")
        X = F.gelu(self.second(F.gelu(self.first(inputs.to(self.positions))))).mT + self.positions
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device))


TENSORS = "embedding.safetensors"
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (TextEmbedding, ImageEmbedding, SoundEmbedding, Convolution, NormWeights, Linear)
}


def write_embedding(folder: Path, embedding: Embedding) -> dict[str, Any]:
    """Write the tensors of an embedding into a file of the folder, and return the rest as plain Python."""
    described = _described(embedding, "")
    return {"same": write_tensors(folder / TENSORS, tensors_of(embedding)), "made_of": described}


def read_embedding(folder: Path, description: dict[str, Any]) -> Embedding:
    """Read an embedding that `write_embedding` wrote; `description` is what it returned."""
    tensors = read_tensors(folder / TENSORS, description["same"])
    try:
        tensors_found: Embedding = _rebuilt(description["made_of"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"the embedding saved in {folder} cannot be read ({error}): save it again", subject="embedding"
        ) from error
    return tensors_found


def tensors_of(value: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of an embedding, by their dotted names."""
    if isinstance(value, Tensor):
        return {path: value}
    if not dataclasses.is_dataclass(value):
        return {}
    tensors_found: dict[str, Tensor] = {}
    for field in dataclasses.fields(value):
        tensors_found |= tensors_of(
            getattr(value, field.name), f"{path}.{field.name}" if path else field.name
        )
    return tensors_found


def _described(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    if not dataclasses.is_dataclass(value):
        return value
    kind = type(value).__name__
    if KINDS.get(kind) is not type(value):
        raise SourceError(
            f"an embedding of one's own, {kind}, cannot be saved: leave out origin", subject="embedding"
        )
    fields = [field.name for field in dataclasses.fields(value)]
    inside = {name: _described(getattr(value, name), f"{path}.{name}" if path else name) for name in fields}
    return {"kind": kind, "fields": inside}


def _rebuilt(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(value["tuple"])
    return KINDS[value["kind"]](**{name: _rebuilt(part, tensors) for name, part in value["fields"].items()})
