"""`State`: hidden states as a common token and the tokens' deviations from it, `X = 1 x^T + e^s R`.

Every rule (`rules.py`) takes a state and gives one; `propagate.py` makes the first, readings and metrics are taken off
them (`readings.py`). x and R each carry their own log-scale per sample (`Scaled`), so neither collapse nor growth
can leave the range of floating point. Where tokens are close, x is their mean and R what is left, to full relative
precision however small it is. Where they are far apart (a token deviates by over half of the mean's length), no mean is
kept apart: x is 0 and R the tokens themselves, so that a token that is exactly zero stays so.

R is known to float64's relative precision of its largest entries, and most rules keep it so. Where a rule leaves far
less of R than it was given (a norm that removes a difference in length, attention to tokens that R cannot tell apart),
the same rounding weighs more: a second pass measures how much (`second_pass.py`).

`Scaled` is a tensor at any scale, `e^log V`, with one log per sample, or per sample and head. float64 ends at 1e-308;
the residual of pure attention is at 1e-3964 by layer 8. A tensor V of entries of about size one with the log of its
scale beside it has no such end: the log is itself a float64, good down to `LOWEST`. `Entries` have a log for every
number. Every file of `deviation` computes with these; this one calls only `decisions.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.decisions import can_skip, must_compute, piecewise, saves_a_pass
from rankscope.doubled import near_log, two_sum
from rankscope.metrics import log_readings
from rankscope.shapes import Bool, Float

LogScales = log_readings.LogScales
PerturbTensor = Callable[[Tensor], Tensor]
"""What a second pass does to results of rules: it moves their last digits (`perturbation.py`)."""
LOWEST = log_readings.LOWEST  # logs end here: what is smaller counts as this, and zero has this log as well
STEEPEST = 600.0  # exponents are cut to +-600 where e^x is formed: 1e-261 and 1e261 act as zero and infinity there
WIDEST = 30.0  # how far the log of the largest entry of V may be from zero before V is rescaled
DISTANT = 300.0
"""Before a sum of two tensors whose logs differ by more, both are rescaled: the one at the larger scale may
be zero, and must not set the scale of the sum."""
HAS_TRITON = find_spec("triton") is not None
ROOT_OF_LARGEST = 1e150  # numbers up to which squares stay in range
SMALL = 1e-200  # factors below this go into the log
HUGE = 1e299  # `as_tensor` cuts numbers here


@dataclass(frozen=True)
class Scaled:
    """The tensor `e^log value`: `log` has one entry per sample, or one per sample and head."""

    value: Float[Tensor, "..."]
    log: LogScales

    @classmethod
    def plain(cls, value: Float[Tensor, "..."]) -> "Scaled":
        """An ordinary tensor as a scaled one, its log zero."""
        return cls(value, value.new_zeros(len(value)))

    def largest(self) -> LogScales:
        """The largest |entry| of each sample's value, without its scale."""
        return largest_entry(self.value, self.log.ndim)

    def log_size(self) -> LogScales:
        """The log of the largest |entry| of each sample, its scale included; `LOWEST` where all are zero."""
        size = self.largest()
        log = self.log + near_log(size.masked_fill(size == 0, 1.0))
        return log.masked_fill(size == 0, LOWEST).clamp(LOWEST, -LOWEST)

    def normalised(self) -> "Scaled":
        """Equal numbers with entries of value about one; where all are zero, the log is `LOWEST`. A sample that holds
        infinity becomes NaN: beside it no other entry keeps its size."""
        near, kept, moved, root = _by_kernel(self) if has_kernel(self.value) else _rescaling(self)
        if saves_a_pass("scaled.normalised", self.log, near):
            return Scaled(self.value, kept())
        half = spread(root(), self.value)
        if saves_a_pass("scaled.one_factor", self.log, root, ROOT_OF_LARGEST):
            return Scaled(self.value * (half * half), moved())
        return Scaled((self.value * half).mul_(half), moved())  # e^-step itself overflows at subnormal sizes

    def unit(self) -> "Scaled":
        """Equal numbers with the largest |entry| of value about one, so that squares stay in range. What rounding moves
        the log by, a part of one where that is 1e13, the value takes up: shares of other numbers at `log` are exact."""
        size = self.largest()
        log = self.log + size.masked_fill(size == 0, 1.0).log()
        return Scaled(self.value / spread((log - self.log).exp(), self.value), log.masked_fill(size == 0, LOWEST))

    def __add__(self, other: "Scaled") -> "Scaled":
        """The sum, at the larger of the two scales; an operand that is zero does not set the scale."""
        a, b = self, other
        if not saves_a_pass("scaled.add_near", a.log, lambda: self.log - other.log, DISTANT):
            a, b = a.normalised(), b.normalised()
        if has_kernel(a.value) and a.value.shape == b.value.shape:
            from rankscope.deviation.kernels_triton import added

            return Scaled(*added(a.value, b.value, a.log, b.log))
        if saves_a_pass("scaled.add_swapped", a.log, lambda: b.log > a.log):
            a, b = b, a  # the first needs no rescaling below
        log = torch.maximum(a.log, b.log)
        return Scaled(torch.addcmul(a.at(log), b.value, spread((b.log - log).exp(), b.value)), log)

    def __mul__(self, factor: float | Tensor) -> "Scaled":
        """The numbers times a factor; a float below `SMALL` goes into the log."""
        if isinstance(factor, float) and 0.0 < abs(factor) < SMALL:  # subnormal products have lost their digits
            return Scaled(self.value * math.copysign(1.0, factor), self.log + math.log(abs(factor)))
        return self if factor == 1.0 else Scaled(self.value * factor, self.log)

    def at(self, log: LogScales) -> Float[Tensor, "..."]:
        """The numbers as an ordinary tensor in units of e^log; beyond e^600 of them it is cut off."""
        step = self.log - log
        if saves_a_pass("scaled.at", step, lambda: step, 0.0):
            return self.value
        return self.value * spread(step.clamp(max=STEEPEST).exp(), self.value)

    def explicit(self) -> Float[Tensor, "..."]:
        """The numbers as an ordinary tensor; beyond 1e+-261 it is cut off."""
        return self.at(torch.zeros_like(self.log))

    def by_head(self) -> "Scaled":
        """Numbers `[batch, head, ...]` that have a log per sample, with a log per sample and head."""
        return Scaled(self.value, self.log[:, None].expand(self.value.shape[:2])).normalised()

    def heads_as_samples(self) -> "Scaled":
        """Numbers `[batch, head, ...]` that have a log per sample and head, as those of batch * head samples."""
        return Scaled(self.value.flatten(0, 1), self.log.flatten())

    def samples_as_heads(self, shape: tuple[int, ...]) -> "Scaled":
        """The inverse of `heads_as_samples`, where `shape` begins with batch and head."""
        return Scaled(self.value.view(*shape[:2], *self.value.shape[1:]), self.log.view(shape[:2]))

    def __getitem__(self, at: Any) -> "Scaled":
        """Some samples, or some heads of samples, by an index of the axes that the log has too."""
        return Scaled(self.value[at], self.log[at])

    def together(self) -> "Scaled":
        """Numbers that have a log per head, with one log per sample: that of the largest head."""
        log = self.log.amax(1)
        return Scaled(self.at(log[:, None].expand_as(self.log)), log)

    def side_by_side(self) -> "Scaled":
        """Numbers `[batch, head, token, width]` that have a log per head, as `[batch, token, head * width]` at the log
        of the largest head."""
        log, heads = self.log.amax(1), self.value.transpose(1, 2)
        factor = (self.log - log[:, None]).clamp(max=STEEPEST).exp()[:, None, :, None]
        if type(heads) is Tensor and not heads.requires_grad:  # not by a product that is then copied
            joined = torch.mul(heads, factor, out=torch.empty(heads.shape, dtype=heads.dtype, device=heads.device))
        else:
            joined = heads * factor
        return Scaled(joined.flatten(-2), log)

    def mapped(self, linear: Callable[[Tensor], Tensor]) -> "Scaled":
        """The image of the numbers under a linear map of tensors, which leaves the scale alone."""
        return Scaled(linear(self.value), self.log)


def largest_entry(value: Tensor, axes: int) -> Tensor:
    """The largest |entry| over all axes but the first `axes`; 0 where there is none."""
    flat = value.flatten(axes)
    if not flat.shape[-1]:
        return flat.sum(-1)
    if flat.device.type == "cpu":  # six times as fast as the norm there; elsewhere three kernels more
        return torch.maximum(flat.amax(-1), -flat.amin(-1))
    return torch.linalg.vector_norm(flat, ord=torch.inf, dim=-1)


def has_kernel(value: Tensor) -> bool:
    """True if one kernel computes what is asked of each sample of these numbers: on a GPU."""
    return value.is_cuda and HAS_TRITON and value.numel() > 0 and type(value) is Tensor


Rescaling = tuple[Callable[[], Tensor], ...]
"""Of samples, each computed when it is called: whether values may stay as they are; the log beside them if they do; the
log beside values of size one; the root of what makes values of size one."""


def _rescaling(numbers: Scaled) -> Rescaling:
    """What `Scaled.normalised` needs. The log of the size is 0 of zero and NaN of infinity."""
    size, log = numbers.largest(), numbers.log
    zero = size == 0
    step = near_log(size.masked_fill(zero, 1.0))
    step = step.masked_fill(step.isinf(), torch.nan)

    def within(log: LogScales) -> LogScales:
        return log.masked_fill(zero, LOWEST).clamp(LOWEST, -LOWEST)

    return lambda: step.abs() <= WIDEST, lambda: within(log), lambda: within(log + step), lambda: (-step / 2).exp()


def _by_kernel(numbers: Scaled) -> Rescaling:
    """`_rescaling` by one kernel."""
    from rankscope.deviation.kernels_triton import rescaling

    rescaled = rescaling(numbers.value, numbers.log, WIDEST, LOWEST)
    return tuple((lambda t=t: t) for t in rescaled)


def chosen(pick: Bool[Tensor, "*batch"], a: Scaled, b: Scaled) -> Scaled:
    """The samples of a where `pick` is true, those of b elsewhere."""
    return Scaled(torch.where(spread(pick, a.value), a.value, b.value), torch.where(pick, a.log, b.log))


def spread(per_sample: Tensor, like: Tensor) -> Tensor:
    """A tensor per sample as `[batch, 1, 1, ...]`, with as many axes as `like`, to multiply it."""
    return per_sample.reshape(*per_sample.shape, *[1] * (like.ndim - per_sample.ndim))


def largest_log(logs: Tensor) -> Tensor:
    """The largest log of each sample."""
    flat = logs.flatten(1)
    return flat.amax(1).clamp(min=LOWEST / 4) if flat.shape[1] else flat.sum(1)


def as_tensor(part: Scaled) -> Tensor:
    """Scaled numbers as an ordinary tensor, cut at 1e299."""
    beyond = (part.log - STEEPEST).clamp(0.0, STEEPEST).exp()
    return (part.explicit() * spread(beyond, part.value)).clamp(-HUGE, HUGE)


@dataclass(frozen=True)
class Entries:
    """Numbers `sign e^log`, each with a log-scale of its own; where sign is zero, the log is -inf.

    One scale for all numbers of a sample or head is not enough where numbers of very different size are multiplied, as
    gates of heads (`attention.py`) and scores at their cap (`cap.py`): what is left of the largest may be less than
    what underflowed beside it."""

    sign: Tensor
    log: Tensor

    @classmethod
    def of(cls, part: Scaled) -> "Entries":
        """Scaled numbers with a scale for every entry."""
        return cls(part.value.sign(), spread(part.log, part.value) + part.value.abs().log())

    @classmethod
    def product(cls, factor: Tensor, exponent: Tensor) -> "Entries":
        """The numbers `factor e^exponent`, entry by entry, at any scale."""
        return cls(factor.sign(), factor.abs().log() + exponent)

    def mapped(self, f: Callable[[Tensor], Tensor]) -> "Entries":
        """The entries as `f`, which moves or repeats entries of a tensor, leaves them."""
        return Entries(f(self.sign), f(self.log))

    def __mul__(self, other: "Entries") -> "Entries":
        return Entries(self.sign * other.sign, self.log + other.log)

    def __neg__(self) -> "Entries":
        return Entries(-self.sign, self.log)

    def __add__(self, other: "Entries") -> "Entries":
        unit = torch.maximum(self.log, other.log).clamp(min=LOWEST)
        total = self.sign * (self.log - unit).exp() + other.sign * (other.log - unit).exp()
        return Entries(total.sign(), unit + total.abs().log())

    def or_(self, other: "Entries", where: Bool[Tensor, "..."]) -> "Entries":
        """These numbers, and those of `other` where a condition holds."""
        return Entries(torch.where(where, other.sign, self.sign), torch.where(where, other.log, self.log))

    def within(self, mask: Bool[Tensor, "sample ..."]) -> Scaled:
        """The numbers at the scale of each sample's largest, zero outside of the mask."""
        log = self.log.masked_fill(~mask, -torch.inf)
        largest = largest_log(log)
        return Scaled(self.sign * (log - spread(largest, log)).exp(), largest).normalised()


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
        # Where they are far apart: the tokens as they were given, not a rounded difference plus what was taken off.
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

        def whole() -> tuple[Scaled, Scaled]:
            zero = Scaled(torch.zeros_like(x.value), torch.full_like(x.log, LOWEST))
            if saves_a_pass("state.no_common_token", apart, lambda: self.x.log <= LOWEST):
                return zero, self.R
            return zero, (self.R + self.x.mapped(lambda v: v[:, None])).mapped(self.valid.zero_padding)

        x, R = piecewise("state.apart", apart, whole, (x, R))
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
