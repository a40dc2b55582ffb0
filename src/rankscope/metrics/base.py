"""`Metric`: one object that knows everything about a number that says how uniform tokens are, and what it is read off.

**Tokens** come as `[*batch, token, width]`; `padding` is `[*batch, token]`, True where a token is padding (Hugging
Face's `attention_mask == 0`). `tokens` is the one entrance of every metric: checked, upcast to float64, padded rows set
to zero and never counted afterwards, so a padded batch gives what each sequence gives alone.

The built-in metrics are made in the file of their family (`residuals.py`, `spectrum.py`, `cosine.py`,
`attention.py`, `routing.py`), next to the functions that compute them; `catalogue.py` finds them by name. A
metric that you write is made in the same way and goes wherever a name goes.

Floating point cannot tell tokens apart that differ by less than a rounding error: below the **floor** a value
is noise. A metric that is a ratio has the floor `ROUNDING * eps`; an absolute one that times the scale of its
input; a count has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rankscope.errors import MetricError, TokensError, require, require_one_of
from rankscope.metrics.norms import ORDER, Norms, is_fused, token_norms
from rankscope.metrics.rows import PatternRows, RowStatistics
from rankscope.shapes import Bool, Float, Int

Values = Float[Tensor, "*batch"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens ready to be measured, by one metric or many: what several of them need is computed once."""

    given: Float[Tensor, "*batch token width"]  # in the dtype that they have; padded ones may hold anything
    valid: Bool[Tensor, "*batch token"]  # True at tokens, False at padding
    unit: float  # the eps of the dtype of `given`
    unpadded: bool = False  # whether every token is known to be valid
    memo: dict[str, Tensor] = field(default_factory=dict)
    broken: Bool[Tensor, "*batch"] | None = None  # samples with NaN or infinity, taken as zero; None if there are none
    fused: bool = False  # whether the norms of X and of its residual are best taken together, as `norms`

    @cached_property
    def count(self) -> Int[Tensor, "*batch"]:
        """The number of valid tokens of each sample."""
        return self.valid.sum(-1)

    @cached_property
    def X(self) -> Float[Tensor, "*batch token width"]:
        """The tokens in float64, zero at padded tokens and in broken samples."""
        valid = self.valid if self.broken is None else self.valid & ~self.broken[..., None]
        X = self.given.to(torch.float64)
        return X if self.unpadded and self.broken is None else X.masked_fill(~valid[..., None], 0.0)

    @property
    def norms(self) -> Norms:
        """The norms of X and of its residual about the mean that `token_norms` takes in one go."""
        return self.once("norms", lambda: token_norms(self.given, None if self.unpadded else self.valid))

    def norm(self, norm: str, residual: bool) -> Tensor:
        """One of `norms`; zero of a broken sample."""
        value = self.norms[ORDER[norm], int(residual)]
        return value if self.broken is None else value.masked_fill(self.broken, 0.0)

    def once(self, what: str, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor of this name, computed at the first call; not to be changed in place."""
        if what not in self.memo:
            self.memo[what] = compute()
        return self.memo[what]


TokensLike = Tensor | Tokens  # What a metric takes: a tensor, or tokens that are ready, to measure them many times


def unit_of(dtype: torch.dtype) -> float:
    """The machine epsilon of an arithmetic; float64's at least, since metrics are computed there.

    >>> unit_of(torch.bfloat16)
    0.0078125
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float64).eps)


def nobody_can_look(X: Tensor) -> bool:
    """True while a CUDA graph is captured: the host cannot wait for numbers, and looks for NaN elsewhere."""
    return X.is_cuda and torch.cuda.is_current_stream_capturing()


def tokens(X: TokensLike, padding: Tensor | None = None) -> Tokens:
    """Check X and its padding, upcast to float64, zero the padded rows.

    >>> tokens(torch.ones(2, 5, 3), torch.arange(5).expand(2, 5) >= 4).count
    tensor([4, 4])
    """
    if isinstance(X, Tokens):
        return X
    if not isinstance(X, Tensor):
        sentence = f"tokens must be a torch tensor [batch, token, width]; got {type(X).__name__}: use torch.as_tensor"
        raise TokensError(sentence, subject="X")
    if X.ndim < 2:
        raise TokensError(f"tokens must have at least 2 dims [token, width]; received {tuple(X.shape)}", subject="X")
    if not X.is_floating_point():
        raise TokensError(f"tokens must be of a floating dtype; received {X.dtype}: embed token ids first", subject="X")
    valid = valid_tokens(X.shape[:-1], padding, X.device)
    on_cpu = X.device.type == "cpu"
    ready = _ready(X, valid, padding is None or (on_cpu and bool(valid.all())))
    if not X.numel() or (on_cpu and _is_finite(ready)):
        return ready
    if nobody_can_look(X):
        return ready
    unpadded, finite = padding is None, _finite_samples(ready)
    if unpadded:
        every = bool(finite.all())
    else:  # one copy to the host, and as few kernels before it as can be
        finite, count = torch.stack([finite, ready.count]).cpu()
        every, unpadded = bool(finite.all()), bool((count == X.shape[-2]).all())
    if not every:
        where = f"sample {(~finite).nonzero()[0].tolist()}" if finite.ndim else "a token"
        sentence = (
            f"tokens must be finite; {where} holds NaN or infinity: measure an earlier layer, or in a wider dtype"
        )
        raise TokensError(sentence, subject="X")
    return replace(ready, unpadded=unpadded)


def tokens_of(
    X: Float[Tensor, "*batch token width"], valid: Bool[Tensor, "*batch token"], unpadded: bool = False
) -> tuple[Tokens, Bool[Tensor, "*batch"]]:
    """Tokens ready to be measured, and the samples that hold NaN or infinity, which are taken as zero.

    For states that a network has just made: nothing is refused, and off the CPU nothing is waited for.
    `unpadded` where every token is known to count.
    """
    on_cpu = X.device.type == "cpu"  # where looking costs nothing
    ready = _ready(X, valid, unpadded or (on_cpu and bool(valid.all())))
    if not X.numel() or (on_cpu and _is_finite(ready)):
        return ready, torch.zeros(X.shape[:-2], dtype=torch.bool, device=X.device)
    broken = ~_finite_samples(ready)
    kept = {name: value for name, value in ready.memo.items() if name == "norms"}
    return replace(ready, memo=kept, broken=broken), broken


def _ready(X: Tensor, valid: Tensor, unpadded: bool) -> Tokens:
    """Tokens that nobody has looked at."""
    return Tokens(X, valid, unit_of(X.dtype), unpadded, fused=is_fused(X))


def _is_finite(ready: Tokens) -> bool:
    """True if there is surely no NaN or infinity among the entries: sums and squares may leave the range where these
    do not."""
    if ready.fused:  # a pass over large tokens that makes no copy
        return bool(ready.given.sum(dtype=torch.float64).isfinite())
    return bool(norm_in_range(ready).isfinite().all())


def _finite_samples(ready: Tokens) -> Bool[Tensor, "*batch"]:
    """True for samples without NaN and infinity at valid tokens."""
    if ready.fused:
        return ready.norms[ORDER["max"], 0] < torch.inf  # NaN is not below infinity
    least, largest = ready.X.flatten(-2).aminmax(dim=-1)  # NaN or infinite when any entry is
    return least.isfinite() & largest.isfinite()


def norm_in_range(ready: Tokens) -> Values:
    """`||X||_F`, where its squares stay in range; infinite or NaN when an entry is."""
    return ready.once("vector norm", lambda: torch.linalg.vector_norm(ready.X, dim=(-2, -1)))


def valid_tokens(shape: torch.Size, padding: Tensor | None, device: torch.device) -> Bool[Tensor, "*batch token"]:
    """True where a token counts; the padding is checked against the tokens' shape."""
    if padding is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool:
        got = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        sentence = f"padding must be a boolean tensor, True at padded tokens; received {got}: pass attention_mask == 0"
        raise TokensError(sentence, subject="padding")
    if padding.shape != shape:
        sentence = f"padding must have the tokens' shape {tuple(shape)}; received {tuple(padding.shape)}"
        raise TokensError(sentence, subject="padding")
    return ~padding.to(device)


def nan_where_empty(values: Values, of: Tokens) -> Values:
    """A sample without any token has no value: NaN, never a number that looks measured."""
    if of.unpadded and of.given.shape[-2]:
        return values
    return values.masked_fill(of.count == 0, torch.nan)


def ratio(numerator: Values, denominator: Values) -> Values:
    """numerator / denominator, with 0 / 0 = 0: zero tokens are all the same."""
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


ROUNDING = 8.0
"""Rounding errors of one block, in units of eps: `tests/profiles/test_readings.py` holds it against networks."""
Of = Literal["tokens", "attention", "scores", "heads", "routing"]
Sensitive = Literal["directions", "row differences"]
Centre = Literal["mean", "midrange", "argmin"]


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


Readings = list[tuple[Metric, Reading]]
"""Metrics of one layer, each with its reading."""
