"""One call of `F.scaled_dot_product_attention`, from which the pattern is computed a second time:

    P = softmax(Q K' scale + mask),   without dropout

as torch documents it. That P V is what the call gave is checked every time. Made by `torch_functions.py` for
each call that it intercepts; `flex.py` derives flex attention from it.
"""

import math

import torch
from torch import Tensor

from rankscope.live.attention.head_outputs import by_head, check_pattern
from rankscope.live.isolation import isolated


class ScaledDotProduct:
    """The output of a call, and its arguments under torch's names and with torch's meaning."""

    altered_by: str | None = None  # nothing comes between this pattern and its values

    def __init__(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float | int = 0.0,
        is_causal: bool = False,
        scale: float | int | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.output, self.query, self.key, self.value = output, query, key, value
        self.mask, self.dropout, self.causal, self.scale = attn_mask, dropout_p, is_causal, scale
        self.grouped = enable_gqa

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of samples, queries and keys."""
        samples = self.query.shape[0] if self.query.ndim > 2 else 1
        return samples, self.query.shape[-2], self.key.shape[-2]

    @property
    def head_width(self) -> int:
        """The number of entries of a head's values."""
        return self.value.shape[-1]

    def pattern(self) -> Tensor:
        """The attention pattern `[batch, head, query, key]`, checked against the output."""
        with isolated(self.query.device):
            P = self._pattern()
            if not self.dropout:
                values = self._wide(self.value)
                if self.grouped:
                    values = values.repeat_interleave(P.shape[-3] // values.shape[-3], -3)
                check_pattern(P, values, self.output, "torch's attention")
            return by_head(P)

    def head_outputs(self) -> Tensor:
        """The output of each head `[batch, query, head, d]`."""
        return by_head(self.output.detach()).transpose(1, 2)

    def hidden_tokens(self) -> Tensor | None:
        """`[batch, token]`: True at keys that the mask hides from all queries; None without such."""
        mask = self._mask()
        if mask is None or mask.ndim < 3:  # the same for every sample: no padding
            return None
        mask = mask.expand(*self.query.shape[:-1], self.key.shape[-2])
        hidden = mask < -1e3 if mask.is_floating_point() else ~mask
        return by_head(hidden).all(2).all(1)

    def _pattern(self) -> Tensor:
        """`softmax(Q K' scale + mask)`, in float32 or wider, with the axes of the query."""
        query, key = self._wide(self.query), self._wide(self.key)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        if self.grouped:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scores, mask = self._modified(query @ key.mT * scale), self._mask()
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill_(ahead, -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros
        return scores.softmax(-1).masked_fill_(blind, 0.0)

    def _modified(self, scores: Tensor) -> Tensor:
        """The scores as the softmax takes them; flex attention changes them here."""
        return scores

    def _mask(self) -> Tensor | None:
        """The mask as a tensor; torch's causal biases make theirs when asked."""
        if (materialise := getattr(self.mask, "_materialize", None)) is not None:  # torch.nn.attention.bias
            return materialise(self.query.device)
        return None if self.mask is None else self.mask.detach()

    def _wide(self, x: Tensor) -> Tensor:
        """x as the kernel took it under autocast, then in float32 or wider, enough for a softmax."""
        x = x.detach().to(self.output.dtype)
        return x.to(torch.promote_types(x.dtype, torch.float32))
