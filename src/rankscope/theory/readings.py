"""What is read of a pass, layer by layer, for theorems: of attention, of tokens, and of skips and branches.

Called by `observation.py`: `AttentionOfLayer` with the record of each block, while its attention pattern is in memory
(`LayerNumbers` in `theorem.py`: oscillations of scores, factors of residuals, row sums); `token_sizes` and `half_facts`
with hidden states (`TokenSizes`, `HalfFacts`), those of one layer or of several layers of one form, one after the
other. All of a batch, by sample. Nothing here waits for a device, but where the rank of some tokens is not plain
(`affine_ranks`).
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from rankscope.deviation import (
    LOWEST,
    REACH,
    VALUES,
    BlockRecord,
    DeviationStep,
    HalfRecord,
    Scaled,
    State,
    can_skip,
    common_heads,
    deviation_heads,
    must_compute,
    normalise,
    read,
)
from rankscope.errors import TokensError
from rankscope.metrics import (
    FARTHEST,
    FEW,
    NORMS,
    Tokens,
    centred,
    dobrushin,
    largest_square_distance,
    largest_sum_distance,
    max_cosine_gap,
    metric,
    min_cosine,
    tokens,
    tokens_of,
    unit_of,
)
from rankscope.nets import Architecture, Block, Layer, Linear, NormWeights, PassSettings, Plain, changed, norm_of
from rankscope.shapes import Bool, Float
from rankscope.theory.logs import TEN, clipped, log, logs_expm1, logs_of, product_of, sized, sum_of
from rankscope.theory.theorem import SOFTMAX, Centre, HalfFacts, LayerNumbers, PerSample, TokenSizes
from rankscope.theory.weight_norms import EPS, LIPSCHITZ, TINY, DeviceNorms, lost, of_heads, squared_bound

MANY = 2048  # From this many tokens on, Dobrushin's coefficient is bounded without comparing all pairs of rows
PerHead = Float[Tensor, "batch head"]


class AttentionOfLayer:
    """Attention of one layer of a pass, to take numbers of."""

    def __init__(
        self, block: Block, settings: PassSettings, record: BlockRecord, norms: DeviceNorms, centre: Centre
    ) -> None:
        self.block, self.settings, self.record, self.norms, self.centre = block, settings, record, norms, centre
        self.arch, self.active, self.before = block.arch, block.active_heads, record.halves[0].before
        # True where the mask of the layer lets a token (query) see another (key).
        self.visible: Bool[Tensor, "#batch 1 token token"] = settings.visible[block.arch.mask_of(block.index)]

    @cached_property
    def Delta(self) -> Scaled:
        """What the rows of the pattern of active heads differ by."""
        Delta = self.record.attention.Delta
        return Scaled(of_heads(Delta.value, self.active), Delta.log)

    def numbers(self) -> LayerNumbers[PerSample]:
        """All numbers that theorems about such a network ask for."""
        arch, Delta = self.arch, self.Delta
        P = of_heads(self._pattern(), self.active)
        tau = logs_of(_dobrushin(Delta.value), Delta.log[:, None])
        averaging = clipped(sum_of(product_of(tau, self.norms.spectral)))
        unknown = torch.full_like(self.before.log, math.nan)
        oscillation, oscillation_factor, factor, exact = unknown, unknown, unknown, unknown
        bilinear = arch.kernel in SOFTMAX and not arch.query_norm and not arch.score_cap
        if arch.norm == "none" and bilinear and arch.positions in ("none", "absolute"):
            oscillation, oscillation_factor = self._oscillation()
        if arch.norm == "none" and arch.mlp == "none":
            exact = self._exact_factor()
            factor = torch.full_like(unknown, -torch.inf)
            if self.active:  # `M_h = (I - 11^T/n) P_h` as measured
                M = (Delta.value - Delta.value.mean(-2, keepdim=True)).abs()
                factor = self._over_heads(*(M.sum(axis).amax(-1).log() + Delta.log[:, None] for axis in (-2, -1)))
        # A weight below zero off the mask, as a kernel of one's own may have, is no weight of an average either.
        smallest, defect = torch.zeros_like(unknown), torch.zeros_like(unknown)
        if self.active:
            smallest = P.masked_fill(~self.visible & (P >= 0), torch.inf).amin((1, 2, 3)).clamp(min=0.0)
            defect = (P.sum(-1) - 1).abs().amax((1, 2))
        return LayerNumbers(oscillation, oscillation_factor, factor, exact, averaging, smallest.log(), defect)

    def _pattern(self) -> Float[Tensor, "batch head token token"]:
        """P from the tokens themselves, in which small weights are not differences of large ones; from its two
        parts where tokens have left floating point's range."""
        if not self.record.halves[0].branches:
            return self.record.attention.matrix()
        inside, rules = self.record.halves[0].branches[0].inside.tokens(), Plain(self.arch, self.settings)
        P = changed("pattern", self.block, rules, rules.pattern(self.block, inside), inside)
        finite = P.isfinite().all(-1).all(-1).all(-1)
        if can_skip("attention_of_layer.finite", finite.all()):
            return cast(Tensor, P)
        return torch.where(finite[:, None, None, None], P, self.record.attention.matrix())

    def _about(self) -> tuple[Scaled, Scaled]:
        """(the centre, the deviation about it with its largest entry one)."""
        mean, R = self.before.centred()
        x, R = self.before.x + mean, sized(R)
        if self.centre == "mean":
            return x, R
        moved = centred(tokens(R.value), "argmin", "composite")
        return x + Scaled((R.value - moved)[:, 0], R.log), sized(Scaled(moved, R.log))

    def _oscillation(self) -> tuple[PerSample, PerSample]:
        """(log of the largest oscillation of a row of E, log of the factor of `bounds.py` made of them)."""
        if self.arch.kernel == "uniform" or not self.active:
            nothing = torch.full_like(self.before.log, -torch.inf)
            return nothing, nothing
        (x, R), unseen, w = self._about(), ~self.visible, self.block.weights.attention
        dq, dk = (deviation_heads(R, linear, self.arch) for linear in (w.query, w.key))
        E = of_heads(dq.value, self.active) / self.arch.divisor @ of_heads(dk.value, self.active).mT
        osc = E.masked_fill(unseen, -torch.inf).amax(-1) - E.masked_fill(unseen, torch.inf).amin(-1)
        size = torch.where(osc > 0, osc, 1.0).log() + 2 * R.log[:, None, None]
        size = size.masked_fill(osc <= 0, -torch.inf)  # [batch, head, token]
        grown = logs_expm1(size)
        most = of_heads(self._log_most(x, dk), self.active)
        return size.amax((1, 2)), self._over_heads(grown.logsumexp(-1) + most, grown.amax(-1))

    def _log_most(self, x: Scaled, dk: Scaled) -> PerHead:
        """log of the largest entry of `p = softmax(ref)`, ref the scores that the centre's query gives."""
        arch, w = self.arch, self.block.weights.attention
        q = common_heads(x, w.query, arch)
        ref = Scaled((dk.value @ q.value[..., None])[..., 0], dk.log + q.log)
        if arch.kernel == "gaussian":
            k = common_heads(x, w.key, arch)
            ref = ref + Scaled(-(dk.value @ k.value[..., None])[..., 0], dk.log + k.log)
            ref = ref + Scaled(-dk.value.square().sum(-1) / 2, 2 * dk.log)
        scores = ref.explicit() / arch.divisor
        seen = self.visible[:, :, 0]  # every row sees the same where this is used
        return scores.masked_fill(~seen, -torch.inf).log_softmax(-1).amax(-1)

    def _over_heads(self, columns: PerHead, rows: PerHead) -> PerSample:
        """log of `sqrt((sum_h ||M_h||_1 ||W_h||_1) (sum_h ||M_h||_inf ||W_h||_inf))` from the logs of M's."""
        sides = ((columns, self.norms.columns), (rows, self.norms.rows))
        return product_of(*(0.5 * clipped(sum_of(product_of(of_M, of_W))) for of_M, of_W in sides))

    def _exact_factor(self) -> PerSample:
        """`||(P - 1p^T) R W||_{1,inf} / ||R||_{1,inf}`, summed over heads, about the centre."""
        R = sized(self.before.centred()[1])
        w = self.block.weights.attention
        values = of_heads(deviation_heads(R, w.value, self.arch).value, self.active)
        head_outputs = (self.Delta.value @ values).transpose(1, 2).flatten(-2)
        out = head_outputs @ of_heads(w.output.weight, self.active, axis=0).flatten(0, 1)
        together = torch.cat([out, R.value])
        if self.centre == "mean":
            apart = together - together[:, :1]  # equal ones are zero exactly
            deviation = sized(Scaled.plain(apart - apart.mean(1, keepdim=True)))
            logs = logs_of(NORMS["composite"](deviation.value), deviation.log)
        else:
            mask = torch.ones(together.shape[:2], dtype=torch.bool, device=out.device)
            logs = log_about_argmin(State.of(together, mask))
        added, before = torch.split(logs, len(out))
        return torch.where(before == -torch.inf, -torch.inf, added - before + self.Delta.log)


def _dobrushin(Delta: Float[Tensor, "batch head token token"]) -> PerHead:
    """Dobrushin's coefficient of every head, or among many tokens an upper bound that does not compare all
    pairs of rows: `|a - b| / 2 <= max |a - mean|`."""
    if Delta.shape[-1] > MANY:
        return (Delta - Delta.mean(-2, keepdim=True)).abs().sum(-1).amax(-1)
    if Delta.device.type != "cpu":
        return largest_sum_distance(Delta) / 2  # NaN of a head that holds NaN
    if not 1 < Delta.shape[-1] <= FEW or not Delta.shape[1]:
        return dobrushin(Delta)
    # Of two rows each pair once, not twice as metrics do for whole batches.
    pairs = [torch.pdist(rows, 1.0).amax() / 2 for rows in Delta.flatten(0, 1)]
    return torch.stack(pairs).view(Delta.shape[:2])


NOISE_SHARE = 1e-3  # The share of rounding in a float64 residual above which it is called noise


def token_sizes(state: State, centre: Centre, by_floats: bool) -> TokenSizes[PerSample]:
    """The sizes of the tokens of a state.

    Args:
        state: Tokens without padding.
        centre: What residuals are about.
        by_floats: Whether the tokens come from a float64 pass, which loses what they differ by where that is little.
    """
    if not can_skip("token_sizes.finite", state.scaled_tokens.isfinite().all()):
        sentence = "tokens and weights must be finite to be certified; NaN or infinity came out of a layer"
        raise TokensError(f"{sentence}: certify net.variant(layers=...), the layers before it", subject="X")
    R, all_tokens = sized(state.centred()[1]), sized(Scaled.plain(state.scaled_tokens))
    lengths = torch.linalg.vector_norm(all_tokens.value, dim=-1)
    unit = all_tokens.log + state.log

    def of_residual(size: Tensor) -> PerSample:
        return logs_of(size, R.log).clamp(min=LOWEST).masked_fill(state.equal, -torch.inf)

    mu = of_residual(torch.linalg.vector_norm(R.value, dim=(1, 2)))
    residual = of_residual(NORMS["composite"](R.value)) if centre == "mean" else log_about_argmin(state)
    composite = logs_of(NORMS["composite"](all_tokens.value), unit)
    frobenius = logs_of(torch.linalg.vector_norm(all_tokens.value, dim=(1, 2)), unit)
    if by_floats:
        noise = mu - frobenius < log(unit_of(torch.float64) / NOISE_SHARE)
    else:
        noise = (mu.abs() > FARTHEST) & ~state.equal | mu.isnan()
    shortest, longest = logs_of(lengths.amin(-1), unit), logs_of(lengths.amax(-1), unit)
    ready, _ = tokens_of(state.scaled_tokens, state.valid.mask, unpadded=True)
    return TokenSizes(
        residual, mu, diameter=logs_of(largest_square_distance(R.value).sqrt(), R.log),
        of_tokens={"residual": composite, "mu": frobenius, "diameter": longest}, shortest=shortest,
        longest=longest, cosine=min_cosine(ready), log_cosine_gap=_log_cosine_gap(state, ready), noise=noise,
    )  # fmt: skip


def log_about_argmin(state: State) -> PerSample:
    """log of `||res X||_{1,inf}` about the minimising centre."""
    reading = read(metric("residual@argmin"), DeviationStep(0, state, None))
    assert reading is not None
    return reading.log10 * TEN


def _log_cosine_gap(state: State, ready: Tokens) -> PerSample:
    """log of the largest `1 - cos(x_i, x_j)`: close tokens' from what their directions differ by."""
    u = normalise(state, "scale", NormWeights(), 0.0).residual
    close = logs_of(largest_square_distance(u.value) / 2, 2 * u.log)
    apart = max_cosine_gap(ready).log()
    return torch.where(state.x.log > LOWEST, close.masked_fill(state.equal, -torch.inf), apart)


VANISHED = 1e-11  # A token this much shorter than the longest may be what rounding left of zero
CLEAR = 1e-6
"""What a norm finds counts as rank above this (times the size of the matrix): more than rounding may be of it
before it is marked. What it leaves counts above rounding, and is plain where nothing lies between."""


def half_facts(
    arch: Architecture, layers: Sequence[Layer], half: HalfRecord, averaging: PerSample, mlp: Float[Tensor, "layer 4"]
) -> tuple[HalfFacts[PerSample], Scaled]:
    """(the facts of one half of a block, a skip and its branches; res(branch)).

    Args:
        arch: The architecture.
        layers: The weights of each layer that the samples are of, as many samples of each.
        half: What the half did.
        averaging: The log of the factor by which attention shrinks distances.
        mlp: Norms of each layer's MLP: `MLPNorms`' spectral, up, gate and down.
    """
    R, F = sized(half.before.centred()[1]), sized(half.total.centred()[1])
    square = R.value.square().sum((1, 2))
    unit = (F.log - R.log).clamp(max=600.0).exp()
    alignment = (R.value * F.value).sum((1, 2)) / square.masked_fill(square == 0, 1.0) * unit
    alignment = alignment.masked_fill(square == 0, 0.0)
    all_tokens = sized(Scaled.plain(half.total.tokens(half.total.log)))
    longest = torch.linalg.vector_norm(all_tokens.value, dim=-1).amax(-1)
    stretches = [torch.full_like(square, log(abs(half.weight)))]
    ranks: list[tuple[PerSample, PerSample, PerSample]] = []
    clear, vanished = torch.ones_like(square, dtype=torch.bool), torch.zeros_like(square, dtype=torch.bool) | half.torn

    def normed(weights: Sequence[NormWeights], before: State, after: State) -> PerSample:
        """Note the ranks around a norm, and give its stretch."""
        nonlocal clear, vanished
        plain_before, _ = affine_ranks(before)
        plain_rank, rank = affine_ranks(after)
        ranks.append((plain_before, rank, of_samples(rank_loss(arch, weights, square), square)))
        clear = clear & (plain_rank == rank)
        vanished = vanished | _vanishes(arch, before)
        return norm_stretch(arch, weights, before)

    if not half.branches:  # seen from outside: the whole of it is attention, or nothing is known
        alone = arch.norm == "none" and arch.mlp == "none"
        stretches.append(averaging if alone else torch.full_like(square, math.nan))
    for branch in half.branches:
        attends = branch.kind == "attention"
        stretch = averaging if attends else _mlp_stretch(arch, layers, branch.inside, mlp)
        if branch.inside is not half.before:
            own_norms = [layer.attention_norm if attends else layer.mlp_norm for layer in layers]
            stretch = product_of(stretch, normed(own_norms, half.before, branch.inside))
        if branch.out is not branch.raw:
            raw, inside = branch.raw.tidy(), branch.inside
            after_norms = [layer.attention_after if attends else layer.mlp_after for layer in layers]
            stretch = product_of(stretch, normed(after_norms, raw, branch.out))
            if attends:
                parts = [(layer.attention.value.weight, layer.attention.output.weight) for layer in layers]
                of_weights = torch.stack([value.norm() * output.norm() for value, output in parts])
                size = torch.linalg.vector_norm(inside.scaled_tokens, dim=(1, 2)) * of_samples(of_weights, square)
                vanished = vanished | _vanishes(arch, raw, size.log() + inside.log)
        stretches.append(stretch)
    stretch, log_norm = clipped(sum_of(torch.stack(stretches, -1))), torch.zeros_like(square)
    if half.after is not half.summed:
        log_norm = _ratio(half.after, half.summed)
        attends = half.branches[0].kind == "attention"
        own_norms = [layer.attention_norm if attends else layer.mlp_norm for layer in layers]
        stretch = product_of(stretch, normed(own_norms, half.summed, half.after))
    log_longest = logs_of(longest, all_tokens.log + half.total.log)
    log_gain = _ratio(half.total, half.before)
    facts = HalfFacts(
        half.weight, log_gain, alignment, log_norm, log_longest, stretch, tuple(ranks), clear, vanished
    )  # fmt: skip
    return facts, F


def of_samples(of_layers: Tensor, like: PerSample) -> PerSample:
    """Numbers of layers, one for all or one for each, as numbers of the samples of one layer after the other."""
    return of_layers.to(like).repeat_interleave(len(like) // len(of_layers))


def _vanishes(arch: Architecture, state: State, beside: PerSample | None = None) -> Tensor:
    """True where a norm, whose eps does not hide it, meets a token that is zero but for rounding beside another,
    or beside the log of what it is the sum of: what it makes of one is a direction of full length or none,
    and with few entries passes that round otherwise may agree on it by chance."""
    norm, all_tokens = norm_of(arch.norm), state.scaled_tokens
    lengths = torch.linalg.vector_norm(all_tokens if norm is None else norm.centre(all_tokens), dim=-1)
    if beside is None:
        beside = torch.linalg.vector_norm(all_tokens, dim=-1).amax(-1).log() + state.log
    least = log(VANISHED) + beside
    return (lengths.amin(-1).log() + state.log <= least) & (log(arch.norm_eps) < 2 * least)


def _ratio(state: State, other: State) -> PerSample:
    """log of `mu(state) / mu(other)`; zero over zero is zero."""
    residuals = [sized(tokens.centred()[1]) for tokens in (state, other)]
    above, below = (logs_of(torch.linalg.vector_norm(R.value, dim=(1, 2)), R.log) for R in residuals)
    return torch.where(above == -torch.inf, -torch.inf, above - below)


def _gains(weights: Sequence[NormWeights]) -> Float[Tensor, "layer width"] | None:
    """|gain| of the norm of each layer, one where a layer has none; None where no layer has one."""
    like = next((layer.gain for layer in weights if layer.gain is not None), None)
    if like is None:
        return None
    return torch.stack([torch.ones_like(like) if layer.gain is None else layer.gain for layer in weights]).abs()


def rank_loss(arch: Architecture, weights: Sequence[NormWeights], like: PerSample) -> Tensor:
    """The most that the norm of each layer can take from the affine rank; gains that `CLEAR` cannot see count as zero.
    On the device of `like`."""
    norm, gain = norm_of(arch.norm), _gains(weights)
    least = 2.0 if norm is not None and norm.centred else 1.0
    if gain is None:
        return torch.full_like(like[:1], least)
    return (gain <= 1e-5 * gain.amax(-1, keepdim=True)).sum(-1) + least


def norm_stretch(arch: Architecture, weights: Sequence[NormWeights], state: State) -> PerSample:
    """log of `max|gain| / min sd`: no two of these tokens end further apart than so many times their distance
    (`||u/|u| - v/|v||| <= ||u - v|| / sqrt(|u||v|)`, eps being one more coordinate). `weights` are those of each
    layer that the samples are of."""
    norm = norm_of(arch.norm)
    if norm is None:
        return torch.zeros_like(state.log)
    if norm.length is not None:
        return torch.full_like(state.log, torch.inf)  # nothing is known of a length of one's own
    Y = norm.centre(state.scaled_tokens)
    entries = Y.shape[-1] if norm.averaged else 1
    least = torch.linalg.vector_norm(Y, dim=-1).amin(-1)
    square = 2 * (least.log() + state.log) - log(entries)
    sd = torch.logaddexp(square, torch.full_like(square, log(arch.norm_eps))) / 2
    gain = _gains(weights)
    stretch = -sd if gain is None else of_samples(gain.amax(-1).log(), sd) - sd
    return stretch.masked_fill(sd == -torch.inf, torch.inf)


def _mlp_stretch(
    arch: Architecture, layers: Sequence[Layer], state: State, norms: Float[Tensor, "layer 4"]
) -> PerSample:
    """log of the Lipschitz constant in the 2-norm; of a gated MLP, on these tokens."""
    if layers[0].mlp is None:
        # Of a mixture of experts: tokens that choose others may end anywhere.
        return torch.full_like(state.log, torch.inf)
    if layers[0].mlp.gate is None:
        return of_samples(norms[:, 0].log(), state.log)
    X, slope, samples, factors = state.tokens(), LIPSCHITZ[arch.activation], len(state.log) // len(layers), []
    for index, (layer, (_, of_up, of_gate, of_down)) in enumerate(zip(layers, norms.unbind(), strict=True)):
        assert layer.mlp is not None and layer.mlp.gate is not None
        at = slice(index * samples, (index + 1) * samples)
        (up, up_off), (gate, gate_off) = _projected(X[at], layer.mlp.up), _projected(X[at], layer.mlp.gate)
        # An activation that is all but closed here, or underflows, may be open by as much as its gate is off.
        opened = (VALUES[arch.activation](gate).abs() + slope * gate_off).amax((1, 2)) + TINY
        steepest = slope * (up.abs() + up_off).amax((1, 2))
        factors.append((of_down * (opened * of_up + steepest * of_gate)).log())
    # Beyond what ordinary tokens can hold: no factor, not a small one.
    beyond = torch.maximum(state.x.log_size(), state.R.log_size()) > REACH
    return torch.cat(factors).masked_fill(beyond, torch.inf)


def _projected(X: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """(`X W + b`, the most that rounding may have moved each entry by)."""
    b = torch.zeros_like(linear.weight[0]) if linear.bias is None else linear.bias
    off = lost(*linear.weight.shape) * (X.abs() @ linear.weight.abs() + b.abs())
    return X @ linear.weight + b, off


def affine_ranks(state: State) -> tuple[PerSample, PerSample]:
    """(the affine rank of the tokens as far as it is plain, their affine rank): how many singular values of their
    deviation, divided by the largest and by the size of the matrix, are above `CLEAR`, and above eps.

    Where even the least of those that are not zero by construction is plainly above `CLEAR`, all count: Cholesky's
    decomposition of the Gram matrix less its square shows that. Singular values are taken where it fails."""
    R = sized(state.centred()[1]).value
    tokens, width = R.shape[1:]
    most = max(min(tokens - 1, width), 0)  # with as many as there are tokens the last is zero, since rows sum to zero
    plain = torch.full_like(state.log, most)
    if not most:
        return plain, plain
    gram = R @ R.mT if tokens <= width else R.mT @ R
    square = squared_bound(gram, squarings=3)[:, None, None]
    least = 1.01 * (CLEAR * max(tokens, width)) ** 2 * square
    lifted = gram + square / tokens if tokens <= width else gram  # the direction in which all tokens are equal
    eye = torch.eye(len(gram[0]), dtype=gram.dtype, device=gram.device)
    unknown = torch.linalg.cholesky_ex(lifted - least * eye).info != 0
    if not must_compute("halves.ranks", unknown.any()):
        return plain, plain
    # On the CPU: elsewhere a decomposition of one matrix takes longer than of a few there. Numbers that are none, as
    # where a shortcut was presumed wrongly (`deviation/replay.py`), are refused elsewhere.
    values = torch.linalg.svdvals(R[unknown].nan_to_num(0.0, 0.0, 0.0).cpu())[:, :most]
    shares = values / values.amax(-1, keepdim=True).clamp(min=TINY) / max(tokens, width)
    counts = ((shares > limit).sum(-1).to(plain) for limit in (CLEAR, EPS))
    clear, rank = (plain.masked_scatter(unknown, count) for count in counts)
    return clear, rank
