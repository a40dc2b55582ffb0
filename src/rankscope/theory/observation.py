"""Runs a network on one sample and collects the `Facts` that the theorems need, layer by layer.

Called by `certify`, once for each pass. The pass is `deviation.dissect`, with a plain float64 pass beside it
to check it (`Float64Pass`), or in its place (`float64_records`) for a network without deviation rules. Sizes
of tokens come from metrics, facts of a layer from here, and facts of each half block from `halves`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, HalfRecord, Scaled, State, applies, dissect
from rankscope.deviation.attention import DeviationPattern, common_heads, deviation_heads
from rankscope.deviation.comparison import state_distance
from rankscope.deviation.dissect import starting_state
from rankscope.deviation.perturbation import PerturbedPlain
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.readings import read
from rankscope.errors import TokensError
from rankscope.metrics import Reading, dobrushin, metric
from rankscope.metrics.centre import centred
from rankscope.metrics.residuals import NORMS
from rankscope.metrics.tokens import tokens, unit_of
from rankscope.nets import Architecture, Transformer
from rankscope.nets.order import active_heads
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, changed, traverse
from rankscope.nets.weights import Layer
from rankscope.shapes import Float
from rankscope.theory.facts import Centre, Facts, LayerFacts, TokenSizes
from rankscope.theory.halves import half_facts
from rankscope.theory.hypotheses import SOFTMAX
from rankscope.theory.logs import TEN, log, log_of, plus, sized, times
from rankscope.theory.weight_norms import HeadNorms, LayerNorms, WeightNorms

MANY = 2048  # From this many tokens on, Dobrushin's coefficient is bounded without comparing all pairs of rows
NOISE_SHARE = 1e-3  # The share of rounding in a float64 residual above which it is called noise


def observe(
    net: Transformer,
    X: Tensor,
    centre: Centre = "mean",
    norms: WeightNorms | None = None,
    seed: int | None = None,
    padding: Tensor | None = None,
) -> Facts:
    """Run the network on one sample and collect what the theorems need to know.

    Args:
        net: The network, taken in float64.
        X: The tokens of the sample `[token, width]`.
        centre: What residuals are about, the "mean" or the "argmin".
        norms: Cached norms of weights, for a network and its variants.
        seed: Perturbs the result of every rule in its last digits (`deviation/perturbation.py`). Without one, a
            float64 pass runs beside it where float64 resolves the residual.
        padding: `[token]`, True at padding: part of the pass, by its masks, and of no fact.
    """
    net = net.to(torch.float64)
    X, padding = X[None].to(torch.float64), None if padding is None else padding[None]
    norms, deviates = WeightNorms() if norms is None else norms, applies(net)
    first, settings = starting_state(net, X, seed, padding)
    sizes, layers = [_sizes(first, centre, deviates)], []
    float64_pass = Float64Pass(net, settings) if deviates and seed is None and not net.arch.parts else None
    records = dissect(net, X, seed, padding) if deviates else float64_records(net, first, settings, seed)
    for index, record in enumerate(records):
        before, size = sizes[-1].state, _sizes(record.state, centre, deviates)
        if float64_pass is not None:
            difference = float64_pass.follow(net.blocks[index], before, record.state)
            size = replace(size, float64_difference=difference)
        sizes.append(size)
        layers.append(_layer(net, index, record, settings, norms.of(net, index), centre))
    start = net.prepared(X, padding)[0][0, : settings.valid.shape[1]]
    visible = {mask: settings.visible[mask][0, 0].cpu() for mask in map(net.arch.mask_of, range(net.arch.layers))}
    arithmetic = "deviation" if deviates else "float64"
    return Facts(net, centre, arithmetic, start, first, visible, tuple(sizes), tuple(layers), norms)


RESIDUAL = {"mean": "residual", "argmin": "residual@argmin"}


def _read(name: str, state: State) -> Reading:
    reading = read(metric(name), DeviationStep(0, state, None))
    assert reading is not None
    return reading


def _log(name: str, state: State) -> float:
    return float(_read(name, state).log10[0]) * TEN


def _sizes(state: State, centre: Centre, deviates: bool) -> TokenSizes:
    if not bool(state.scaled_tokens.isfinite().all()):
        sentence = "tokens and weights must be finite to be certified; NaN or infinity came out of a layer"
        raise TokensError(f"{sentence}: certify net.variant(layers=...), the layers before it", subject="X")
    R, all_tokens = sized(state.centred()[1]), sized(Scaled.plain(state.scaled_tokens))
    lengths = torch.linalg.vector_norm(all_tokens.value[0], dim=-1)
    unit = (all_tokens.log + state.log)[0]
    reading = _read("mu", state)
    residual, mu = _log(RESIDUAL[centre], state), float(reading.log10[0]) * TEN
    composite, frobenius = (log_of(NORMS[name](all_tokens.value)[0], unit) for name in ("composite", "frobenius"))
    noise = bool(reading.below_floor[0])
    if not deviates:
        noise = mu - frobenius < log(unit_of(torch.float64) / NOISE_SHARE)
    shortest, longest = log_of(lengths.min(), unit), log_of(lengths.max(), unit)
    return TokenSizes(
        residual, mu, diameter=log_of(torch.cdist(R.value, R.value).max(), R.log[0]),
        of_tokens={"residual": composite, "mu": frobenius, "diameter": longest}, shortest=shortest,
        longest=longest, cosine=float(_read("min_cosine", state).value[0]),
        log_cosine_gap=_log("max_cosine_gap", state), noise=noise, state=state,
    )  # fmt: skip


def _layer(
    net: Transformer, index: int, record: BlockRecord, settings: PassSettings, norms: LayerNorms, centre: Centre
) -> LayerFacts:
    arch, layer = net.arch, net.weights.layers[index]
    active, before = list(active_heads(arch, index)), record.halves[0].before
    visible = settings.visible[arch.mask_of(index)][0, 0]
    Delta = Scaled(record.attention.Delta.value[:, active], record.attention.Delta.log)
    P = _matrix(net.blocks[index], record, settings)[active]
    tau = [log_of(coefficient, Delta.log[0]) for coefficient in _dobrushin(Delta.value)]
    averaging = plus(-math.inf, *map(times, tau, norms[0].spectral.log().tolist()))
    oscillation, factor = math.nan, math.nan
    bilinear = arch.kernel in SOFTMAX and not arch.query_norm and not arch.score_cap
    if bilinear and arch.positions in ("none", "absolute"):
        oscillation, factor = _oscillation(arch, index, layer, before, visible, norms[0], centre)
    pure = arch.norm == "none" and arch.mlp == "none"
    return LayerFacts(
        *norms,
        log_oscillation=oscillation,
        log_oscillation_factor=factor,
        log_attention_factor=_attention_factor(Delta, norms[0]),
        log_exact_factor=_exact_factor(arch, layer, before, Delta, active, centre) if pure else math.nan,
        log_averaging=averaging,
        # A weight below zero off the mask, as a kernel of one's own may have, is no weight of an average either.
        log_smallest=log(float(P.masked_fill(~visible & (P >= 0), torch.inf).min())) if active else -math.inf,
        row_sum_defect=float((P.sum(-1) - 1).abs().max()) if active else 0.0,
        attention=record.attention,
        halves=tuple(half_facts(arch, layer, half, averaging, norms[1]) for half in record.halves),
    )


def _dobrushin(Delta: Float[Tensor, "1 head token token"]) -> Float[Tensor, " head"]:
    """Dobrushin's coefficient of every head, or among many tokens an upper bound that does not compare all
    pairs of rows: `|a - b| / 2 <= max |a - mean|`."""
    if Delta.shape[-1] > MANY:
        return (Delta - Delta.mean(-2, keepdim=True)).abs().sum(-1).amax(-1)[0]
    return dobrushin(Delta)[0]


def _matrix(block: Block, record: BlockRecord, settings: PassSettings) -> Float[Tensor, "head token token"]:
    """P from the tokens themselves, in which small weights are not differences of large ones; from its two
    parts where tokens have left floating point's range."""
    if not record.halves[0].branches:
        return record.attention.matrix()[0]
    inside, rules = record.halves[0].branches[0].inside.tokens(), Plain(block.arch, settings)
    P = changed("pattern", block, rules, rules.pattern(block, inside), inside)
    return P[0] if bool(P.isfinite().all()) else record.attention.matrix()[0]


def _about(state: State, centre: Centre) -> tuple[Scaled, Scaled]:
    """(the centre, the deviation about it with its largest entry one)."""
    mean, R = state.centred()
    x, R = state.x + mean, sized(R)
    if centre == "mean":
        return x, R
    moved = centred(tokens(R.value), "argmin", "composite")
    return x + Scaled((R.value - moved)[:, 0], R.log), sized(Scaled(moved, R.log))


def _oscillation(
    arch: Architecture, index: int, layer: Layer, state: State, visible: Tensor, norms: HeadNorms, centre: Centre
) -> tuple[float, float]:
    """(log of the largest oscillation of a row of E, log of the factor of `factors.py` made of them)."""
    active = list(active_heads(arch, index))
    if arch.kernel == "uniform" or not active:
        return -math.inf, -math.inf
    (x, R), w = _about(state, centre), layer.attention
    dq, dk = deviation_heads(R, w.query, arch), deviation_heads(R, w.key, arch)
    queries, keys = dq.value[0, active] / arch.divisor, dk.value[0, active]  # [head, token, head_width]
    E = queries @ keys.mT
    hidden = ~visible
    osc = E.masked_fill(hidden, -torch.inf).amax(-1) - E.masked_fill(hidden, torch.inf).amin(-1)
    size = torch.where(osc > 0, osc, 1.0).log() + 2 * R.log[0]
    size = size.masked_fill(osc <= 0, -torch.inf)  # [head, token]
    grown = _log_expm1(size)
    columns = grown.logsumexp(-1) + _log_most(arch, layer, x, dk, visible)[active]
    return float(size.max()), _combined(columns, grown.amax(-1), norms)


def _log_most(arch: Architecture, layer: Layer, x: Scaled, dk: Scaled, visible: Tensor) -> Float[Tensor, " head"]:
    """log of the largest entry of `p = softmax(ref)`, ref the scores that the centre's query gives."""
    q, k = common_heads(x, layer.attention.query, arch), common_heads(x, layer.attention.key, arch)
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
    arch: Architecture, layer: Layer, state: State, Delta: Scaled, active: list[int], centre: Centre
) -> float:
    """`||(P - 1p^T) R W||_{1,inf} / ||R||_{1,inf}`, summed over heads, about the centre."""
    R = sized(state.centred()[1])
    values = deviation_heads(R, layer.attention.value, arch).value[:, active]
    head_outputs = (Delta.value @ values).transpose(1, 2).flatten(-2)
    out = head_outputs @ layer.attention.output.weight[active].flatten(0, 1)
    valid = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
    added, before = (_log(RESIDUAL[centre], State.of(deviation, valid)) for deviation in (out, R.value))
    return -math.inf if before == -math.inf else added - before + float(Delta.log[0])


class Float64Pass:
    """A float64 pass beside deviation arithmetic, with which it shares no formula. The pass restarts from the
    deviation state wherever float64 could not resolve the residual."""

    def __init__(self, net: Transformer, settings: PassSettings) -> None:
        self.rules = Plain(net.arch, settings)
        self.X: Tensor | None = None

    def follow(self, block: Block, before: State, after: State) -> float:
        """The relative difference between the deviation after a block and float64's; 0 where float64 cannot
        resolve it. The float64 tokens are asked as well: those of deviation arithmetic may be wrong."""
        self.X, start = None, self.X
        if not visible_to_float64(before):
            return 0.0
        X = traverse(block, self.rules, before.tokens() if start is None else start).state
        if not bool(X.isfinite().all()):
            return 0.0
        own_state = State.of(X, after.valid.mask)
        if not (visible_to_float64(own_state) or visible_to_float64(after)):
            return 0.0
        self.X = X
        return float(state_distance(after, own_state)[0])


RESOLVED = 1e-4  # the share of the tokens' size by which they must differ for plain rules in float64 to be used
WITHIN = 300.0  # the largest |log| of the size of tokens for which plain rules are used: 1e+-130


def visible_to_float64(state: State) -> bool:
    """True if float64 can hold the tokens of a state and resolve what they differ by."""
    share, size = float((state.R.log_size() - state.log)[0]), float(state.log[0])
    return share > math.log(RESOLVED) and abs(size) < WITHIN


def float64_records(net: Transformer, first: State, settings: PassSettings, seed: int | None) -> Iterator[BlockRecord]:
    """Run the network in float64 and give a record of each block: its attention pattern, and for a layer
    without norms and MLP the branch that was added to the skip."""
    rules = Plain(net.arch, settings) if seed is None else PerturbedPlain(net.arch, settings, seed)
    before, real, weight = first.tokens(), first.valid.mask, net.arch.attention_skip
    for block in net.blocks:
        after, P, *_ = traverse(block, rules, before)
        p = P.mean(-2)
        deviations = Scaled.plain(P - p[:, :, None])
        top = p.argmax(-1, keepdim=True)
        visible = torch.ones(1, 1, *P.shape[-2:], dtype=torch.bool, device=P.device)
        state, added = State.of(after, real), State.of(after - weight * before, real)
        half = HalfRecord(State.of(before, real), (), weight, added, state, state)
        yield BlockRecord(state, _PatternMatrix(p, deviations, top, visible), None, (half,))
        before = after


class _PatternMatrix(DeviationPattern):
    """An attention pattern kept as a matrix, whose rows need not sum to one."""

    @cached_property
    def Delta(self) -> Scaled:
        return self.off_top

    def matrix(self) -> Tensor:
        return self.p[:, :, None] + self.off_top.value
