"""What attention of a layer did to these tokens, by sample: oscillations of scores, factors of residuals, row sums.

Called by `observation.py` with the record of each block, while its attention pattern is in memory; the numbers are a
`LayerNumbers` (`facts.py`), which `upper_bounds.py` and `wu2024.py` make bounds of. Norms of weights (on the
CPU) cross over to where the network is as one tensor (`packed`), which a captured graph takes as an input, and
are taken apart there (`unpacked`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, Scaled, State, can_skip, common_heads, deviation_heads
from rankscope.metrics import FEW, NORMS, centred, dobrushin, largest_sum_distance, tokens
from rankscope.nets import Block, PassSettings, Plain, changed
from rankscope.shapes import Bool, Float
from rankscope.theory.facts import Centre, LayerNumbers, PerSample
from rankscope.theory.logs import clipped, logs_expm1, logs_of, product_of, sized, sum_of
from rankscope.theory.readings import log_about_argmin
from rankscope.theory.theorem import SOFTMAX
from rankscope.theory.weight_norms import LayerNorms, of_heads

MANY = 2048  # From this many tokens on, Dobrushin's coefficient is bounded without comparing all pairs of rows
PerHead = Float[Tensor, "batch head"]
PackedNorms = Float[Tensor, " number"]


@dataclass(frozen=True)
class DeviceNorms:
    """Norms of one layer's weights: logs of those of active heads, and those of its MLP as they are."""

    columns: Float[Tensor, " head"]
    rows: Float[Tensor, " head"]
    spectral: Float[Tensor, " head"]
    mlp: Float[Tensor, " 4"]  # `MLPNorms`: spectral, up, gate and down


def packed(layers: Sequence[LayerNorms], device: torch.device) -> PackedNorms:
    """The norms of these layers, one after the other."""
    of_mlps = torch.tensor([[mlp.spectral, mlp.up, mlp.gate, mlp.down] for _, mlp in layers], dtype=torch.float64)
    tensors: list[Tensor] = []
    for (heads, _), of_mlp in zip(layers, of_mlps, strict=True):
        tensors += [*(heads.logs[name] for name in ("columns", "rows", "spectral")), of_mlp]
    return torch.cat(tensors).to(device)


def unpacked(numbers: PackedNorms, heads: Sequence[int]) -> list[DeviceNorms]:
    """The norms of each layer from those `packed`; `heads` says how many are active in each."""
    tensors = iter(torch.split(numbers, [size for count in heads for size in (count, count, count, 4)]))
    return [DeviceNorms(*of_layer) for of_layer in zip(tensors, tensors, tensors, tensors, strict=True)]


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
        if can_skip("attention_numbers.finite", finite.all()):
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
        """(log of the largest oscillation of a row of E, log of the factor of `upper_bounds.py` made of them)."""
        if self.arch.kernel == "uniform" or not self.active:
            nothing = torch.full_like(self.before.log, -torch.inf)
            return nothing, nothing
        (x, R), hidden, w = self._about(), ~self.visible, self.block.weights.attention
        dq, dk = (deviation_heads(R, linear, self.arch) for linear in (w.query, w.key))
        E = of_heads(dq.value, self.active) / self.arch.divisor @ of_heads(dk.value, self.active).mT
        osc = E.masked_fill(hidden, -torch.inf).amax(-1) - E.masked_fill(hidden, torch.inf).amin(-1)
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
