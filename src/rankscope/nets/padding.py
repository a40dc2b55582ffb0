"""Tokens and their padding on the way into a network, and back out.

Masks and positions count tokens from the first valid one. Where padding stands to the left or in between, the
valid tokens are moved to the front for the pass (`TokenOrder`), and what comes out is put back in its place.
Public functions call `padding_from`, then `Transformer.prepared`: `check_tokens` and `prepare_tokens`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.metrics import valid_tokens
from rankscope.nets.architecture import Architecture
from rankscope.shapes import Bool, Float, Int, Shaped

Tokens = Float[Tensor, "batch token width"]
Valid = Bool[Tensor, "batch token"]


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
    if padding is not None:
        sentence = "give padding (True at padding) or attention_mask (1 at tokens), not both"
        raise TokensError(sentence, subject="attention_mask")
    if not isinstance(attention_mask, Tensor):
        sentence = f"attention_mask must be a tensor [batch, token]; got {type(attention_mask).__name__}"
        raise TokensError(f"{sentence}: use torch.as_tensor", subject="attention_mask")
    if shape is not None and tuple(attention_mask.shape) != tuple(shape):
        sentence = f"attention_mask must have the shape of the tokens, {tuple(shape)}"
        raise TokensError(f"{sentence}; received {tuple(attention_mask.shape)}", subject="attention_mask")
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        sentence = "attention_mask must be 1 at tokens and 0 at padding; received other values"
        raise TokensError(sentence, subject="attention_mask")
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


def check_tokens(arch: Architecture, like: Tensor, has_memory: bool, X: Tensor, padding: Tensor | None) -> Valid:
    """Return which positions of X are tokens; `TokensError` if a network with weights `like` cannot take X."""
    if not isinstance(X, Tensor) or X.ndim != 3 or X.shape[-1] != arch.width:
        got = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        sentence = f"tokens must be a tensor [batch, token, width] of width {arch.width}; received {got}"
        raise TokensError(sentence, subject="X")
    if X.dtype != like.dtype or X.device != like.device:
        sentence = f"tokens must be {like.dtype} on {like.device} like the network; received {X.dtype} on {X.device}"
        raise TokensError(f"{sentence}: use X.to or net.to", subject="X")
    if arch.cross_attention and not has_memory:
        sentence = "cross-attention reads a memory; this network has none: use net.with_memory(M, padding)"
        raise TokensError(sentence, subject="memory")
    limited = arch.positions == "absolute" or arch.linformer_rank is not None
    if limited and X.shape[1] > arch.length:
        advice = f"cut the text to {arch.length}, as --tokens {arch.length} and net.encode(texts, {arch.length}) do"
        sentence = f"this network takes at most {arch.length} tokens; received {X.shape[1]}: {advice}"
        raise TokensError(sentence, subject="length")
    if 0 < arch.rotary_reach < X.shape[1]:
        sentence = f"this network has rotary angles for {arch.rotary_reach} tokens; received {X.shape[1]}"
        raise TokensError(f"{sentence}: watch measures the original model on them", subject="rotary_reach")
    return valid_tokens(X.shape[:-1], padding, X.device)


def prepare_tokens(
    X: Tokens, valid: Valid, positions: Float[Tensor, "length width"] | None, padded: bool
) -> tuple[Tokens, Valid, TokenOrder | None]:
    """Return (layer 0, valid, order): valid tokens first, zero at padding, absolute positions added where
    there are some; and the order that puts tokens back where they stood, None if they did not move."""
    X = X.masked_fill(~valid[..., None], 0.0)
    order = TokenOrder.of(valid) if padded else None  # without padding, spares a question to the device
    if order is not None:
        X, valid = order.sorted(X), valid.gather(1, order.forth)
    if positions is not None:
        X = (X + positions[: X.shape[1]]).masked_fill(~valid[..., None], 0.0)
    return X, valid, order
