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
    before: Linear | None = None  # The map A, which widens words before positions are added
    positions: Float[Tensor, "length sum"] | None = None  # Row i belongs to the i-th valid token
    segment: Float[Tensor, " sum"] | None = None
    norm: NormWeights | None = None
    norm_eps: float = 1e-12
    after: Linear | None = None  # The map B, which widens the normalised sum
    by_column: bool = False  # Whether positions count padded tokens as well (BART, which cannot be told which are)

    def __repr__(self) -> str:
        return f"TextEmbedding({self.words.shape[0]} words, width {self.words.shape[1]})"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""
        ids, device = inputs, self.words.device
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            message = f"token ids must be whole numbers [batch, token]; received {ids.dtype} {tuple(ids.shape)}"
            raise TokensError(message, subject="input_ids")
        if padding is None:
            padding = torch.zeros_like(ids, dtype=torch.bool)
        if padding.shape != ids.shape or padding.dtype != torch.bool:
            expected = f"padding must be boolean with the ids' shape {tuple(ids.shape)}"
            raise TokensError(f"{expected}; received {padding.dtype} {tuple(padding.shape)}", subject="padding")
        padding = padding.to(device)
        ids = ids.to(device).masked_fill(padding, 0)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < len(self.words)):
            message = f"token ids must lie in 0..{len(self.words) - 1}; received {int(ids.min())}..{int(ids.max())}"
            raise TokensError(message, subject="input_ids")
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
            message = f"this model takes at most {len(self.positions)} tokens; received {longest}"
            raise TokensError(message, subject="tokens")
        return self.positions[row]


@dataclass(frozen=True, eq=False, repr=False)
class ImageEmbedding:
    """Tokens from images: a class token where there is one, then one token per patch, row by row."""

    kernel: Float[Tensor, "width channel patch patch"]
    bias: Float[Tensor, " width"] | None
    positions: Float[Tensor, "token width"]
    size: tuple[int, int]
    first: Float[Tensor, " width"] | None = None  # The class token
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
        _check_whole("images", inputs, padding, self.shape)
        patches = F.conv2d(inputs.to(self.kernel), self.kernel, self.bias, stride=self.kernel.shape[2:])
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
        _check_whole("sound", inputs, padding, self.shape)
        X = F.gelu(self.second(F.gelu(self.first(inputs.to(self.positions))))).mT + self.positions
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device))


def _check_whole(kind: str, inputs: Tensor, padding: Tensor | None, shape: tuple[int, ...]) -> None:
    """Refuse images or sound of another shape or dtype, and padding, which they do not have."""
    if tuple(inputs.shape[1:]) != shape or not inputs.is_floating_point():
        expected = f"{kind} must be a floating tensor [batch, {', '.join(map(str, shape))}], as a processor makes it"
        raise TokensError(f"{expected}; received {inputs.dtype} {tuple(inputs.shape)}", subject=kind)
    if padding is not None:
        raise TokensError(f"{kind} can have no padding; received some: leave it out", subject="padding")


TENSORS = "embedding.safetensors"
KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (TextEmbedding, ImageEmbedding, SoundEmbedding, Convolution, NormWeights, Linear)
}


def write_embedding(folder: Path, embedding: Embedding) -> dict[str, Any]:
    """Write the tensors of an embedding into a file of the folder, and return the rest as plain Python."""
    made_of = _described(embedding, "")
    return {"same": write_tensors(folder / TENSORS, tensors_of(embedding)), "made_of": made_of}


def read_embedding(folder: Path, description: dict[str, Any]) -> Embedding:
    """Read an embedding that `write_embedding` wrote; `description` is what it returned."""
    tensors = read_tensors(folder / TENSORS, description["same"])
    try:
        embedding: Embedding = _rebuilt(description["made_of"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        message = f"the embedding saved in {folder} cannot be read ({error}): save it again"
        raise FileError(message, subject="embedding") from error
    return embedding


def tensors_of(value: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of an embedding, by their dotted names."""
    if isinstance(value, Tensor):
        return {path: value}
    tensors: dict[str, Tensor] = {}
    for name, part in getattr(value, "__dict__", {}).items():
        tensors |= tensors_of(part, f"{path}.{name}" if path else name)
    return tensors


def _described(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    if not dataclasses.is_dataclass(value):
        return value
    kind = type(value).__name__
    if KINDS.get(kind) is not type(value):
        message = f"an embedding of one's own, {kind}, cannot be saved: leave out origin"
        raise SourceError(message, subject="embedding")
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
