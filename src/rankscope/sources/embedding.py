"""Layer 0: what a model does to token ids, or to an image, before its first block.

    text    x_i = norm((words[id_i] * scale) A + positions[i] + segment) B
    image   x_0 = class token + positions[0],   x_i = patch_i K + b + positions[i],   through a norm (CLIP);
            vit-pytorch has norms before and after K
    sound   x_i = gelu(gelu(spectrum * K_1) * K_2)_i + positions[i],   * a convolution along time
    wave    x_i = norm(y_i + gelu(y * K)_i),   y = norm(convolutions of the samples) A

A (OPT) and B (ALBERT) widen a narrow embedding before or after the sum; most models have neither. The
position i counts valid tokens, wherever padding stands; in models that have no other way, columns.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import FileError, SourceError, TokensError, require
from rankscope.nets import ACTIVATIONS, Encoded, Linear, NormWeights, affine, normalise, read_tensors, write_tensors
from rankscope.shapes import Bool, Float

UNMASKED = 1 - 0.15 * 0.8  # The share of tokens that ESM was trained on without a mask
TYPICAL = 24  # Tokens of sound of no fixed length, where an example is needed
CONVOLUTION_EPS = 1e-5  # Of the norms of convolutions of sound and of patches, whatever that of tokens is


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
    mask_id: int | None = None
    """The id of masked tokens, whose words are zero; the others are multiplied by 0.88, the share that was not
    masked in training, over that of the sample (ESM). None: masks are words like others."""

    def __repr__(self) -> str:
        return f"TextEmbedding({self.words.shape[0]} words, width {self.words.shape[1]})"

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""
        ids, device = inputs, self.words.device
        are_ids = ids.ndim == 2 and not ids.is_floating_point() and ids.dtype != torch.bool
        message = f"token ids must be whole numbers [batch, token]; received {ids.dtype} {tuple(ids.shape)}"
        require(are_ids, message, TokensError, "input_ids")
        if padding is None:
            padding = torch.zeros_like(ids, dtype=torch.bool)
        expected = f"padding must be boolean with the ids' shape {tuple(ids.shape)}"
        fits = padding.shape == ids.shape and padding.dtype == torch.bool
        require(fits, f"{expected}; received {padding.dtype} {tuple(padding.shape)}", TokensError, "padding")
        padding = padding.to(device)
        ids = ids.to(device).masked_fill(padding, 0)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < len(self.words)):
            message = f"token ids must lie in 0..{len(self.words) - 1}; received {int(ids.min())}..{int(ids.max())}"
            raise TokensError(message, subject="input_ids")
        X = self.words[ids].double() * self.scale  # a table may be kept in its file's dtype
        if self.mask_id is not None:
            masked = (ids == self.mask_id) & ~padding
            share = masked.sum(1).double() / (~padding).sum(1).clamp(min=1)
            X = X.masked_fill(masked[..., None], 0.0) * (UNMASKED / (1 - share))[:, None, None]
        X = X if self.before is None else affine(X, self.before)
        if self.positions is not None:
            X = X + self._positions(padding)
        if self.segment is not None:
            X = X + self.segment
        X = _normed(X, self.norm, self.norm_eps)
        X = X if self.after is None else affine(X, self.after)
        return Encoded(X.masked_fill(padding[..., None], 0.0), padding)

    def _positions(self, padding: Bool[Tensor, "batch token"]) -> Float[Tensor, "batch token sum"]:
        assert self.positions is not None
        counts = torch.ones_like(padding) if self.by_column else ~padding
        row = (counts.cumsum(1) - 1).clamp(min=0)
        longest = int(row.max()) + 1 if row.numel() else 0
        if longest > len(self.positions):
            most = len(self.positions)
            advice = f"cut the text to {most}, as --max-length {most} and net.encode(texts, {most}) do"
            message = f"this model takes at most {most} tokens; received {longest}: {advice}"
            raise TokensError(message, subject="tokens")
        return self.positions[row]


class WholeEmbedding:
    """The embedding of images or sound, which are taken whole: they are not cut to a length, and have no padding."""

    kind: ClassVar[str] = "sound"  # What the inputs are called

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        raise NotImplementedError

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0 of inputs that fit."""
        raise NotImplementedError

    @property
    def expected(self) -> str:
        """The shape of inputs, in words."""
        return f"[batch, {', '.join(map(str, self.shape))}], as a processor makes it"

    def fits(self, inputs: Tensor) -> bool:
        """True if inputs have a shape that the model takes."""
        return tuple(inputs.shape[1:]) == self.shape

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0; a `TokensError` unless inputs fit, and for padding."""
        message = (
            f"{self.kind} must be a floating tensor {self.expected}; received {inputs.dtype} {tuple(inputs.shape)}"
        )
        require(inputs.is_floating_point() and self.fits(inputs), message, TokensError, self.kind)
        message = f"{self.kind} can have no padding; received some: leave it out"
        require(padding is None, message, TokensError, "padding")
        X = self.tokens(inputs)
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device))


@dataclass(frozen=True, eq=False, repr=False)
class ImageEmbedding(WholeEmbedding):
    """Tokens from images: a class token and others where there are any, then one token per patch, row by row."""

    kind: ClassVar = "images"
    kernel: Float[Tensor, "width channel patch patch"]
    bias: Float[Tensor, " width"] | None
    positions: Float[Tensor, "token width"] | None
    size: tuple[int, int]
    first: Float[Tensor, "*count width"] | None = None  # The class token, or `[count, width]` with others after it
    patch_norm: NormWeights | None = None  # Of the pixels of a patch, channel by channel, before the kernel
    mapped_norm: NormWeights | None = None  # Of what the kernel makes of a patch, before positions
    norm: NormWeights | None = None
    norm_eps: float = 1e-12

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image: channels, height, width."""
        return (self.kernel.shape[1], *self.size)

    def __repr__(self) -> str:
        patch = " x ".join(map(str, self.kernel.shape[2:]))
        return f"ImageEmbedding(images of {self.size[0]} x {self.size[1]}, patches of {patch})"

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0 of a batch of images."""
        images, sides = inputs.to(self.kernel), self.kernel.shape[2:]
        if self.patch_norm is None:
            X = F.conv2d(images, self.kernel, self.bias, stride=sides).flatten(2).mT  # [batch, patch, width]
        else:
            pixels = _normed(F.unfold(images, sides, stride=sides).mT, self.patch_norm, CONVOLUTION_EPS)
            X = affine(pixels, Linear(self.kernel.flatten(1).T, self.bias))
        X = _normed(X, self.mapped_norm, CONVOLUTION_EPS)
        if self.first is not None:
            X = torch.cat([self.first.reshape(-1, X.shape[2]).expand(len(X), -1, -1), X], 1)
        X = X if self.positions is None else X + self.positions
        return _normed(X, self.norm, self.norm_eps)


@dataclass(frozen=True)
class Convolution:
    """A convolution along time, with its weights."""

    weight: Float[Tensor, "output input span"]
    bias: Float[Tensor, " output"] | None
    stride: int
    padding: int
    groups: int = 1

    def __call__(self, x: Float[Tensor, "batch input time"]) -> Float[Tensor, "batch output later"]:
        """Apply the convolution along time."""
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding, groups=self.groups)


@dataclass(frozen=True, eq=False, repr=False)
class SoundEmbedding(WholeEmbedding):
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

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0 of a batch of sound; silence is sound."""
        return F.gelu(self.second(F.gelu(self.first(inputs.to(self.positions))))).mT + self.positions


@dataclass(frozen=True, eq=False, repr=False)
class SpectrumEmbedding(WholeEmbedding):
    """Tokens from a mel spectrum of one length: two before its patches, which may overlap, all steps of the lowest
    bins first (AST)."""

    kernel: Float[Tensor, "width 1 patch patch"]  # Over bins, then over steps
    bias: Float[Tensor, " width"] | None
    positions: Float[Tensor, "token width"]
    first: Float[Tensor, "count width"]
    stride: tuple[int, int]
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one spectrum: time steps, mel bins."""
        return self.size

    def __repr__(self) -> str:
        return f"SpectrumEmbedding({self.size[0]} steps, {self.size[1]} mel bins)"

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0 of a batch of sound; silence is sound."""
        X = F.conv2d(inputs.to(self.kernel).mT[:, None], self.kernel, self.bias, self.stride).flatten(2).mT
        return torch.cat([self.first.expand(len(X), -1, -1), X], 1) + self.positions


@dataclass(frozen=True, eq=False, repr=False)
class WaveEmbedding(WholeEmbedding):
    """Tokens from samples of sound, of any number: convolutions along time, a linear map, and what a convolution of
    the tokens makes of their neighbours (wav2vec 2.0)."""

    convolutions: tuple[Convolution, ...]
    norms: tuple[NormWeights | None, ...]  # Of each convolution, before the activation
    by_channel: bool  # True if such a norm is of each channel over time, False if of each moment over channels
    activation: str
    into_norm: NormWeights | None
    into: Linear
    position_convolution: Convolution
    norm: NormWeights | None
    norm_eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample of `TYPICAL` tokens; others may be longer or shorter."""
        return (self._samples(TYPICAL),)

    def __repr__(self) -> str:
        return f"WaveEmbedding({len(self.convolutions)} convolutions, at least {self._samples(1)} samples)"

    @property
    def expected(self) -> str:
        """The shape of inputs, in words."""
        return f"[batch, sample] of {self._samples(1)} samples or more"

    def fits(self, inputs: Tensor) -> bool:
        """True if a token comes of so many samples."""
        return inputs.ndim == 2 and inputs.shape[1] >= self._samples(1)

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0 of a batch of sound; silence is sound."""
        act, x = ACTIVATIONS[self.activation], inputs.to(self.into.weight)[:, None]
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = convolution(x)
            if norm is not None and self.by_channel:
                x = F.group_norm(x, x.shape[1], norm.gain, norm.bias, CONVOLUTION_EPS)
            elif norm is not None:
                x = F.layer_norm(x.mT, x.shape[1:2], norm.gain, norm.bias, CONVOLUTION_EPS).mT
            x = act(x)
        X = affine(_normed(x.mT, self.into_norm, self.norm_eps), self.into)
        X = X + act(self.position_convolution(X.mT)[..., : X.shape[1]]).mT  # of an even span there is one too many
        return _normed(X, self.norm, self.norm_eps)

    def _samples(self, tokens: int) -> int:
        """The fewest samples of so many tokens."""
        for convolution in reversed(self.convolutions):
            tokens = (tokens - 1) * convolution.stride + convolution.weight.shape[-1]
        return tokens


def _normed(X: Tensor, norm: NormWeights | None, eps: float) -> Tensor:
    return X if norm is None else normalise(X, "layer", norm, eps)


TENSORS = "embedding.safetensors"
PARTS = (Convolution, NormWeights, Linear)
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (TextEmbedding, ImageEmbedding, SoundEmbedding, SpectrumEmbedding, WaveEmbedding, *PARTS)
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
    parts = enumerate(value) if isinstance(value, tuple) else getattr(value, "__dict__", {}).items()
    for name, part in parts:
        tensors |= tensors_of(part, f"{path}.{name}" if path else str(name))
    return tensors


def _described(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, f"{path}.{index}") for index, item in enumerate(value)]}
    if not dataclasses.is_dataclass(value):
        return value
    kind = type(value).__name__
    message = f"an embedding of one's own, {kind}, cannot be saved: leave out origin"
    require(KINDS.get(kind) is type(value), message, SourceError, "embedding")
    fields = [field.name for field in dataclasses.fields(value)]
    inside = {name: _described(getattr(value, name), f"{path}.{name}" if path else name) for name in fields}
    return {"kind": kind, "fields": inside}


def _rebuilt(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_rebuilt(item, tensors) for item in value["tuple"])
    return KINDS[value["kind"]](**{name: _rebuilt(part, tensors) for name, part in value["fields"].items()})
