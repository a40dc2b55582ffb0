"""The tokens as a common token and what deviates from it: `X = 1 x^T + e^s R`.

x and R each carry their own log-scale per sample, so neither collapse nor growth can leave the range of
floating point. Where tokens are close, x is their mean and R what is left, to full relative precision however
small it is. Where they are far apart (a token deviates by over half of the mean's length), there is nothing
to keep apart and x is 0, R the tokens themselves: a token that is exactly zero then stays so.

R is known to float64's relative precision of its largest entries, and most rules keep it so. Where a rule
leaves far less of R than it was given (a norm that removes a difference in length, attention that looks at
tokens which R cannot tell apart), the same rounding weighs more: a second pass tells how much
(`second_pass.py`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation.decisions import can_skip, must_compute, saves_a_pass
from rankscope.deviation.scaled import LOWEST, STEEPEST, LogScales, Scaled, chosen
from rankscope.shapes import Bool, Float

APART = 0.5
"""Largest deviation, in lengths of the mean, up to which a mean is kept apart."""


@dataclass(frozen=True)
class ValidTokens:
    """Which tokens count."""

    mask: Bool[Tensor, "batch token"]

    @cached_property
    def count(self) -> Float[Tensor, "batch 1"]:
        """Valid tokens of each sample, at least one."""
        return self.mask.sum(-1, keepdim=True).clamp(min=1).double()

    @cached_property
    def all(self) -> bool:
        """No token is padding."""
        return can_skip("state.no_padding", self.mask.all())

    @cached_property
    def first(self) -> Tensor:
        """The first valid token of each sample."""
        if not self.mask.shape[1]:
            return self.mask.new_zeros(len(self.mask), dtype=torch.long)
        return self.mask.to(torch.int8).argmax(-1)

    def zero_padding(self, R: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """Zero at padded tokens."""
        return R if self.all else R.masked_fill(~self.mask[..., None], 0.0)


@dataclass(frozen=True)
class State:
    """Tokens `[batch, token, width]` in two parts."""

    x: Scaled  # [batch, width]
    R: Scaled  # [batch, token, width], zero at padded tokens
    valid: ValidTokens

    @classmethod
    def of(cls, X: Float[Tensor, "batch token width"], mask: Bool[Tensor, "batch token"]) -> "State":
        """Split ordinary tokens. Equal tokens give R = 0 exactly: what is close starts from a token, not
        from a mean that has been rounded."""
        valid = ValidTokens(mask)
        whole = Scaled.plain(valid.zero_padding(X)).normalised()
        if not X.shape[1]:
            return cls(Scaled.plain(X.new_zeros(len(X), X.shape[2])), whole, valid)
        x = X[torch.arange(len(X), device=X.device), valid.first]
        close = cls(Scaled.plain(x), Scaled.plain(valid.zero_padding(X - x[:, None])), valid).tidy()
        # Far apart: the tokens as they came, not taken apart and put together again.
        return cls(close.x, chosen(close.x.log <= LOWEST, whole, close.R), valid)

    @classmethod
    def placed(
        cls,
        X: Float[Tensor, "batch token width"],
        positions: Float[Tensor, "token width"],
        mask: Bool[Tensor, "batch token"],
    ) -> "State":
        """Split tokens and the positions added to them, without rounding their sums: beside a token of 1e12
        a position has four digits left."""
        valid = ValidTokens(mask)
        total, lost = _sum(X, positions.expand_as(X))
        whole = Scaled.plain(valid.zero_padding(total)).normalised()
        if not X.shape[1]:
            return cls(Scaled.plain(X.new_zeros(len(X), X.shape[2])), whole, valid)
        here = torch.arange(len(X), device=X.device), valid.first
        apart, rest = _sum(total, -total[here][:, None].expand_as(total))
        R = apart + (rest + (lost - lost[here][:, None]))
        close = cls(Scaled.plain(total[here]), Scaled.plain(valid.zero_padding(R)), valid).tidy()
        return cls(close.x, chosen(close.x.log <= LOWEST, whole, close.R), valid)

    @classmethod
    def of_heads(cls, R: Scaled, valid: ValidTokens) -> "State":
        """What each head has for every token `[batch, head, token, width]`, as batch * head samples without a
        common token."""
        value = R.value.flatten(0, 1)
        x = Scaled.plain(value.new_zeros(len(value), value.shape[2])).normalised()
        valid = ValidTokens(valid.mask.repeat_interleave(R.value.shape[1], 0))
        return cls(x, Scaled(value, R.log.flatten()).mapped(valid.zero_padding), valid)

    def tidy(self) -> "State":
        """Re-centred and rescaled, as after every sub-block."""
        mean, R = self.centred()
        x = (self.x + mean).normalised()
        length = torch.linalg.vector_norm(x.value, dim=-1)
        longest = torch.linalg.vector_norm(R.value, dim=-1)
        longest = longest.amax(-1) if longest.shape[-1] else torch.zeros_like(length)
        apart = longest * (R.log - x.log).clamp(-STEEPEST, STEEPEST).exp() > APART * length
        if must_compute("state.any_apart", apart.any()):
            whole = self.R
            if not saves_a_pass("state.no_common_token", apart, lambda: (self.x.log <= LOWEST).all()):
                whole = (whole + self.x.mapped(lambda v: v[:, None])).mapped(self.valid.zero_padding)
            R = whole if saves_a_pass("state.all_apart", apart, apart.all) else chosen(apart, whole, R)
            x = Scaled(x.value.masked_fill(apart[:, None], 0.0), x.log.masked_fill(apart, LOWEST))
        return State(x, R.normalised(), self.valid)

    def centred(self) -> tuple[Scaled, Scaled]:
        """(mean of R, R about it) over the valid tokens: the second is the residual."""
        mean = self.R.value.sum(1) / self.valid.count
        return Scaled(mean, self.R.log), Scaled(
            self.valid.zero_padding(self.R.value - mean[:, None]), self.R.log
        )

    @cached_property
    def residual(self) -> Scaled:
        """R about its mean, the largest entry of size one: kept, since most readings start from it."""
        return self.centred()[1].unit()

    @cached_property
    def whole(self) -> Float[Tensor, "batch token width"]:
        """Ordinary tokens in units of the larger of their two scales, kept as well."""
        return self.tokens(self.log)

    @cached_property
    def sizes(self) -> dict[str, LogScales]:
        """Logs of the residual's norms that were taken so far: a metric and its relative form share one."""
        return {}

    @property
    def log(self) -> LogScales:
        """The log-scale of the whole: the larger of its parts'."""
        return torch.maximum(self.x.log, self.R.log)

    def tokens(self, log: LogScales | None = None) -> Float[Tensor, "batch token width"]:
        """Ordinary tokens in units of e^log (of one, if left out)."""
        unit = torch.zeros_like(self.x.log) if log is None else log
        return self.valid.zero_padding(self.x.at(unit)[:, None] + self.R.at(unit))


def _sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and what its rounding lost (Knuth's two-sum)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
