"""Tokens on their way into a network: whether it can take them, and how its first layer finds them."""

from torch import Tensor

from rankscope.errors import TokensError
from rankscope.metrics.tokens import real_tokens
from rankscope.nets.architecture import Architecture
from rankscope.nets.memory import Memory
from rankscope.nets.padding import TokenOrder
from rankscope.shapes import Bool, Float


def checked(
    arch: Architecture, like: Tensor, memory: Memory | None, X: Tensor, padding: Tensor | None
) -> Bool[Tensor, "batch token"]:
    """Which tokens are real; a sentence where a network of such an architecture cannot take them. Its weights
    are `like` this one."""
    if not isinstance(X, Tensor) or X.ndim != 3 or X.shape[-1] != arch.width:
        got = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        raise TokensError(
            f"tokens must be a tensor [batch, token, width] of width {arch.width}; received {got}"
        )
    if X.dtype != like.dtype or X.device != like.device:
        raise TokensError(
            f"tokens must be {like.dtype} on {like.device} like the network; received {X.dtype} on "
            f"{X.device}: use X.to or net.to"
        )
    if arch.cross_attention and memory is None:
        raise TokensError(
            "cross-attention reads a memory, and this network has none yet: give it one, "
            "net.reading(M, padding) with M [batch, source, width], as an encoder's output"
        )
    limited = arch.positions == "absolute" or arch.linformer_rank is not None
    if limited and X.shape[1] > arch.length:
        raise TokensError(f"this network takes at most {arch.length} tokens; received {X.shape[1]}")
    if 0 < arch.rotary_reach < X.shape[1]:
        raise TokensError(
            f"the rotary angles of this network are those of up to {arch.rotary_reach} tokens; "
            f"received {X.shape[1]}: the original turns longer inputs by other angles, watch measures it"
        )
    return real_tokens(X.shape[:-1], padding, X.device)


def prepared(
    X: Float[Tensor, "batch token width"],
    real: Bool[Tensor, "batch token"],
    positions: Float[Tensor, "length width"] | None,
    padded: bool,
) -> tuple[Float[Tensor, "batch token width"], Bool[Tensor, "batch token"], TokenOrder | None]:
    """(layer 0, real, order): real tokens first, zero at padding, with absolute positions added where there
    are some; and how to put them back where they stood, if they moved."""
    X = X.masked_fill(~real[..., None], 0.0)
    order = TokenOrder.of(real) if padded else None  # asks nothing of a device in vain
    if order is not None:
        X, real = order.sorted(X), real.gather(1, order.forth)
    if positions is not None:
        X = (X + positions[: X.shape[1]]).masked_fill(~real[..., None], 0.0)
    return X, real, order
