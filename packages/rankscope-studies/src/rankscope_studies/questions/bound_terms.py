"""What lower bounds of the residual rest on, half block by half block: rows of the question `lower-bounds`.

A half block is `X' = norm(w X + F)`, R and F the deviations of its input and of its branch, mu their Frobenius norm,
`c = |F| / |R|` and `a = <F, R> / |R|^2`. Four numbers of mu(X') / mu(X), each at least as large as the one before:

    weights     (|w| - C) n      C >= c by norms of matrices (below), n = mu(norm U) / mu(U) as measured
    sizes       (|w| - c) n      `elementary-skip`: what can be said by who knows how large F is; F = -c R attains it
    direction   |w + a| n        `aligned-skip`: by who knows <F, R> too; F = a R attains it; without a skip, |a| n
    measured    sqrt((w + a)^2 + c^2 - a^2) n

so what direction loses in a half is exactly `log10 sqrt(1 + (c^2 - a^2) / (w + a)^2)`, and these add up over halves. C
is generous: it knows the pattern P_h of every head and the lengths of tokens,

    C = sum_h |(1 - 11^T/n) P_h|_2 |W_h|_2   or   Lip(act) |W_1|_2 |W_2|_2,   times max|gain| / min sd of a norm before.

A norm after the sum is taken as measured by all. Who would bound it by lengths l_i of tokens U (m entries, of which
LayerNorm takes the mean; eps is one more coordinate) has

    mu(norm U)^2 >= min gain^2 m (mu(U)^2 - (1 + m eps / min l^2) sum_i (l_i - mean l)^2) / max l^2,

from `|y_i - y_j|^2 = (|u_i - u_j|^2 - (l_i - l_j)^2) / (l_i l_j)` of tokens of length one, summed over pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import DeviationPattern, HalfRecord, State, dissect
from rankscope.nets import Architecture, Layer, NormWeights, Transformer, active_heads, norm_of
from rankscope.shapes import Float
from rankscope.theory import LayerNorms, WeightNorms, certify, logs, norm_stretch

THEOREMS = {"sizes": "elementary-skip", "direction": "aligned-skip", "untouched": "untouched", "lambda": "lambda-skip"}
"""Lower bounds of the residual by the name of their column."""

RUNGS = {"weights": "norms of weights", "sizes": "sizes of branches", "direction": "direction of branches"}
PARTS = {"attention": "attention", "mlp": "MLP"}
TERMS = ("gain", "alignment", "lost", "norms", "matrices", "after")  # Columns of each part


@dataclass(frozen=True)
class HalfTerms:
    """What one half block did to the deviation of one sample; natural logs."""

    part: str  # attention or mlp; in a parallel block both, as attention
    weight: float  # w
    log_gain: float  # c
    alignment: float  # a, as it is
    log_norm: float  # n
    log_growth: float  # mu(X') / mu(X)
    log_reached: float  # C
    log_norm_before: float  # Of that, the norm before the branch: its bound over what the norm did
    log_norm_after: float  # What a bound of n by lengths of tokens would give; 0 where there is no norm after the sum

    @property
    def factors(self) -> dict[str, float]:
        """log of mu(X') / mu(X) as each rung has it; -inf where it says nothing."""
        size = logs.log(abs(self.weight))
        lower = {"weights": logs.minus(size, self.log_reached), "sizes": logs.minus(size, self.log_gain),
                 "direction": logs.log(abs(self.weight + self.alignment))}  # fmt: skip
        return {rung: logs.times(factor, self.log_norm) for rung, factor in lower.items()}


@torch.no_grad()
def half_terms(
    net: Transformer, X: Float[Tensor, "token width"], padding: Tensor | None = None, norms: WeightNorms | None = None
) -> list[list[HalfTerms]]:
    """The terms of every half block, by layer, of one sample.

    Args:
        net: The network.
        X: The tokens of the sample.
        padding: `[token]`, True at padding.
        norms: Cached norms of weights, which are computed otherwise.
    """
    norms = norms or WeightNorms()
    records = dissect(net, X[None], padding=None if padding is None else padding[None])
    return [
        [_terms(net.arch, index, net.weights.layers[index], half, record.attention, norms.of(net, index))
         for half in record.halves]
        for index, record in enumerate(records)
    ]  # fmt: skip


def _terms(
    arch: Architecture, index: int, layer: Layer, half: HalfRecord, pattern: DeviationPattern, norms: LayerNorms
) -> HalfTerms:
    """The terms of one half block, from its record."""
    R, F = logs.sized(half.before.centred()[1]), logs.sized(half.total.centred()[1])
    before, added = logs.log_of(R.value.norm(), R.log[0]), logs.log_of(F.value.norm(), F.log[0])
    square = float(R.value.square().sum())
    inner = float((R.value * F.value).sum()) / square if square else 0.0
    after = half.after is not half.summed
    reached, slack = -math.inf, 0.0
    attention = layer.attention_norm, layer.attention_after
    for branch in half.branches:
        norm_before, norm_after = attention if branch.kind == "attention" else (layer.mlp_norm, layer.mlp_after)
        factor = (
            pattern_factor(arch, index, pattern, norms) if branch.kind == "attention" else logs.log(norms[1].spectral)
        )
        if branch.inside is not half.before:
            stretch = float(norm_stretch(arch, [norm_before], half.before))
            factor, slack = logs.times(factor, stretch), stretch - (log_mu(branch.inside) - before)
        if branch.out is not branch.raw:
            factor = logs.times(factor, float(norm_stretch(arch, [norm_after], branch.raw.tidy())))
        reached = logs.plus(reached, factor)
    of_sum = layer.attention_norm if half.branches[0].kind == "attention" else layer.mlp_norm
    return HalfTerms(
        half.branches[0].kind, half.weight, added - before, inner * math.exp(min(float(F.log[0] - R.log[0]), 600.0)),
        log_mu(half.after) - log_mu(half.summed) if after else 0.0, log_mu(half.after) - before, reached, slack,
        norm_floor(arch, of_sum, half.summed) if after else 0.0,
    )  # fmt: skip


def log_mu(state: State) -> float:
    """log of the Frobenius norm of a state's deviation about the mean."""
    R = logs.sized(state.centred()[1])
    return logs.log_of(R.value.norm(), R.log[0])


def pattern_factor(arch: Architecture, index: int, pattern: DeviationPattern, norms: LayerNorms) -> float:
    """log of `sum_h |(1 - 11^T/n) P_h|_2 |W_h|_2`: attention multiplies deviations by no more."""
    Delta = pattern.Delta.value[0, list(active_heads(arch, index))]
    centred = Delta - Delta.mean(-2, keepdim=True)
    sizes = torch.linalg.matrix_norm(centred, 2) * norms[0].spectral.to(centred)
    return logs.log_of(sizes.sum(), pattern.Delta.log[0])


def norm_floor(arch: Architecture, weights: NormWeights, state: State) -> float:
    """log of a lower bound of `mu(norm U) / mu(U)` from the lengths of the tokens U; -inf where it says nothing."""
    norm, U = norm_of(arch.norm), state.tokens()[0]
    if norm is None or norm.length is not None:
        return -math.inf
    Y = norm.centre(U)
    entries = Y.shape[-1] if norm.averaged else 1
    lengths = (Y.square().sum(-1) + entries * arch.norm_eps).sqrt()
    gain = 1.0 if weights.gain is None else float(weights.gain.abs().min())
    radial = (1 + entries * arch.norm_eps / lengths.min().square()) * (lengths - lengths.mean()).square().sum()
    square = float((Y - Y.mean(0)).square().sum() - radial)
    return logs.log(gain) + 0.5 * logs.log(entries * square) - logs.log(float(lengths.max())) - log_mu(state)


@torch.no_grad()
def network_rows(
    net: Transformer, X: Float[Tensor, "sample token width"], padding: Tensor | None = None, terms: bool = True
) -> list[dict[str, Any]]:
    """One row for each layer of a network; sizes and bounds are log10 of shares of the tokens' own size.

    | column                        | meaning                                                                      |
    |-------------------------------|------------------------------------------------------------------------------|
    | `measured`                    | relative mu, the least of all samples                                        |
    | `weights`, and of `THEOREMS`  | what is proved of every sample: -inf for nothing, null for a refusal. Without |
    |                               | skips `direction` is the product of |a| n, which `aligned-skip` does not give |
    | `loose`                       | decades between `direction` and measurement, the most of all samples         |
    | `carried`                     | the same of the bound made of the least factors of all other samples: below  |
    |                               | zero, it is wrong of this one; the least of all samples                      |
    | `rank`                        | the affine rank that `norm-rank` proves of the last norm of the layer        |
    | `PART_gain`, `PART_alignment` | c and a of that branch, mean of samples                                      |
    | `PART_lost`                   | decades that `direction` loses in that half, mean of samples                 |
    | `PART_norms`, `PART_matrices` | decades of C over c: by the norm before the branch, by patterns and matrices |
    | `PART_after`                  | decades that a bound of the norm after the sum by lengths would lose         |
    """
    net, X, norms = net.to(torch.float64, "cpu"), X.double().cpu(), WeightNorms()
    padding = padding.cpu() if padding is not None and bool(padding.any()) else None
    table = certify(net, X, padding, [*THEOREMS.values(), "norm-rank"], norms=norms).table
    per_sample = [half_terms(net, x, None if padding is None else padding[k], norms) for k, x in enumerate(X)]
    sizes = table.filter(theorem="aligned-skip")
    skipless = all(half.weight == 0 for layer in per_sample[0] for half in layer)
    rows = []
    for layer in range(1, net.arch.layers + 1):
        aligned = sizes.filter(layer=layer).sort("sample")
        measured = (aligned["log10_measured"] - aligned["log10_size"]).to_list()
        growth = [_summed(halves[:layer], lambda half: half.log_growth) for halves in per_sample]
        starts = [
            m * logs.TEN - grown for m, grown in zip(measured, growth, strict=True)
        ]  # less the size of the tokens
        row: dict[str, Any] = {"layer": layer, "measured": min(measured)}
        bounds = {  # of every sample, from its own factors
            rung: [
                logs.times(start, _summed(halves[:layer], lambda half, rung=rung: half.factors[rung])) / logs.TEN
                for start, halves in zip(starts, per_sample, strict=True)
            ]
            for rung in ("weights", "direction")
        }
        row["weights"] = min(bounds["weights"])
        for column, theorem in THEOREMS.items():
            row[column] = _proved(table.filter(theorem=theorem, layer=layer).rows(named=True))
        slacks = aligned["slack"].to_list()
        if skipless and not aligned["below_floor"].any():  # `aligned-skip` asks for a skip; Cauchy and Schwarz do not
            row["direction"] = min(bounds["direction"])
            slacks = [m - bound for m, bound in zip(measured, bounds["direction"], strict=True)]
        row["loose"] = None if None in slacks or row["direction"] is None else max(slacks)
        row["carried"] = None if row["direction"] is None else carried([halves[:layer] for halves in per_sample])
        ranks = table.filter(theorem="norm-rank", layer=layer)["log10_bound"].to_list()
        row["rank"] = None if None in ranks else float(round(10 ** min(ranks)))
        rows.append(row | (_means([halves[layer - 1] for halves in per_sample]) if terms else {}))
    return rows


def _summed(layers: Sequence[Sequence[HalfTerms]], value: Any) -> float:
    """The product of a factor over all half blocks, as logs."""
    return logs.times(*(value(half) for halves in layers for half in halves))


def _proved(rows: list[dict[str, Any]]) -> float | None:
    """The least share that a theorem proves of all samples; None if it refuses one, or measures rounding there."""
    if not all(row["met"] and not row["below_floor"] for row in rows):
        return None
    return min(row["log10_bound"] - row["log10_size"] for row in rows)


def carried(samples: Sequence[Sequence[Sequence[HalfTerms]]]) -> float | None:
    """Decades by which each sample's growth exceeds the product of the least `|w + a| n` of all other samples, half by
    half: the least over samples; below zero if the bound of the others is wrong of one. None for one sample alone."""
    if len(samples) < 2:
        return None
    by_sample = [[half for layer in layers for half in layer] for layers in samples]
    margins = []
    for k, halves in enumerate(by_sample):
        rest = zip(*by_sample[:k], *by_sample[k + 1 :], strict=True)
        bound = logs.times(*(min(half.factors["direction"] for half in position) for position in rest))
        margins.append(math.inf if bound == -math.inf else logs.times(*(half.log_growth for half in halves)) - bound)
    return min(margins) / logs.TEN


def _means(samples: Sequence[Sequence[HalfTerms]]) -> dict[str, float]:
    """The terms of one layer in decades, means of samples."""
    row: dict[str, float] = {}
    for halves in zip(*samples, strict=True):
        numbers = {
            "gain": [math.exp(half.log_gain) for half in halves],
            "alignment": [half.alignment for half in halves],
            "lost": [(half.log_growth - half.factors["direction"]) / logs.TEN for half in halves],
            "norms": [half.log_norm_before / logs.TEN for half in halves],
            "matrices": [(half.log_reached - half.log_norm_before - half.log_gain) / logs.TEN for half in halves],
            "after": [(half.log_norm - half.log_norm_after) / logs.TEN for half in halves],
        }
        row |= {f"{halves[0].part}_{name}": math.fsum(values) / len(values) for name, values in numbers.items()}
    return row
