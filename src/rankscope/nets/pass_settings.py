"""One pass: how tokens and their padding enter it, and what every layer shares: masks, positions, a memory.

Masks and positions count tokens from the first valid one. Where padding stands to the left or in between, the
valid tokens are moved to the front for the pass (`TokenOrder`), and what comes out is put back in its place.
Public functions call `padding_from`, then `Transformer.prepared`, which is `prepare_tokens`.

The blocks of a decoder attend to a memory M beside their own tokens, mostly the output of an encoder:

    cross-attention   P_h = softmax(X W_Q (M W_K)^T / divisor),    X <- a X + sum_h P_h M W_V W_O

M is the same for every block; its tokens have no position here, and all are seen but padding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankscope.errors import MaskError, TokensError, require
from rankscope.metrics import valid_tokens
from rankscope.nets import masks
from rankscope.nets.architecture import Architecture
from rankscope.nets.positions import rotary_tables, score_bias, sinusoids, table_rows
from rankscope.nets.weights import Weights
from rankscope.shapes import Bool, Float, Int, Shaped

Tokens = Float[Tensor, "batch token width"]
Valid = Bool[Tensor, "batch token"]
Seen = dict[str | masks.Mask, Bool[Tensor, "#batch 1 token token"]]


def unpadded(arch: Architecture, n: int, device: torch.device) -> Seen:
    """Return who sees whom among n valid tokens, by mask."""
    used = {arch.mask_of(layer) for layer in range(arch.layers)}
    return {mask: masks.matrix(mask, n, device)[None, None] for mask in used}


def _without_padding(visible: Tensor, valid: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows `start` to `stop` of who sees whom, without padding."""
    rows = valid[:, start:stop]
    visible = visible & valid[:, None, None, :] & rows[:, None, :, None]
    sentence = "every token must attend to a valid token; with this padding one sees none: let each see itself"
    require(not (rows & ~visible[:, 0].any(-1)).any(), sentence, MaskError, "mask")
    return visible


def average(visible: Bool[Tensor, "batch 1 row token"]) -> Float[Tensor, "batch 1 row token"]:
    """Return C, float64: each row the uniform average of what it sees; zero where it sees nothing."""
    return visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """The tokens that cross-attention reads; those of one sample serve any number of samples."""

    tokens: Float[Tensor, "batch source width"]
    valid: Bool[Tensor, "batch source"]

    @classmethod
    def of(cls, M: Tensor, padding: Tensor | None, width: int, like: Tensor) -> "Memory":
        """Check the tokens M; they are zero at padding, and of the dtype and device of `like`."""
        if not isinstance(M, Tensor) or not M.is_floating_point() or M.ndim != 3 or M.shape[-1] != width:
            got = tuple(M.shape) if isinstance(M, Tensor) else type(M).__name__
            sentence = f"a memory must be a floating tensor [batch, source, width] of width {width}; received {got}"
            raise TokensError(sentence, subject="memory")
        M = M.to(like)
        valid = valid_tokens(M.shape[:-1], padding, M.device)
        require(valid.any(-1).all(), "every sample of a memory must have a valid token", TokensError, "padding")
        return cls(M.masked_fill(~valid[..., None], 0.0), valid)

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"Memory({count} sample{'s'[: count > 1]} of up to {self.tokens.shape[1]} tokens)"

    def samples(self, start: int, stop: int) -> "Memory":
        """Return the memory of some samples, counted from 0; one that is for all samples stays."""
        return self if len(self.valid) == 1 else Memory(self.tokens[start:stop], self.valid[start:stop])

    def expanded(self, batch: int) -> "Memory":
        """Return the memory repeated for a batch, if it is one for all samples."""
        sentence = f"a memory must have one sample or {batch}, as the tokens; got {len(self.valid)}"
        require(len(self.valid) in (1, batch), sentence, TokensError, "memory")
        return Memory(self.tokens.expand(batch, -1, -1), self.valid.expand(batch, -1))

    def visible(self, valid: Bool[Tensor, "batch token"]) -> Bool[Tensor, "batch 1 token source"]:
        """Return what each token sees: all that is valid; padding sees nothing."""
        return self.valid[:, None, None, :] & valid[:, None, :, None]


@dataclass(frozen=True)
class PassSettings:
    """What every layer shares in a pass over one batch, valid tokens first: masks, positions, memory."""

    visible: Seen  # By mask, without padding; empty where rows are computed one block at a time
    rotary: tuple[tuple[Tensor, Tensor], ...]  # Cosines and sines by layer, repeating; empty where nothing is rotated
    sinusoids: Tensor | None
    bias: Tensor | None
    valid: Bool[Tensor, "batch token"]
    memory: Memory | None = None  # What cross-attention reads, of every sample
    relative: tuple[Tensor, Tensor] | None = None  # DeBERTa's table, and its row for each pair of tokens

    @classmethod
    def of(
        cls,
        arch: Architecture,
        weights: Weights,
        X: Float[Tensor, "batch token width"],
        valid: Bool[Tensor, "batch token"],
        memory: Memory | None = None,
        whole_masks: bool = True,
        seen: Seen | None = None,
    ) -> "PassSettings":
        """Make the settings of a pass over tokens X, `valid` ones first, of a network with these weights (for tables of
        positions) and this memory for cross-attention. `whole_masks=False` makes no matrix `[token, token]`, masks and
        what positions add included; `seen` is what `unpadded` gave before, where every position is a token.
        """
        n, table = X.shape[-2], weights.relative_table if arch.positions == "disentangled" else None
        visible = {} if seen is None else seen
        if whole_masks and seen is None:
            visible = unpadded(arch, n, X.device)
            if not bool(valid.all()):
                visible = {mask: _without_padding(matrix, valid) for mask, matrix in visible.items()}
        return cls(
            visible=visible,
            rotary=rotary_tables(arch, n, X) if arch.positions == "rotary" else (),
            sinusoids=sinusoids(arch, n, X) if arch.positions == "relative" else None,
            bias=score_bias(arch, weights, n, X) if whole_masks and arch.positions in ("bias", "alibi") else None,
            valid=valid,
            memory=None if memory is None else memory.expanded(len(X)),
            relative=None if table is None else (table, table_rows(arch, n, X.device)),
        )

    def rows(self, mask: str | masks.Mask, start: int, stop: int) -> Bool[Tensor, "#batch 1 row token"]:
        """Return whom tokens `start` to `stop` see, without padding."""
        visible = masks.rows(mask, self.valid.shape[1], start, stop, self.valid.device)[None, None]
        return visible if bool(self.valid.all()) else _without_padding(visible, self.valid, start, stop)

    def averages(self, mask: str | masks.Mask) -> Float[Tensor, "#batch 1 token token"]:
        """Return C of a layer with this mask: each row the uniform average of what a token sees."""
        return average(self.visible[mask])

    def first(self, n: int) -> "PassSettings":
        """Return the settings of the first n positions as they are among all, which may be more: padding cut off."""
        cut, sinusoids, relative = self.valid.shape[1] - n, self.sinusoids, self.relative
        return replace(
            self,
            visible={mask: visible[..., :n, :n] for mask, visible in self.visible.items()},
            rotary=tuple((cosines[:n], sines[:n]) for cosines, sines in self.rotary),
            sinusoids=None if sinusoids is None else sinusoids[cut : len(sinusoids) - cut],
            bias=None if self.bias is None else self.bias[..., :n, :n],
            relative=None if relative is None else (relative[0], relative[1][:n, :n]),
            valid=self.valid[:, :n],
        )

    def bare(self) -> "PassSettings":
        """Return the settings without positions, as cross-attention has them."""
        return replace(self, rotary=(), sinusoids=None, bias=None, relative=None)

    def rotary_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer (0-based)."""
        return self.rotary[layer % len(self.rotary)]


def padding_from(padding: Tensor | None, attention_mask: object, shape: tuple[int, ...] | None = None) -> Tensor | None:
    """Return the padding of a batch, from whichever of the two conventions was used.

    Args:
        padding: `[batch, token]`, True at padded tokens.
        attention_mask: `[batch, token]`, 1 or True at tokens and 0 at padding, as Hugging Face's tokenizers
            give it.
        shape: `(batch, token)` that an attention mask must have; None checks nothing.

    Returns:
        True at padded tokens; None where neither was given.

    Raises:
        TokensError: if both are given, or the attention mask is not a tensor of zeros and ones of that shape.

    >>> padding_from(None, torch.tensor([[1, 1, 0]]), (1, 3))
    tensor([[False, False,  True]])
    """
    if attention_mask is None:
        return padding
    sentence = "give padding (True at padding) or attention_mask (1 at tokens), not both"
    require(padding is None, sentence, TokensError, "attention_mask")
    if not isinstance(attention_mask, Tensor):
        sentence = f"attention_mask must be a tensor [batch, token]; got {type(attention_mask).__name__}"
        raise TokensError(f"{sentence}: use torch.as_tensor", subject="attention_mask")
    got = tuple(attention_mask.shape)
    fits = shape is None or got == tuple(shape)
    sentence = f"attention_mask must have the shape of the tokens, {shape and tuple(shape)}; received {got}"
    require(fits, sentence, TokensError, "attention_mask")
    sentence = "attention_mask must be 1 at tokens and 0 at padding; received other values"
    require(((attention_mask == 0) | (attention_mask == 1)).all(), sentence, TokensError, "attention_mask")
    return attention_mask == 0


@dataclass(frozen=True)
class TokenOrder:
    """A permutation of the tokens of each sample that puts valid ones first, and its inverse."""

    forth: Int[Tensor, "batch token"]
    back: Int[Tensor, "batch token"]

    @classmethod
    def of(cls, valid: Valid) -> "TokenOrder | None":
        """Return the order with valid tokens first, otherwise as they are; None where they already are."""
        if bool((valid[:, 1:] <= valid[:, :-1]).all()):
            return None
        forth = (~valid).to(torch.int8).argsort(dim=-1, stable=True)
        return cls(forth, forth.argsort(dim=-1))

    def sorted(self, X: Tokens) -> Tokens:
        """Move the valid tokens to the front."""
        return X.gather(1, self.forth[..., None].expand_as(X))

    def restored(self, X: Float[Tensor, "batch token ..."]) -> Float[Tensor, "batch token ..."]:
        """Put every token back where it stood."""
        return X.gather(1, self.back.reshape(*self.back.shape, *[1] * (X.ndim - 2)).expand_as(X))

    def restored_rows(self, P: Shaped[Tensor, "batch head token source"]) -> Shaped[Tensor, "batch head token source"]:
        """Put the rows of a pattern back; its columns are tokens of a memory, which never move."""
        return P.gather(2, self.back[:, None, :, None].expand_as(P))

    def restored_columns(self, p: Float[Tensor, "batch head token"]) -> Float[Tensor, "batch head token"]:
        """Put the entries of one row of a pattern back."""
        return p.gather(2, self.back[:, None].expand_as(p))

    def restored_square(self, P: Shaped[Tensor, "batch head token token"]) -> Shaped[Tensor, "batch head token token"]:
        """Put rows and columns of a pattern back."""
        return self.restored_rows(P).gather(3, self.back[:, None, None].expand_as(P))


def prepare_tokens(
    arch: Architecture, weights: Weights, has_memory: bool, X: Tensor, padding: Tensor | None, positions: bool
) -> tuple[Tokens, Valid, TokenOrder | None]:
    """Return (layer 0, valid, order): valid tokens first, zero at padding, absolute positions added where the network
    has some and `positions` is True; and the order that puts tokens back where they stood, None if they did not move.
    `TokensError` if the network cannot take X."""
    like = weights.like
    if not isinstance(X, Tensor) or X.ndim != 3 or X.shape[-1] != arch.width:
        got = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        sentence = f"tokens must be a tensor [batch, token, width] of width {arch.width}; received {got}"
        raise TokensError(sentence, subject="X")
    sentence = f"tokens must be {like.dtype} on {like.device} like the network; received {X.dtype} on {X.device}"
    alike = X.dtype == like.dtype and X.device == like.device
    require(alike, f"{sentence}: use X.to or net.to", TokensError, "X")
    sentence = "cross-attention reads a memory; this network has none: use net.with_memory(M, padding)"
    require(has_memory or not arch.cross_attention, sentence, TokensError, "memory")
    limited = arch.positions == "absolute" or arch.linformer_rank is not None
    if limited and X.shape[1] > arch.length:
        advice = f"cut the text to {arch.length}, as --max-length {arch.length} and net.encode(texts, {arch.length}) do"
        sentence = f"this network takes at most {arch.length} tokens; received {X.shape[1]}: {advice}"
        raise TokensError(sentence, subject="length")
    if 0 < arch.rotary_reach < X.shape[1]:
        sentence = f"this network has rotary angles for {arch.rotary_reach} tokens; received {X.shape[1]}"
        raise TokensError(f"{sentence}: watch measures the original model on them", subject="rotary_reach")
    valid = valid_tokens(X.shape[:-1], padding, X.device)
    X = X.masked_fill(~valid[..., None], 0.0)
    order = None if padding is None else TokenOrder.of(valid)  # without padding, spares a question to the device
    if order is not None:
        X, valid = order.sorted(X), valid.gather(1, order.forth)
    if positions and weights.positions is not None:
        X = (X + weights.positions[: X.shape[1]]).masked_fill(~valid[..., None], 0.0)
    return X, valid, order
