"""Every metric by name, with its symbol, its degree and the floor of the arithmetic that made its input.

Floating point cannot tell tokens apart that differ by less than a rounding error: below the floor a
value is noise. A metric that is a ratio has the floor `ROUNDING * eps`; an absolute one that times
the scale of its input; a count has none.

A metric of one's own is a `Metric` like these, and goes wherever a name goes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.metrics import attention, contraction, cosine, residuals, routing, singular, spectrum
from rankscope.metrics.centre import Centre, Norm
from rankscope.metrics.meanings import MEANINGS, Meaning, about
from rankscope.metrics.rows import Rows
from rankscope.metrics.tokens import Tokens, TokensLike, tokens, unit_of
from rankscope.shapes import Bool, Float

ROUNDING = 8.0
"""Rounding errors of one block, in units of eps: `tests/profiles/test_floor.py` holds it against networks."""
Of = Literal["tokens", "attention", "heads", "routing"]


@dataclass(frozen=True)
class Reading:
    """Measured values, with the floor beneath which they are rounding noise."""

    value: Float[Tensor, "*batch"]
    """0 where it underflows; `log10` still knows it."""
    log10: Float[Tensor, "*batch"]
    """log10 of |value|; -inf at zero."""
    floor: Float[Tensor, "*batch"]
    """0 where the arithmetic resolves any value."""
    digits: Float[Tensor, "*batch"] | None = None
    """How many digits of the value a second pass agreed on; None where there was none."""

    @classmethod
    def of(cls, value: Float[Tensor, "*batch"], floor: Float[Tensor, "*batch"]) -> "Reading":
        """A value within floating point's range."""
        return cls(value, value.abs().log10(), floor)

    def of_samples(self, here: slice) -> "Reading":
        """Those of some samples."""
        digits = None if self.digits is None else self.digits[here]
        return Reading(self.value[here], self.log10[here], self.floor[here], digits)

    @property
    def below_floor(self) -> Bool[Tensor, "*batch"]:
        """True where the value cannot be told from rounding noise."""
        return (self.value.abs() <= self.floor) & (self.floor > 0)


@dataclass(frozen=True)
class Metric:
    """A named number of tokens X, of an attention matrix P, of what each head adds, or of how a mixture of
    experts routes.

    `compute(x, padding)` gives one number per sample (and head): of tokens and heads, x are `Tokens`, whose
    `x.X` is float64 and zero at padded tokens; of attention it is P, `[batch, head, token, token]`, of
    routing the experts' weights `[batch, token, expert]`.

    >>> def energy(x, padding=None):
    ...     return x.X.square().sum((-2, -1))
    >>> Metric("energy", energy, degree=2, scale=energy).read(torch.ones(3, 2)).value
    tensor(6., dtype=torch.float64)
    """

    name: str
    compute: Callable[..., Tensor]
    symbol: str = ""
    """For terminals; the name, if left out."""
    tex: str = ""
    """For figures; the name, if left out."""
    of: Of = "tokens"
    """Of tokens X, of attention P, of what each head adds, `[batch, head, token, width]`, or of routing."""
    degree: int | float = 0
    """c X has |c|^degree times the value of X: 0 of ratios, ranks and angles, 1 of norms, 2 of energies."""
    scale: Callable[..., Tensor] | None = None
    """What the floor is relative to, called as `compute` is; None when the value is itself a ratio."""
    power: int = 1
    """The power of eps with which the value's noise goes: 2 for an energy of what tokens differ by."""
    count: bool = False
    """A count: no floor, but a tolerance that follows the arithmetic: `compute(x, padding, unit=eps)`."""
    rule: Callable[..., Reading] | None = None
    """How deviation arithmetic reads it at any scale: `rule(state)`, and of attention `rule(attention,
    padding)`. Left out, it is read off float64 tokens of size one, and scaled by its degree."""
    by_row: Callable[..., Tensor] | None = None
    """Of attention: each row's number, `by_row(rows of P, real)`, where the value is their mean, or with
    `largest` the largest. Long contexts are read so, a block of rows at a time."""
    largest: bool = False
    by_head: Callable[[Rows], Tensor] | None = None
    """Of attention: its value through blocks of rows of P, made as often as they are asked for: how long
    contexts are read where a number of each row will not do."""
    meaning: Meaning | None = None
    """Its range, and what small and large values say; for `rankscope metrics`."""

    def __post_init__(self) -> None:
        if self.of not in get_args(Of):
            raise MetricError(one_of(f"`of` of metric {self.name!r}", self.of, get_args(Of)))
        if self.degree and (self.count or self.of in ("attention", "routing")):
            raise MetricError(
                "a count and a metric of attention or of routing have degree 0; "
                f"{self.name!r} has {self.degree:g}"
            )
        if self.degree and self.scale is None:
            raise MetricError(
                f"a metric must say its floor; {self.name!r} is of degree {self.degree:g} and has no scale: "
                "give scale=, what rounding is relative to (the value itself: scale=compute)"
            )
        object.__setattr__(self, "symbol", self.symbol or self.name)
        object.__setattr__(self, "tex", self.tex or _tex_of(self.name))

    def read(self, x: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Reading:
        """Measure, and say the floor. `unit` is the eps of the arithmetic that made x (its dtype's own
        if left out): a float32 network's state has float32's floor however it is stored."""
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
        found = self.by_row is not None or self.by_head is not None
        return found and self.scale is None and not self.count

    def of_rows(self, numbers: Tensor, real: Tensor, unit: float) -> Reading:
        """The reading of all rows' numbers `[batch, head, token]`; `real` `[batch, token]` rows count."""
        counts = real[:, None]
        kept = numbers.masked_fill(~counts, 0.0)
        value = kept.amax(-1) if self.largest else kept.sum(-1) / counts.sum(-1)
        value = value.masked_fill(~counts.any(-1), torch.nan)
        return self.of_heads(value, unit)

    def of_heads(self, value: Tensor, unit: float) -> Reading:
        """The reading of values `[batch, head]` that were found without P as a whole."""
        return Reading.of(value, torch.full_like(value, (ROUNDING * unit) ** self.power))

    def _checked(self, what: str, found: object, x: TokensLike) -> Tensor:
        expected = (x.X if isinstance(x, Tokens) else x).shape[:-2]
        if not isinstance(found, Tensor) or found.shape != expected:
            raise MetricError(
                f"the {what} of metric {self.name!r} must be a tensor of shape {tuple(expected)}, a number "
                "for each sample (and head); received "
                f"{tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__}"
            )
        return found.to(torch.float64)


def _residuals(name: str, symbol: str, tex: str, norm: Norm) -> list[Metric]:
    """A residual and its relative form, in one norm."""
    absolute, relative = getattr(residuals, name), getattr(residuals, f"relative_{name}")
    whole, whole_tex = symbol.replace("res X", "X"), tex.replace(r"\mathrm{res}\,X", "X")
    return [
        Metric(name, absolute, symbol, tex, degree=1, scale=partial(residuals.token_norm, norm=norm)),
        Metric(f"relative_{name}", relative, f"{symbol} / {whole}", f"{tex} / {whole_tex}"),
    ]


def _of_residual(name: str, symbol: str, tex: str) -> Metric:
    """A property of the residual's shape: as uncertain as the residual is, relative to the tokens."""
    compute = getattr(spectrum, name)

    def scale(X: TokensLike, padding: Tensor | None = None) -> Tensor:
        return compute(X, padding) / residuals.relative_mu(X, padding).clamp(min=1e-300)

    return Metric(name, compute, symbol, tex, scale=scale)


_TOKENS = [
    *_residuals("residual", "‖res X‖₁,∞", r"\|\mathrm{res}\,X\|_{1,\infty}", "composite"),
    *_residuals("mu", "‖res X‖_F", r"\|\mathrm{res}\,X\|_F", "frobenius"),
    *_residuals("spectral_residual", "‖res X‖₂", r"\|\mathrm{res}\,X\|_2", "spectral"),
    *_residuals("max_residual", "max |res X|", r"\max\,|\mathrm{res}\,X|", "max"),
    Metric(
        "high_frequency_share", residuals.high_frequency_share, "‖HC X‖² / ‖X‖²",
        r"\|HC\,X\|_F^2 / \|X\|_F^2", power=2,
    ),
    Metric("numerical_rank", spectrum.numerical_rank, "rank X", r"\mathrm{rank}\,X", count=True),
    Metric("affine_rank", spectrum.affine_rank, "rank res X", r"\mathrm{rank\,res}\,X", count=True),
    Metric("stable_rank", spectrum.stable_rank, "‖X‖_F² / ‖X‖₂²", r"\|X\|_F^2 / \|X\|_2^2"),
    Metric("effective_rank", spectrum.effective_rank, "exp H(σ)", r"\exp H(\sigma)"),
    Metric(
        "participation_ratio", spectrum.participation_ratio, "(Σσ²)² / Σσ⁴",
        r"(\sum\sigma^2)^2 / \sum\sigma^4",
    ),
    Metric(
        "sigma_min", spectrum.sigma_min, "σ_min(X)", r"\sigma_{\min}(X)", degree=1,
        scale=partial(residuals.token_norm, norm="spectral"),
    ),
    Metric("mean_cosine", cosine.mean_cosine, "mean cos(xᵢ, xⱼ)", r"\mathrm{mean}\,\cos(x_i, x_j)"),
    Metric(
        "mean_abs_cosine", cosine.mean_abs_cosine, "mean |cos(xᵢ, xⱼ)|", r"\mathrm{mean}\,|\cos(x_i, x_j)|"
    ),
    _of_residual(
        "residual_stable_rank", "‖res X‖_F² / ‖res X‖₂²",
        r"\|\mathrm{res}\,X\|_F^2 / \|\mathrm{res}\,X\|_2^2",
    ),
    _of_residual("residual_effective_rank", "exp H(σ(res X))", r"\exp H(\sigma(\mathrm{res}\,X))"),
    _of_residual("residual_singular_ratio", "σ₂ / σ₁ of res X", r"\sigma_2 / \sigma_1\,(\mathrm{res}\,X)"),
    Metric(
        "mean_cosine_gap", cosine.mean_cosine_gap, "1 − mean cos(xᵢ, xⱼ)",
        r"1 - \mathrm{mean}\,\cos(x_i, x_j)", power=2,
    ),
    Metric(
        "max_cosine_gap", cosine.max_cosine_gap, "1 − min cos(xᵢ, xⱼ)", r"1 - \min\,\cos(x_i, x_j)", power=2
    ),
    Metric("min_cosine", cosine.min_cosine, "min cos(xᵢ, xⱼ)", r"\min\,\cos(x_i, x_j)"),
]  # fmt: skip
_ATTENTION = [
    Metric(
        "dobrushin", attention.dobrushin, "δ(P)", r"\delta(P)", "attention", by_head=contraction.by_head
    ),
    Metric("entropy", attention.entropy, "H(P)", "H(P)", "attention", by_row=attention.entropy_of_rows),
    Metric(
        "second_singular_value", attention.second_singular_value, "σ₂(P)", r"\sigma_2(P)", "attention",
        by_head=singular.second_by_head,
    ),
    Metric(
        "spectral_gap", attention.spectral_gap, "σ₁(P) − σ₂(P)", r"\sigma_1(P) - \sigma_2(P)", "attention",
        by_head=singular.gap_by_head,
    ),
    Metric(
        "first_token_mass", attention.first_token_mass, "mean Pᵢ₁", r"\mathrm{mean}\,P_{i1}", "attention",
        by_row=attention.first_token_of_rows,
    ),
    Metric(
        "row_sum_defect", attention.row_sum_defect, "max |Σⱼ Pᵢⱼ − 1|", r"\max_i |\sum_j P_{ij} - 1|",
        "attention", by_row=attention.defect_of_rows, largest=True,
    ),
]  # fmt: skip

_ROUTING = [
    Metric("expert_load", routing.expert_load, "max load", r"\max_e\,\mathrm{load}_e", "routing"),
    Metric("expert_entropy", routing.expert_entropy, "H(load)", r"H(\mathrm{load})", "routing"),
]

METRICS: dict[str, Metric] = {
    each.name: replace(each, meaning=MEANINGS[each.name]) for each in [*_TOKENS, *_ATTENTION, *_ROUTING]
}


@cache
def metric(name: str) -> Metric:
    """The metric of that name; `residual@argmin` and its like take the residual about another centre,
    `head_residual` and its like a metric of tokens for what each head adds.

    >>> metric("mu").symbol
    '‖res X‖_F'
    """
    if name.startswith("head_"):
        return _of_heads(name)
    base, at, centre = name.partition("@")
    if base not in METRICS:
        raise MetricError(one_of("metric", base, METRICS))
    found = METRICS[base]
    if not at:
        return found
    if "residual" not in base and not base.endswith("mu"):
        raise MetricError(f"only a residual or mu has a centre to choose; got {name!r}")
    if centre not in get_args(Centre):
        raise MetricError(one_of("centre", centre, get_args(Centre)))
    meaning = about(found.meaning, centre, base.startswith("relative_"))
    return replace(found, name=name, compute=partial(found.compute, centre=centre), meaning=meaning)


MetricsLike = str | Metric | Sequence[str | Metric]
"""Wherever metrics are asked for: one or several, by name or as objects."""


def chosen_metrics(who: str, metrics: MetricsLike) -> list[Metric]:
    """The metrics asked for, each once; at least one, and no two of one name."""
    found: dict[str, Metric] = {}
    alone = isinstance(metrics, str) or not isinstance(metrics, Iterable)
    for each in [metrics] if alone else metrics:  # type: ignore[union-attr]
        if not isinstance(each, str | Metric):
            raise MetricError(f"metrics must be names or Metric objects; received {type(each).__name__}")
        one = metric(each) if isinstance(each, str) else each
        known = METRICS.get(one.name, found.setdefault(one.name, one))
        if known != one:
            whose = "a built-in metric" if one.name in METRICS else "another in the same call"
            raise MetricError(f"a metric must have a name of its own; {one.name!r} is also {whose}")
    if not found:
        raise MetricError(f"{who} must be given at least one metric; received none")
    return list(found.values())


def symbol_of(name: str, tex: bool = False) -> str:
    """How a table or a figure writes a metric; one that is not known here, as of a file, is its own name.

    >>> symbol_of("mu"), symbol_of("mine")
    ('‖res X‖_F', 'mine')
    """
    try:
        found = metric(name)
    except MetricError:
        return _tex_of(name) if tex else name
    return found.tex if tex else found.symbol


def _tex_of(name: str) -> str:
    return rf"\mathrm{{{name}}}".replace("_", r"\_")


def _of_heads(name: str) -> Metric:
    """A metric of tokens, read off each head's contribution to the attention branch."""
    found = metric(name.removeprefix("head_"))
    if found.of != "tokens":
        raise MetricError(f"head_ goes before a metric of tokens, as in head_mu; got {name!r}")
    symbol, tex = f"{found.symbol}, X = head", rf"{found.tex},\ X = \mathrm{{head}}"
    return replace(found, name=name, of="heads", symbol=symbol, tex=tex)
