"""Every metric by name, with its symbol and the floor of the arithmetic that made its input.

Floating point cannot tell tokens apart that differ by less than a rounding error: below the floor a
value is noise. A metric that is a ratio has the floor `ROUNDING * eps`; an absolute one that times
the scale of its input; a count has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.metrics import attention, cosine, residual, spectrum
from rankscope.metrics.centre import Centre
from rankscope.metrics.tokens import Tokens, TokensLike, tokens, unit_of

ROUNDING = 8.0
"""Rounding errors of one block, in units of eps: `tests/profiles/test_floor.py` holds it against networks."""


@dataclass(frozen=True)
class Reading:
    """Measured values, with the floor beneath which they are rounding noise."""

    value: Float[Tensor, "*batch"]
    """0 where it underflows; `log10` still knows it."""
    log10: Float[Tensor, "*batch"]
    """log10 of |value|; -inf at zero."""
    floor: Float[Tensor, "*batch"]
    """0 where the arithmetic resolves any value."""

    @classmethod
    def of(cls, value: Float[Tensor, "*batch"], floor: Float[Tensor, "*batch"]) -> "Reading":
        """A value within floating point's range."""
        return cls(value, value.abs().log10(), floor)

    @property
    def below_floor(self) -> Bool[Tensor, "*batch"]:
        """True where the value cannot be told from rounding noise."""
        return (self.value.abs() <= self.floor) & (self.floor > 0)


@dataclass(frozen=True)
class Metric:
    """A named number of tokens X or of an attention matrix P."""

    name: str
    symbol: str
    """For terminals."""
    tex: str
    """For figures."""
    of: Literal["tokens", "attention", "heads"]
    """Of tokens X, of attention P, or of what each head adds, `[batch, head, token, width]`."""
    compute: Callable[..., Tensor]
    scale: Callable[..., Tensor] | None = None
    """What the floor is relative to; None when the value is itself a ratio."""
    power: int = 1
    """The power of eps with which the value's noise goes: 2 for an energy."""
    count: bool = False
    """A count: no floor, but a tolerance that follows the arithmetic."""

    def read(self, x: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Reading:
        """Measure, and say the floor. `unit` is the eps of the arithmetic that made x (its dtype's own
        if left out): a float32 network's state has float32's floor however it is stored."""
        if self.of == "heads" and padding is not None and isinstance(x, Tensor):
            padding = padding[:, None].expand(x.shape[:-1])
        if self.of != "attention":
            x = tokens(x, padding)
        if unit is None:
            unit = x.unit if isinstance(x, Tokens) else unit_of(x.dtype)
        if self.count:
            value = self.compute(x, padding, unit=unit)
            return Reading.of(value, torch.zeros_like(value))
        value = self.compute(x, padding)
        scale = torch.ones_like(value) if self.scale is None else self.scale(x, padding)
        return Reading.of(value, (ROUNDING * unit) ** self.power * scale)


def _residuals(name: str, symbol: str, tex: str, norm: residual.Norm) -> list[Metric]:
    """A residual and its relative form, in one norm."""
    absolute, relative = getattr(residual, name), getattr(residual, f"relative_{name}")
    whole, whole_tex = symbol.replace("res X", "X"), tex.replace(r"\mathrm{res}\,X", "X")
    return [
        Metric(name, symbol, tex, "tokens", absolute, scale=partial(residual.token_norm, norm=norm)),
        Metric(f"relative_{name}", f"{symbol} / {whole}", f"{tex} / {whole_tex}", "tokens", relative),
    ]


def _of_residual(name: str, symbol: str, tex: str) -> Metric:
    """A property of the residual's shape: as uncertain as the residual is, relative to the tokens."""
    compute = getattr(spectrum, name)

    def scale(X: TokensLike, padding: Tensor | None = None) -> Tensor:
        return compute(X, padding) / residual.relative_mu(X, padding).clamp(min=1e-300)

    return Metric(name, symbol, tex, "tokens", compute, scale=scale)


_TOKENS = [
    *_residuals("residual", "‖res X‖₁,∞", r"\|\mathrm{res}\,X\|_{1,\infty}", "composite"),
    *_residuals("mu", "‖res X‖_F", r"\|\mathrm{res}\,X\|_F", "frobenius"),
    *_residuals("spectral_residual", "‖res X‖₂", r"\|\mathrm{res}\,X\|_2", "spectral"),
    *_residuals("max_residual", "max |res X|", r"\max\,|\mathrm{res}\,X|", "max"),
    Metric(
        "high_frequency_share", "‖HC X‖² / ‖X‖²", r"\|HC\,X\|_F^2 / \|X\|_F^2", "tokens",
        residual.high_frequency_share, power=2,
    ),
    Metric("numerical_rank", "rank X", r"\mathrm{rank}\,X", "tokens", spectrum.numerical_rank, count=True),
    Metric("affine_rank", "rank res X", r"\mathrm{rank\,res}\,X", "tokens", spectrum.affine_rank, count=True),
    Metric("stable_rank", "‖X‖_F² / ‖X‖₂²", r"\|X\|_F^2 / \|X\|_2^2", "tokens", spectrum.stable_rank),
    Metric("effective_rank", "exp H(σ)", r"\exp H(\sigma)", "tokens", spectrum.effective_rank),
    Metric(
        "participation_ratio", "(Σσ²)² / Σσ⁴", r"(\sum\sigma^2)^2 / \sum\sigma^4", "tokens",
        spectrum.participation_ratio,
    ),
    Metric(
        "sigma_min", "σ_min(X)", r"\sigma_{\min}(X)", "tokens", spectrum.sigma_min,
        scale=partial(residual.token_norm, norm="spectral"),
    ),
    Metric("mean_cosine", "mean cos(xᵢ, xⱼ)", r"\mathrm{mean}\,\cos(x_i, x_j)", "tokens", cosine.mean_cosine),
    Metric(
        "mean_abs_cosine", "mean |cos(xᵢ, xⱼ)|", r"\mathrm{mean}\,|\cos(x_i, x_j)|", "tokens",
        cosine.mean_abs_cosine,
    ),
    _of_residual(
        "residual_stable_rank", "‖res X‖_F² / ‖res X‖₂²",
        r"\|\mathrm{res}\,X\|_F^2 / \|\mathrm{res}\,X\|_2^2",
    ),
    _of_residual("residual_effective_rank", "exp H(σ(res X))", r"\exp H(\sigma(\mathrm{res}\,X))"),
    _of_residual("residual_singular_ratio", "σ₂ / σ₁ of res X", r"\sigma_2 / \sigma_1\,(\mathrm{res}\,X)"),
    Metric(
        "mean_cosine_gap", "1 − mean cos(xᵢ, xⱼ)", r"1 - \mathrm{mean}\,\cos(x_i, x_j)", "tokens",
        cosine.mean_cosine_gap, power=2,
    ),
    Metric(
        "max_cosine_gap", "1 − min cos(xᵢ, xⱼ)", r"1 - \min\,\cos(x_i, x_j)", "tokens",
        cosine.max_cosine_gap, power=2,
    ),
    Metric("min_cosine", "min cos(xᵢ, xⱼ)", r"\min\,\cos(x_i, x_j)", "tokens", cosine.min_cosine),
]  # fmt: skip
_ATTENTION = [
    Metric("dobrushin", "δ(P)", r"\delta(P)", "attention", attention.dobrushin),
    Metric("entropy", "H(P)", "H(P)", "attention", attention.entropy),
    Metric(
        "second_singular_value", "σ₂(P)", r"\sigma_2(P)", "attention", attention.second_singular_value
    ),
    Metric(
        "spectral_gap", "σ₁(P) − σ₂(P)", r"\sigma_1(P) - \sigma_2(P)", "attention", attention.spectral_gap
    ),
    Metric("first_token_mass", "mean Pᵢ₁", r"\mathrm{mean}\,P_{i1}", "attention", attention.first_token_mass),
    Metric(
        "row_sum_defect", "max |Σⱼ Pᵢⱼ − 1|", r"\max_i |\sum_j P_{ij} - 1|", "attention",
        attention.row_sum_defect,
    ),
]  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in [*_TOKENS, *_ATTENTION]}


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
    return replace(found, name=name, compute=partial(found.compute, centre=centre))


def symbol_of(name: str, tex: bool = False) -> str:
    """How a table or a figure writes a metric; one that is not known here, as of a file, is its own name.

    >>> symbol_of("mu"), symbol_of("mine")
    ('‖res X‖_F', 'mine')
    """
    try:
        found = metric(name)
    except MetricError:
        return rf"\mathrm{{{name}}}".replace("_", r"\_") if tex else name
    return found.tex if tex else found.symbol


def _of_heads(name: str) -> Metric:
    """A metric of tokens, read off each head's contribution to the attention branch."""
    found = metric(name.removeprefix("head_"))
    if found.of != "tokens":
        raise MetricError(f"head_ goes before a metric of tokens, as in head_mu; got {name!r}")
    symbol, tex = f"{found.symbol}, X = head", rf"{found.tex},\ X = \mathrm{{head}}"
    return replace(found, name=name, of="heads", symbol=symbol, tex=tex)
