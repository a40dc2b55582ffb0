"""`State`: hidden states as a common token and the tokens' deviations from it, `X = 1 x^T + e^s R`.

Every rule (`rules.py`) takes a state and gives one; `propagate.py` makes the first, readings and metrics are taken off
them (`readings.py`). x and R each carry their own log-scale per sample (`scaled.py`), so neither collapse nor growth
can leave the range of floating point. Where tokens are close, x is their mean and R what is left, to full relative
precision however small it is. Where they are far apart (a token deviates by over half of the mean's length), no mean is
kept apart: x is 0 and R the tokens themselves, so that a token that is exactly zero stays so.

R is known to float64's relative precision of its largest entries, and most rules keep it so. Where a rule leaves far
less of R than it was given (a norm that removes a difference in length, attention to tokens that R cannot tell apart),
the same rounding weighs more: a second pass measures how much (`second_pass.py`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation.decisions import can_skip, must_compute, saves_a_pass
from rankscope.deviation.scaled import LOWEST, STEEPEST, LogScales, Scaled, chosen
from rankscope.doubled import two_sum
from rankscope.shapes import Bool, Float

APART = 0.5  # the largest deviation of a token, in lengths of the mean, up to which x is the mean


@dataclass(frozen=True)
class ValidTokens:
    """Which positions of each sample are tokens; the others are padding."""

    mask: Bool[Tensor, "batch token"]

    @cached_property
    def count(self) -> Float[Tensor, "batch 1"]:
        """The number of tokens of each sample, at least one."""
        return self.mask.sum(-1, keepdim=True).clamp(min=1).double()

    @cached_property
    def all(self) -> bool:
        """True if no position of the batch is padding; False is always safe."""
        return can_skip("state.no_padding", self.mask)

    @cached_property
    def first(self) -> Tensor:
        """The index of the first token of each sample."""
        if not self.mask.shape[1]:
            return self.mask.new_zeros(len(self.mask), dtype=torch.long)
        return self.mask.to(torch.int8).argmax(-1)

    def of_heads(self, count: int) -> "ValidTokens":
        """The valid tokens of batch * head samples: each sample `count` times, once for each of its heads."""
        return ValidTokens(self.mask.repeat_interleave(count, 0))

    def zero_padding(self, R: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """R with zeros in the rows of padding."""
        return R if self.all else R.masked_fill(~self.mask[..., None], 0.0)


@dataclass(frozen=True)
class State:
    """Hidden states `[batch, token, width]` as `1 x^T + R`: a common token, and each token's deviation."""

    x: Scaled  # [batch, width]
    R: Scaled  # [batch, token, width], zero at padded tokens
    valid: ValidTokens

    @classmethod
    def of(
        cls,
        X: Float[Tensor, "batch token width"],
        mask: Bool[Tensor, "batch token"],
        positions: Float[Tensor, "token width"] | None = None,
    ) -> "State":
        """The state of ordinary hidden states, plus position embeddings if given; `mask` is True at tokens.

        Equal tokens give R = 0 exactly: deviations are first taken from one of the tokens, since a mean would be
        rounded. Sums with positions are not rounded: added to a token of 1e12, four digits would be left."""
        valid = ValidTokens(mask)
        total, lost = (X, None) if positions is None else two_sum(X, positions.expand_as(X))
        tokens = Scaled.plain(valid.zero_padding(total)).normalised()
        if not X.shape[1]:
            return cls(Scaled.plain(X.new_zeros(len(X), X.shape[2])), tokens, valid)
        first = torch.arange(len(X), device=X.device), valid.first
        x = total[first]
        if lost is None:
            R = total - x[:, None]
        else:
            difference = two_sum(total, -x[:, None].expand_as(total))
            R = difference.hi + (difference.low + (lost - lost[first][:, None]))
        close = cls(Scaled.plain(x), Scaled.plain(valid.zero_padding(R)), valid).tidy()
        # Where they are far apart: the tokens as they came, not a rounded difference plus what was taken off.
        return cls(close.x, chosen(close.x.log <= LOWEST, tokens, close.R), valid)

    @classmethod
    def of_heads(cls, R: Scaled, valid: ValidTokens) -> "State":
        """Rows `[batch, head, token, width]` as a state of batch * head samples, without a common token."""
        rows, valid = R.heads_as_samples(), valid.of_heads(R.value.shape[1])
        x = Scaled.plain(rows.value.new_zeros(len(rows.value), rows.value.shape[2])).normalised()
        return cls(x, rows.mapped(valid.zero_padding), valid)

    def tidy(self) -> "State":
        """Equal hidden states with x the mean again (or 0 where tokens are far apart) and R of size one."""
        mean, R = self.centred()
        x = (self.x + mean).normalised()
        length = torch.linalg.vector_norm(x.value, dim=-1)
        longest = torch.linalg.vector_norm(R.value, dim=-1)
        longest = longest.amax(-1) if longest.shape[-1] else torch.zeros_like(length)
        apart = longest * (R.log - x.log).clamp(-STEEPEST, STEEPEST).exp() > APART * length
        if must_compute("state.any_apart", apart):
            tokens = self.R
            if not saves_a_pass("state.no_common_token", apart, lambda: self.x.log <= LOWEST):
                tokens = (tokens + self.x.mapped(lambda v: v[:, None])).mapped(self.valid.zero_padding)
            R = tokens if saves_a_pass("state.all_apart", apart, lambda: apart) else chosen(apart, tokens, R)
            x = Scaled(x.value.masked_fill(apart[:, None], 0.0), x.log.masked_fill(apart, LOWEST))
        return State(x, R.normalised(), self.valid)

    @property
    def mean(self) -> Scaled:
        """The mean of R over the tokens."""
        return Scaled(self.R.value.sum(1) / self.valid.count, self.R.log)

    def centred(self) -> tuple[Scaled, Scaled]:
        """(the mean of R over the tokens, R minus that mean): the second is the residual."""
        mean = self.mean
        return mean, Scaled(self.valid.zero_padding(self.R.value - mean.value[:, None]), self.R.log)

    @cached_property
    def residual(self) -> Scaled:
        """The residual: R minus its mean, the largest entry about one. Cached: most readings start from it."""
        return self.centred()[1].unit()

    @cached_property
    def equal(self) -> Bool[Tensor, " batch"]:
        """True where all tokens of a sample are exactly equal."""
        return self.R.largest() == 0

    @property
    def finite(self) -> tuple["State", Bool[Tensor, " batch"] | None]:
        """(the state with zeros in place of samples that hold NaN, which these are): None if there are none, and the
        state itself. NaN among the numbers is NaN in their log, once they are normalised."""
        broken = self._broken
        if broken is None:
            return self, None  # not kept: a state that refers to itself would stay in memory until it is looked for
        x, R = (Scaled(torch.zeros_like(part.value), torch.full_like(part.log, LOWEST)) for part in (self.x, self.R))
        return State(chosen(broken, x, self.x), chosen(broken, R, self.R), self.valid), broken

    @cached_property
    def _broken(self) -> Bool[Tensor, " batch"] | None:
        """True for samples that hold NaN; None if there are none."""
        broken = self.log.isnan()
        return broken if must_compute("state.broken", broken) else None

    @cached_property
    def scaled_tokens(self) -> Float[Tensor, "batch token width"]:
        """The hidden states as an ordinary tensor in units of e^log, the larger scale of x and R."""
        return self.tokens(self.log)

    @cached_property
    def sizes(self) -> dict[str, LogScales]:
        """A cache of norms of the residual's value, and of the hidden states in units of e^log: metrics share them."""
        return {}

    @property
    def log(self) -> LogScales:
        """The log-scale of the hidden states: the larger of x's and R's."""
        return torch.maximum(self.x.log, self.R.log)

    def log_size(self) -> LogScales:
        """The log of the largest |entry| of x and R of each sample."""
        return torch.maximum(self.x.log_size(), self.R.log_size())

    def tokens(self, log: LogScales | None = None) -> Float[Tensor, "batch token width"]:
        """The hidden states as an ordinary tensor, in units of e^log (of one, if left out)."""
        unit = torch.zeros_like(self.x.log) if log is None else log
        return self.valid.zero_padding(self.x.at(unit)[:, None] + self.R.at(unit))
