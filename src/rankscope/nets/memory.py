"""A second source of tokens: what the blocks of a decoder attend to beside their own.

    cross-attention   P_h = softmax(X W_Q (M W_K)^T / divisor),    X <- a X + sum_h P_h M W_V W_O

The memory M is given, mostly the output of an encoder, and is the same for every block: queries come from the
tokens, keys and values from M. No token of M has a position here and none is hidden, but for padding.
"""

from dataclasses import dataclass

from torch import Tensor

from rankscope.errors import TokensError
from rankscope.metrics.tokens import valid_tokens
from rankscope.shapes import Bool, Float


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """Tokens that every block reads and none changes; those of one sample serve any number."""

    tokens: Float[Tensor, "batch source width"]
    valid: Bool[Tensor, "batch source"]

    @classmethod
    def of(cls, M: Tensor, padding: Tensor | None, width: int, like: Tensor) -> "Memory":
        """Checked; zero at padding, in the dtype of the weights and where they are."""
        if not isinstance(M, Tensor) or not M.is_floating_point() or M.ndim != 3 or M.shape[-1] != width:
            got = tuple(M.shape) if isinstance(M, Tensor) else type(M).__name__
            raise TokensError(
                f"a memory must be a floating tensor [batch, source, width] of width {width}; received {got}",
                subject="memory",
            )
        M = M.to(like)
        valid = valid_tokens(M.shape[:-1], padding, M.device)
        if not bool(valid.any(-1).all()):
            raise TokensError(
                "every sample of a memory must have a real token; one has none: leave it out",
                subject="padding",
            )
        return cls(M.masked_fill(~valid[..., None], 0.0), valid)

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"Memory({count} sample{'s'[: count > 1]} of up to {self.tokens.shape[1]} tokens)"

    def samples(self, start: int, stop: int) -> "Memory":
        """Return the memory of some samples, counted from 0; one that is for all samples stays."""
        return self if len(self.valid) == 1 else Memory(self.tokens[start:stop], self.valid[start:stop])

    def expanded(self, batch: int) -> "Memory":
        """Return the memory repeated for a batch, if it is one for all samples."""
        if len(self.valid) not in (1, batch):
            raise TokensError(
                f"a memory must have one sample, or as many as the tokens, {batch}; it has {len(self.valid)}",
                subject="memory",
            )
        return Memory(self.tokens.expand(batch, -1, -1), self.valid.expand(batch, -1))

    def visible(self, valid: Bool[Tensor, "batch token"]) -> Bool[Tensor, "batch 1 token source"]:
        """Whom each token sees: all that are valid; padding sees none."""
        return self.valid[:, None, None, :] & valid[:, None, :, None]
