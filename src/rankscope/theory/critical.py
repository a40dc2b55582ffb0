"""The critical skip: the weight of the skip around attention at which tokens stop collapsing.

A skip of weight lambda holds tokens apart, attention pulls them together (Dong et al. 2021): below some
lambda the residual shrinks from layer to layer, above it grows. `critical_skip` finds that lambda by
bisection on the measured rate, and next to it the one at which the uniform state stops attracting
(`transverse.py`). The first is about these tokens, as far apart as they are and to this depth; the
second about tokens that are all but equal. They agree where tokens start close and layers are many.

The weight varied is `attention_skip` alone: it is the skip that the paper takes out, and the one that
serial and parallel blocks both have. The MLP's skip stays as it is.

Without norms and MLP, where `||res(attention)||_F <= c ||res X||_F` in every layer, tokens collapse below lambda =
1 - c and not above 1 + c, since `lambda - c <= mu' / mu <= lambda + c`. Measured at the critical weight, c is that
run's own (`bracket`). A c for every weight and input comes from the weights alone (`guaranteed`): for u orthogonal to
1 the entries of P u lie between the least and the largest of u, hence `||res(P u)|| <= sqrt(n / 2) ||u||` and `c =
max over layers of sqrt(n / 2) sum_h ||W_h||_2`. Uniform attention has `c = ||res P0||_2 ||sum_h W_h||_2`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import polars as pl
import torch
from torch import Tensor

from rankscope.deviation import applies, propagate, without_rule
from rankscope.errors import ArchitectureError, MetricError, RankscopeError, TokensError, require, require_one_of
from rankscope.metrics import valid_tokens
from rankscope.nets import Transformer, active_heads
from rankscope.nets import mask_matrix as matrix
from rankscope.profiles import measure
from rankscope.theory.logs import TEN
from rankscope.theory.theorem import outside
from rankscope.theory.transverse import Exponent, exponent, log_length, slope, transverse_modes
from rankscope.theory.weight_norms import value_parts

METRICS = ("mu", "relative_mu")
DEEP = 24  # Layers to measure a rate on, where the network has fewer
STILL = 0.01  # A change of the log by less than this, over the layers that a rate is of, is none

Rate = Callable[[float], float]  # The rate at a skip weight


@dataclass(frozen=True, eq=False, repr=False)
class CriticalSkip:
    """Where collapse stops, as measured and as theory has it."""

    weight: float | None  # Of the attention skip, where the measured rate crosses zero; None where it does not
    rate_low: float  # The measured rate at the low end: natural log of the metric, per layer
    rate_high: float
    why: str  # What was found, in a sentence
    theory: float | None  # Where the transverse exponent crosses zero; None where it does not, or is not defined
    theory_why: str
    bracket: tuple[float, float] | None
    """1 -+ c, c measured at the critical weight: the crossing lies within. None with a norm, an MLP, gates on
    heads, parts, no crossing, or another metric than mu."""
    guaranteed: tuple[float, float] | None
    """1 -+ c, c from the weights: below the first, mu shrinks in every layer on any input of as many
    tokens; above the second, it grows. None with a norm, an MLP, gates on heads, parts, or another metric than mu."""
    table: pl.DataFrame  # Every measured point: weight, rate

    def __repr__(self) -> str:
        outcome = (("measured", self.weight, self.why), ("in theory", self.theory, self.theory_why))
        rows = [f"{name:9}  {'–' if at is None else f'{at:.4g}':6}  {why}" for name, at, why in outcome]
        return "\n  ".join(["CriticalSkip", *rows])


def critical_skip(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    *,
    metric: str = "mu",
    depth: int | None = None,
    low: float = 0.0,
    high: float = 4.0,
    tolerance: float = 1e-3,
) -> CriticalSkip:
    """Find the weight of the attention skip at which tokens stop collapsing, by bisection and by theory.

    The rate at a weight is the slope of the metric's natural log against the layer over the second half of
    the layers, in deviation arithmetic, averaged over samples; a residual of exactly zero counts as -inf. A
    rate that is not monotone may cross zero more than once; one crossing from below is found. Every point
    runs the network on all of X: a few samples are enough.

    Args:
        net: The network.
        X: Tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padding.
        metric: `mu` (the residual's Frobenius norm) or `relative_mu` (its share of the tokens').
        depth: Layers repeat to this depth; the network's own, or 24 if that is more.
        low: The lowest skip weight tried.
        high: The highest skip weight tried.
        tolerance: How closely the crossing is found.

    >>> from rankscope.nets import Architecture
    >>> arch = Architecture(layers=2, width=8, heads=2, mlp="none", norm="none")
    >>> X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    >>> found = critical_skip(Transformer.random(arch), X, depth=8, low=0.5, high=1.4, tolerance=0.05)
    >>> round(found.weight, 1), round(found.theory, 1)
    (1.0, 1.0)
    """
    _check(net, X, metric, low, high, tolerance)
    net = net.to(torch.float64)
    net = net.variant(layers=max(net.arch.layers, DEEP) if depth is None else depth)
    X = X.to(dtype=torch.float64, device=net.device)
    crossing = partial(_crossing, low=low, high=high, tolerance=tolerance, layers=net.arch.layers)
    measured = crossing(lambda weight: _measured(net, X, padding, metric, weight))
    theory = _theory(net, X, padding, metric, crossing)
    bare = net.arch.norm == "none" and net.arch.mlp == "none" and not (net.arch.head_gate or net.arch.parts)
    elementary = bare and metric == "mu"
    return CriticalSkip(
        weight=measured.weight, rate_low=measured.points[0][1], rate_high=measured.points[1][1],
        why=measured.why, theory=theory.weight, theory_why=theory.why,
        bracket=_bracket(net, X, padding, measured.weight) if elementary else None,
        guaranteed=_guaranteed(net, X, padding) if elementary else None,
        table=pl.DataFrame(measured.points, schema=["weight", "rate"], orient="row"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Crossing:
    """What a bisection found; its points begin with the low end and the high one."""

    weight: float | None
    why: str
    points: list[tuple[float, float]]


def _check(net: Transformer, X: Tensor, metric: str, low: float, high: float, tolerance: float) -> None:
    require_one_of("metric", metric, METRICS, MetricError)
    sentence = f"0 <= low < high must be finite weights; got {low} and {high}"
    require(math.isfinite(high) and 0 <= low < high, sentence, ArchitectureError, "low")
    sentence = f"tolerance must be finite and > 0; got {tolerance}"
    require(math.isfinite(tolerance) and tolerance > 0, sentence, ArchitectureError, "tolerance")
    reason, kept = outside(net.arch), net.arch.kept_heads
    sentence = f"no critical skip is defined with {reason}: measure variants instead"
    require(not reason, sentence, ArchitectureError, "architecture")
    sentence = f"no deviation rule for {', '.join(without_rule(net))}: try net.variant(kernel=...)"
    require(applies(net), sentence, ArchitectureError, "architecture")
    sentence = "no head is active: keep some with net.variant(heads=...)"
    require(kept is None or any(kept), sentence, ArchitectureError, "heads")
    if not isinstance(X, Tensor) or not X.is_floating_point():
        got = X.dtype if isinstance(X, Tensor) else type(X).__name__
        raise TokensError(f"tokens must be a floating tensor [batch, token, width]; got {got}", subject="X")


def _measured(net: Transformer, X: Tensor, padding: Tensor | None, metric: str, weight: float) -> float:
    profile = measure(net.variant(attention_skip=weight), X, padding, metrics=metric)
    rate = float(slope(profile.curve(metric, "log10") * TEN).mean())
    sentence = "every sample must have a token; one is all padding: drop it"
    require(not math.isnan(rate), sentence, TokensError, "padding")
    return rate


def _crossing(rate: Rate, low: float, high: float, tolerance: float, layers: int) -> _Crossing:
    """Where a rate crosses zero from below, by bisection."""
    points = [(low, rate(low)), (high, rate(high))]
    first, last = points[0][1], points[1][1]
    zero = STILL / (layers - layers // 2)
    why = ""
    if not first < -zero:
        why = f"at weight {low:g} tokens do not collapse, the rate is {first:.3g}: try a lower low"
    elif last < -zero:
        why = f"at weight {high:g} tokens still collapse, the rate is {last:.3g}: try a higher high"
    elif last <= zero:
        why = f"at weight {high:g} the rate has come to zero, {last:.3g}: the skip outweighs all else"
    if why:
        return _Crossing(None, f"no crossing: {why}", points)
    while high - low > tolerance and low < (middle := (low + high) / 2) < high:
        points.append((middle, rate(middle)))
        low, high = (middle, high) if points[-1][1] < 0 else (low, middle)
    return _Crossing((low + high) / 2, f"the rate crosses zero between {low:.6g} and {high:.6g}", points)


def _theory(
    net: Transformer, X: Tensor, padding: Tensor | None, metric: str, crossing: Callable[[Rate], _Crossing]
) -> _Crossing:
    """The same of the transverse exponent about the mean token of each sample, averaged over samples."""
    tokens, valid, _ = net.prepared(X, padding)
    numbers = valid.sum(-1)
    means = tokens.sum(1) / numbers[:, None]
    try:
        modes = {n: transverse_modes(net.arch, tokens.shape[1], n) for n in set(numbers.tolist())}
    except RankscopeError as error:
        return _Crossing(None, f"theory does not apply: {error}", [])

    def exponents(weight: float) -> list[Exponent]:
        varied = net.variant(attention_skip=weight)
        pairs = zip(means, numbers.tolist(), strict=True)
        return [exponent(varied, x, modes[n], relative=metric == "relative_mu") for x, n in pairs]

    outcome = crossing(lambda weight: fmean(at_token.rate for at_token in exponents(weight)))
    arch = net.arch
    scores_bounded = bool(arch.norm != "none" or arch.query_norm or arch.score_cap or arch.kernel == "uniform")
    rows_alike = all(bool((nu == 0).all()) for nu in modes.values())
    if outcome.weight is None or scores_bounded or rows_alike:
        return outcome
    if (common := fmean(at_token.common for at_token in exponents(outcome.weight))) <= 0:
        return outcome
    why = f"no norm keeps tokens from growing ({common:.2g} a layer there), and scores with them"
    return replace(outcome, why=f"{outcome.why}; {why}: the measured crossing may lie elsewhere")


def _bracket(net: Transformer, X: Tensor, padding: Tensor | None, weight: float | None) -> tuple[float, float] | None:
    """1 -+ the largest share of the residual that attention adds, over the layers of the rate."""
    if weight is None:
        return None
    largest, before = 0.0, None
    with torch.no_grad():
        for step in propagate(net.variant(attention_skip=weight), X, padding):
            after = step.state.centred()[1]
            if before is not None and step.layer > net.arch.layers // 2:
                share = (log_length(after + before * -weight) - log_length(before)).exp()
                largest = max(largest, float(share.nan_to_num(nan=0.0).max()))  # nothing is no share of nothing
            before = after
    return 1 - largest, 1 + largest


def _guaranteed(net: Transformer, X: Tensor, padding: Tensor | None) -> tuple[float, float]:
    """1 -+ c, c from the weights and the number of tokens."""
    arch, tokens = net.arch, X.shape[1]
    counts = {int(n) for n in valid_tokens(X.shape[:-1], padding, X.device).sum(-1)}
    largest = 0.0
    for index, layer in enumerate(net.weights.layers):
        W = [torch.matmul(*value_parts(arch, layer, head)) for head in active_heads(arch, index)]
        if not W:
            continue
        if arch.kernel == "uniform":
            visible = matrix(arch.mask_of(index), tokens).double()
            averages = (M / M.sum(-1, keepdim=True) for M in (visible[:n, :n] for n in counts))
            spreads = (P - P.mean(-1, keepdim=True) for P in averages)
            # `||res P0||_2`: the most of a residual that averaging over the mask leaves.
            factor = max(_spectral(P - P.mean(0)) for P in spreads)
            size = factor * _spectral(torch.stack(W).sum(0))
        else:
            size = math.sqrt(max(counts) / 2) * sum(map(_spectral, W))
        largest = max(largest, size)
    return 1 - largest, 1 + largest


def _spectral(W: Tensor) -> float:
    return float(torch.linalg.matrix_norm(W, ord=2))
