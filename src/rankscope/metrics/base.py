"""`Metric`: one object that knows everything about a number that says how uniform tokens are.

The built-in metrics are made in the file of their family (`residuals.py`, `spectrum.py`, `cosine.py`,
`attention.py`, `routing.py`), next to the functions that compute them; `catalogue.py` finds them by name. A
metric that you write is made in the same way and goes wherever a name goes.

Floating point cannot tell tokens apart that differ by less than a rounding error: below the **floor** a value
is noise. A metric that is a ratio has the floor `ROUNDING * eps`; an absolute one that times the scale of its
input; a count has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rankscope.errors import MetricError, require, require_one_of
from rankscope.metrics.batch import Tokens, TokensLike, tokens, unit_of
from rankscope.metrics.centre import Centre
from rankscope.metrics.rows import PatternRows, RowStatistics
from rankscope.shapes import Bool, Float

ROUNDING = 8.0
"""Rounding errors of one block, in units of eps: `tests/profiles/test_floor.py` holds it against networks."""
Of = Literal["tokens", "attention", "scores", "heads", "routing"]
Sensitive = Literal["directions", "row differences"]


@dataclass(frozen=True)
class Reading:
    """Measured values, with the floor beneath which they are rounding noise."""

    value: Float[Tensor, "*batch"]  # 0 where it underflows; `log10` still knows it
    log10: Float[Tensor, "*batch"]  # log10 of |value|; -inf at zero
    floor: Float[Tensor, "*batch"]  # 0 where the arithmetic resolves any value
    digits: Float[Tensor, "*batch"] | None = None
    """How many decimal digits of the value rounding left, by a second pass; None where there was none."""

    @classmethod
    def of(cls, value: Float[Tensor, "*batch"], floor: Float[Tensor, "*batch"]) -> "Reading":
        """A reading of values within floating point's range."""
        return cls(value, value.abs().log10(), floor)

    def of_samples(self, samples: slice) -> "Reading":
        """The readings of some samples of the batch."""
        digits = None if self.digits is None else self.digits[samples]
        return Reading(self.value[samples], self.log10[samples], self.floor[samples], digits)

    @property
    def below_floor(self) -> Bool[Tensor, "*batch"]:
        """True where the value is **marked**: it cannot be told from rounding noise, or is no number at all."""
        return (self.value.abs() <= self.floor) & (self.floor > 0) | self.value.isnan()


class Meaning(NamedTuple):
    """A metric in words, for who meets it. n tokens of width d; P has n rows that sum to one."""

    range: str  # Between which values it lies
    small: str  # What a small value means
    large: str  # What a large value means
    note: str = ""  # What else one should know to read it
    equal: str = ""  # The value where all tokens are equal


@dataclass(frozen=True)
class Metric:
    """A named number of tokens X, of attention, of what each head adds, or of routing to experts.

    `compute(x, padding)` gives one number per sample (and head): of tokens and heads, x are `Tokens`, whose
    `x.X` is float64 and zero at padded tokens; of attention it is the pattern P, `[batch, head, token, token]`, of
    scores those whose softmax P is, and of routing the experts' weights `[batch, token, expert]`.

    >>> def energy(x, padding=None):
    ...     return x.X.square().sum((-2, -1))
    >>> Metric("energy", energy, degree=2, scale=energy).read(torch.ones(3, 2)).value
    tensor(6., dtype=torch.float64)
    """

    name: str
    compute: Callable[..., Tensor]
    symbol: str = ""  # For terminals; the name, if left out
    tex: str = ""  # For figures; the name, if left out
    of: Of = "tokens"
    """Of tokens X, of the attention pattern P, of the scores whose softmax P is, of what each head adds,
    `[batch, head, token, width]`, or of routing."""
    meaning: Meaning | None = None
    """Its range, what small and large values mean, and its value where all tokens are equal."""

    # What it says about collapse.
    direction: Literal[-1, 0, 1] = 0
    """1 where a large value means that tokens differ, -1 where it means that they are the same; or 0."""
    share: bool = False
    """Whether it is by how much tokens differ as a share of their size, so that it can have a threshold."""

    # Its floor.
    degree: int | float = 0
    """c X has |c|^degree times the value of X: 0 of ratios, ranks and angles, 1 of norms, 2 of energies."""
    scale: Callable[..., Tensor] | None = None
    """What the floor is relative to, called as `compute` is; None when the value is itself a ratio."""
    power: int = 1  # The power of eps with which the value's noise goes: 2 for an energy of what tokens differ by
    count: bool = False
    """A count: no floor, but a tolerance that follows the arithmetic: `compute(x, padding, unit=eps)`."""

    # How deviation arithmetic reads it.
    rule: Callable[..., Reading] | None = None
    """The reading at any scale: `rule(ScaledTokens)`, or of attention `rule(ScaledPattern)` (see
    `log_readings.py`). Left out, it is read off float64 tokens of size one, and scaled by its degree."""
    rule_streams: bool = False
    """Of attention: whether the rule never asks for the whole matrix, so that it reads long contexts."""
    sensitive_to: Sensitive | None = None
    """What a second pass must agree on, beside the tokens and the value, for the reading to stand: the
    directions of single tokens, however short; or by what the rows of a pattern differ."""

    # How it is computed where there are choices.
    centres: bool = False  # Whether `compute` and `rule` take `centre=`, as residuals do
    by_row: Callable[..., Tensor] | None = None
    """Of attention: a number of each row, `by_row(rows of P, valid)`, where the value is their mean, or with
    `largest` the largest. Long contexts are read so, a block of rows at a time."""
    largest: bool = False
    from_scores: Callable[[RowStatistics], Tensor] | None = None
    """Of attention and of scores: a number of each row from what is known of it without P, where the value is their
    mean, or with `largest` the largest. `watch` reads it so while fused kernels run."""
    by_head: Callable[[PatternRows], Tensor] | None = None
    """Of attention: its value through blocks of rows of P, made as often as they are asked for: how long
    contexts are read where a number of each row will not do."""

    def __post_init__(self) -> None:
        require_one_of(f"`of` of metric {self.name!r}", self.of, get_args(Of), MetricError, "of")
        scaled = not self.count and self.of in ("tokens", "heads")
        sentence = f"a count and a metric of attention, scores or routing have degree 0; {self.name!r} has"
        require(scaled or not self.degree, f"{sentence} {self.degree:g}", MetricError, "degree")
        sentence = f"a metric must say its floor; {self.name!r} is of degree {self.degree:g} and has no scale"
        advice = "give scale=, what rounding is relative to"
        require(self.scale is not None or not self.degree, f"{sentence}: {advice}", MetricError, "scale")
        sentence = f"a metric of scores must say how it is read off rows; {self.name!r} has no from_scores"
        require(self.of != "scores" or self.from_scores is not None, sentence, MetricError, "from_scores")
        object.__setattr__(self, "symbol", self.symbol or self.name)
        object.__setattr__(self, "tex", self.tex or tex_of(self.name))

    def read(self, x: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Reading:
        """The value of this metric, with its floor. `unit` is the eps of the arithmetic that made x (its
        dtype's own if left out): a float32 network's state has float32's floor however it is stored."""
        if self.of == "heads" and padding is not None and isinstance(x, Tensor):
            padding = padding[:, None].expand(x.shape[:-1])
        if self.of in ("tokens", "heads"):
            x = tokens(x, padding)
        if unit is None:
            unit = x.unit if isinstance(x, Tokens) else unit_of(x.dtype)
        if self.count:
            value = self._checked("value", self.compute(x, padding, unit=unit), x)
            return Reading.of(value, torch.zeros_like(value))
        value = self._checked("value", self.compute(x, padding), x)
        noise = (ROUNDING * unit) ** self.power
        if self.scale is None:
            return Reading.of(value, torch.full_like(value, noise))
        return Reading.of(value, noise * self._checked("scale", self.scale(x, padding), x))

    @property
    def streams(self) -> bool:
        """Whether it is read off blocks of rows of attention, where P is too large."""
        by_parts = self.by_row is not None or self.by_head is not None
        return by_parts and self.scale is None and not self.count

    def from_rows(self, numbers: Tensor, valid: Tensor, unit: float) -> Reading:
        """The reading from numbers of rows `[batch, head, token]`; `valid` `[batch, token]` are tokens."""
        return self.from_heads(self._over_rows(numbers, valid), unit)

    def _over_rows(self, numbers: Tensor, valid: Tensor) -> Tensor:
        """The mean, or the largest, of numbers of valid rows `[batch, head, token]`; NaN where there is none."""
        counts = valid[:, None]
        if not self.largest:
            return numbers.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)  # 0 / 0 is NaN
        value = numbers.masked_fill(~counts, -torch.inf).amax(-1)
        return value.masked_fill(value == -torch.inf, torch.nan)

    def from_heads(self, value: Tensor, unit: float) -> Reading:
        """The reading from values `[batch, head]` that were computed without P as a whole."""
        return Reading.of(value, torch.full_like(value, (ROUNDING * unit) ** self.power))

    def about(self, centre: str) -> "Metric":
        """This residual about another centre than the mean, named `name@centre`."""
        name = f"{self.name}@{centre}"
        require(self.centres, f"only a residual or mu has a centre to choose; got {name!r}", MetricError, "centre")
        require_one_of("centre", centre, get_args(Centre), MetricError)
        compute = partial(self.compute, centre=centre)
        rule = None if self.rule is None else partial(self.rule, centre=centre)
        meaning = self.meaning
        if meaning is not None and centre != "mean":
            # Zero is one of the centres among which the argmin is sought, and leaves the tokens as they are.
            shares = "0 to 1" if centre == "argmin" else "0 and above"
            nearest = {
                "argmin": "the point that makes this number smallest, as the definition has it",
                "midrange": "the middle of the largest and the smallest entry of each coordinate",
            }[centre]
            taken = f"Tokens are compared with {nearest}, not with their mean."
            note = f"{taken} {'' if self.share else meaning.note}".strip()
            meaning = meaning._replace(range=shares if self.share else meaning.range, note=note)
        return replace(self, name=name, compute=compute, rule=rule, meaning=meaning)

    def of_heads(self) -> "Metric":
        """A metric of tokens read off what each head adds to the attention branch, named `head_name`."""
        name = f"head_{self.name}"
        sentence = f"head_ goes before a metric of tokens, as in head_mu; got {name!r}"
        require(self.of == "tokens", sentence, MetricError, "metric")
        symbol, tex = f"{self.symbol}, X = head", rf"{self.tex},\ X = \mathrm{{head}}"
        return replace(self, name=name, of="heads", symbol=symbol, tex=tex, direction=0, share=False)

    def _checked(self, part: str, result: object, x: TokensLike) -> Tensor:
        expected = (x.given if isinstance(x, Tokens) else x).shape[:-2]
        if not isinstance(result, Tensor) or result.shape != expected:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            sentence = f"the {part} of metric {self.name!r} must be a tensor of shape {tuple(expected)}; received {got}"
            raise MetricError(sentence, subject=part)
        return result.to(torch.float64)


def from_statistics(
    metrics: Sequence[Metric], found: RowStatistics, valid: Bool[Tensor, "batch token"], unit: float
) -> list[tuple[Metric, Reading]]:
    """The readings of metrics by their rule `from_scores`.

    Scores are rounded by eps of their size, and so is what is read off them: the floor is `ROUNDING` times that, or
    that of `unit`, the eps of the arithmetic that the model computes in, if larger.
    """
    size = found.largest.abs().masked_fill(found.blind | ~valid[:, None], 0.0).amax(-1).to(torch.float64)
    rounding = ROUNDING * (unit_of(found.largest.dtype) * size).clamp(min=unit)
    readings = []
    for metric in metrics:
        assert metric.from_scores is not None
        value = metric._over_rows(metric.from_scores(found).to(torch.float64), valid)
        readings.append((metric, Reading.of(value, rounding**metric.power)))
    return readings


def tex_of(name: str) -> str:
    """A name as TeX writes it, for a metric without a formula."""
    return rf"\mathrm{{{name}}}".replace("_", r"\_")
