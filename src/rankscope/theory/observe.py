"""Run a network on one sample and note what the theorems ask for, layer by layer."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, Scaled, State, applies, dissect
from rankscope.deviation.attention import deviations, heads
from rankscope.deviation.dissect import started
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.readings import read
from rankscope.metrics import Reading, dobrushin, metric
from rankscope.metrics.centre import centred
from rankscope.metrics.residuals import NORMS
from rankscope.metrics.tokens import tokens, unit_of
from rankscope.nets import Architecture, Transformer
from rankscope.nets.order import active_heads
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, changed
from rankscope.nets.weights import Layer
from rankscope.shapes import Float
from rankscope.theory.constants import HeadNorms, MLPNorms
from rankscope.theory.facts import Centre, Facts, LayerFacts, Sizes
from rankscope.theory.float64 import Float64, plainly
from rankscope.theory.halves import half_facts
from rankscope.theory.hypotheses import SOFTMAX
from rankscope.theory.logs import TEN, log, log_of, plus, sized, times
from rankscope.theory.weight_norms import WeightNorms

MANY = 2048
"""Tokens from which not all pairs of rows of attention are compared."""
RESOLVED = 1e-3
"""The share of rounding in a float64 residual above which it is called noise."""


def observe(
    net: Transformer,
    X: Float[Tensor, "token width"],
    centre: Centre = "mean",
    norms: WeightNorms | None = None,
    seed: int | None = None,
) -> Facts:
    """Run the network on one sample's tokens and note what the theorems ask for. `norms` reads each layer's
    weights once, for a network and its variants. With a `seed` every rule's answer is shaken in its last
    digits (`deviation/perturbation.py`); without, float64 is asked as well, where it can see."""
    net = net.to(torch.float64)
    sizes, layers, norms = [], [], WeightNorms() if norms is None else norms
    deviates = applies(net)
    first, settings = started(net, X[None], seed)
    sizes.append(_sizes(first, centre, deviates))
    other = Float64(net, settings) if deviates and seed is None and not net.arch.parts else None
    passed = dissect(net, X[None], seed) if deviates else plainly(net, first, settings, seed)
    for index, found in enumerate(passed):
        before, size = sizes[-1].state, _sizes(found.state, centre, deviates)
        if other is not None:
            size = replace(size, unlike=other.follow(net.blocks[index], before, found.state))
        sizes.append(size)
        layers.append(_layer(net, index, found, settings, norms.of(net, index), centre))
    arithmetic = "deviation" if deviates else "float64"
    start = net.prepared(X[None].to(torch.float64), None)[0][0]
    return Facts(net, centre, arithmetic, start, first, tuple(sizes), tuple(layers), norms)


# Sizes


RESIDUAL = {"mean": "residual", "argmin": "residual@argmin"}


def _read(name: str, state: State) -> Reading:
    found = read(metric(name), DeviationStep(0, state, None))
    assert found is not None
    return found


def _log(name: str, state: State) -> float:
    return float(_read(name, state).log10[0]) * TEN


def _sizes(state: State, centre: Centre, deviates: bool) -> Sizes:
    R, whole = sized(state.centred()[1]), sized(Scaled.plain(state.whole))
    lengths = torch.linalg.vector_norm(whole.value[0], dim=-1)
    unit = whole.log + state.log
    mu = _read("mu", state)
    measured = _log(RESIDUAL[centre], state), float(mu.log10[0]) * TEN
    noise = bool(mu.below_floor[0])
    if not deviates:
        noise = measured[1] - log_of(NORMS["frobenius"](whole.value)[0], unit[0]) < log(
            unit_of(torch.float64) / RESOLVED
        )
    shortest, longest = log_of(lengths.min(), unit[0]), log_of(lengths.max(), unit[0])
    return Sizes(
        *measured,
        diameter=log_of(torch.cdist(R.value, R.value).max(), R.log[0]),
        of_tokens={
            "residual": log_of(NORMS["composite"](whole.value)[0], unit[0]),
            "mu": log_of(NORMS["frobenius"](whole.value)[0], unit[0]),
            "diameter": longest,
        },
        shortest=shortest,
        longest=longest,
        cosine=float(_read("min_cosine", state).value[0]),
        log_cosine_gap=_log("max_cosine_gap", state),
        noise=noise,
        state=state,
    )


# One layer


def _layer(
    net: Transformer,
    index: int,
    found: BlockRecord,
    settings: PassSettings,
    norms: tuple[HeadNorms, MLPNorms],
    centre: Centre,
) -> LayerFacts:
    arch, layer = net.arch, net.weights.layers[index]
    kept = list(active_heads(arch, index))
    before = found.halves[0].before
    visible = settings.visible[arch.mask_of(index)][0, 0]
    Delta = Scaled(found.attention.Delta.value[:, kept], found.attention.Delta.log)
    P = _matrix(net.blocks[index], found, settings)[kept]
    tau = [log_of(each, Delta.log[0]) for each in _dobrushin(Delta.value)]
    averaging = plus(-math.inf, *map(times, tau, norms[0].spectral.log().tolist()))
    oscillation, factor = math.nan, math.nan
    if _scores_of_tokens(arch):
        oscillation, factor = _oscillation(arch, index, layer, before, visible, norms[0], centre)
    pure = arch.norm == "none" and arch.mlp == "none"
    return LayerFacts(
        *norms,
        log_oscillation=oscillation,
        log_oscillation_factor=factor,
        log_attention_factor=_attention_factor(Delta, norms[0]),
        log_exact_factor=_exact_factor(arch, layer, before, Delta, kept, centre) if pure else math.nan,
        log_averaging=averaging,
        log_smallest=log(float(P.masked_fill(~visible, torch.inf).min())) if kept else -math.inf,
        row_sum_defect=float((P.sum(-1) - 1).abs().max()) if kept else 0.0,
        attention=found.attention,
        halves=tuple(half_facts(arch, layer, half, averaging, norms[1]) for half in found.halves),
    )


def _dobrushin(Delta: Float[Tensor, "1 head token token"]) -> Float[Tensor, " head"]:
    """Dobrushin's coefficient of every head, or among many tokens an upper bound that does not compare all
    pairs of rows: `|a - b| / 2 <= max |a - mean|`."""
    if Delta.shape[-1] > MANY:
        return (Delta - Delta.mean(-2, keepdim=True)).abs().sum(-1).amax(-1)[0]
    return dobrushin(Delta)[0]


def _matrix(block: Block, found: BlockRecord, settings: PassSettings) -> Float[Tensor, "head token token"]:
    """P from the tokens themselves, in which small weights are not differences of large ones; from its two
    parts where tokens have left floating point's range."""
    if not found.halves[0].branches:
        return found.attention.matrix()[0]
    inside, rules = found.halves[0].branches[0].inside.tokens(), Plain(block.arch, settings)
    P = changed("pattern", block, rules, rules.pattern(block, inside), inside)
    return P[0] if bool(P.isfinite().all()) else found.attention.matrix()[0]


def _scores_of_tokens(arch: Architecture) -> bool:
    bilinear = arch.kernel in SOFTMAX and not arch.query_norm and not arch.score_cap
    return bilinear and arch.positions in ("none", "absolute")


def _about(state: State, centre: Centre) -> tuple[Scaled, Scaled]:
    """(the centre, the deviation about it with its largest entry one)."""
    mean, R = state.centred()
    x, R = state.x + mean, sized(R)
    if centre == "mean":
        return x, R
    moved = centred(tokens(R.value), "argmin", "composite")
    return x + Scaled((R.value - moved)[:, 0], R.log), sized(Scaled(moved, R.log))


def _oscillation(
    arch: Architecture,
    index: int,
    layer: Layer,
    state: State,
    visible: Tensor,
    norms: HeadNorms,
    centre: Centre,
) -> tuple[float, float]:
    """(log of the largest oscillation of a row of E, log of the factor of `factors.py` made of them)."""
    kept = list(active_heads(arch, index))
    if arch.kernel == "uniform" or not kept:
        return -math.inf, -math.inf
    (x, R), w = _about(state, centre), layer.attention
    dq, dk = deviations(R, w.query, arch), deviations(R, w.key, arch)
    queries, keys = dq.value[0, kept] / arch.divisor, dk.value[0, kept]  # [head, token, head_width]
    E = queries @ keys.mT
    hidden = ~visible
    osc = E.masked_fill(hidden, -torch.inf).amax(-1) - E.masked_fill(hidden, torch.inf).amin(-1)
    size = torch.where(osc > 0, osc, 1.0).log() + 2 * R.log[0]
    size = size.masked_fill(osc <= 0, -torch.inf)  # [head, token]
    grown = _log_expm1(size)
    top = _log_most(arch, layer, x, dk, visible)[kept]
    columns = grown.logsumexp(-1) + top
    rows = grown.amax(-1)
    return float(size.max()), _combined(columns, rows, norms)


def _log_most(
    arch: Architecture, layer: Layer, x: Scaled, dk: Scaled, visible: Tensor
) -> Float[Tensor, " head"]:
    """log of the largest entry of `p = softmax(ref)`, ref the scores that the centre's query gives."""
    q, k = heads(x, layer.attention.query, arch), heads(x, layer.attention.key, arch)
    ref = Scaled((dk.value @ q.value[..., None])[..., 0], dk.log + q.log)
    if arch.kernel == "gaussian":
        ref = ref + Scaled(-(dk.value @ k.value[..., None])[..., 0], dk.log + k.log)
        ref = ref + Scaled(-dk.value.square().sum(-1) / 2, 2 * dk.log)
    scores = ref.explicit()[0] / arch.divisor
    seen = visible[0]  # every row sees the same where this is used
    return scores.masked_fill(~seen, -torch.inf).log_softmax(-1).amax(-1)


def _log_expm1(size: Tensor) -> Tensor:
    x = size.clamp(max=6.0).exp()
    small, middle = size < -30, torch.expm1(x.clamp(min=1e-13, max=40.0)).log()
    large = size.exp()
    return torch.where(small, size, torch.where(large > 40, large, middle))


def _combined(columns: Tensor, rows: Tensor, norms: HeadNorms) -> float:
    """log of `sqrt((sum_h ||M_h||_1 ||W_h||_1) (sum_h ||M_h||_inf ||W_h||_inf))` from the logs of M's."""
    sides = zip((columns, rows), (norms.columns.log(), norms.rows.log()), strict=True)
    first, second = (plus(-math.inf, *map(times, of_M.tolist(), of_W.tolist())) for of_M, of_W in sides)
    return times(0.5 * first, 0.5 * second)


def _attention_factor(Delta: Scaled, norms: HeadNorms) -> float:
    """With `M_h = (I - 11^T/n) P_h` as measured."""
    if not Delta.value.shape[1]:
        return -math.inf
    M = (Delta.value - Delta.value.mean(-2, keepdim=True))[0].abs()
    columns, rows = M.sum(-2).amax(-1).log() + Delta.log[0], M.sum(-1).amax(-1).log() + Delta.log[0]
    return _combined(columns, rows, norms)


def _exact_factor(
    arch: Architecture, layer: Layer, state: State, Delta: Scaled, kept: list[int], centre: Centre
) -> float:
    """`||(P - 1p^T) R W||_{1,inf} / ||R||_{1,inf}`, summed over heads, about the centre."""
    R = sized(state.centred()[1])
    values = deviations(R, layer.attention.value, arch).value[:, kept]
    spoken = (Delta.value @ values).transpose(1, 2).flatten(-2)
    out = spoken @ layer.attention.output.weight[kept].flatten(0, 1)
    real = torch.ones(out.shape[:2], dtype=torch.bool)
    added, before = (_log(RESIDUAL[centre], State.of(each, real)) for each in (out, R.value))
    return -math.inf if before == -math.inf else added - before + float(Delta.log[0])
