"""The heaviest single paths, by best-first search with a bound that proves it.

A path's weight is the norm of its term over all samples. Whatever way a path takes from layer l on, its term
grows at most by the product of the layers' gains, and a layer's gain is at most the largest of

    ||P_h D|| ||C G W_h||    through head h     (D: the norm's scales, C: its centring, G: its gain)
    |lambda|                 past the heads     (in a parallel block, with the MLP's gain)

times what closes it. So `||term so far|| x product of gains` bounds every way on. The search extends the path
with the largest bound; a whole path that comes out first outweighs all others. A residual is at most the
norm.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import PathError, one_of
from rankscope.metrics.residual import frobenius_norm, mu
from rankscope.metrics.tokens import unit_of
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen, FrozenLayer, FrozenNorm
from rankscope.paths.lengths import DIGITS
from rankscope.paths.walk import shared_step

Progress = Callable[[int, int], None]
"""Called with (beginnings computed, at most so many)."""


@dataclass(frozen=True, repr=False)
class Heaviest:
    """Paths in descending order of weight, and how many of them are proved to be the heaviest."""

    paths: list[Path]
    weights: list[float]
    proved: int
    """The first so many outweigh every other path."""
    next_bound: float
    """No path that is not listed weighs more than this."""
    looked_at: int
    """Beginnings of paths that were computed."""

    def __repr__(self) -> str:
        from rankscope.cards import counted, lines

        number = f"{counted(len(self.paths), 'path')}, {self.proved} proved to be the heaviest"
        heads = [f"({', '.join('–' if head is None else str(head) for head in path)})" for path in self.paths]
        rows = [[path, f"{weight:.4g}"] for path, weight in zip(heads, self.weights, strict=True)]
        return lines(f"Heaviest: {number}; no other weighs over {self.next_bound:.3g}", rows)


@torch.no_grad()
def heaviest(
    frozen: Frozen, count: int, by: str = "norm", budget: int = 2000, progress: Progress | None = None
) -> Heaviest:
    """The `count` heaviest paths, with a budget of beginnings to compute; `progress` hears of those.

    A beam along the heaviest beginnings comes first, so that there is an answer whatever the budget proves.
    """
    if by not in ("norm", "residual"):
        raise PathError(one_of("by", by, ("norm", "residual")))
    if count < 1 or budget < 1:
        raise PathError(f"top needs a count and a budget of at least 1; got {count} and {budget}")
    if not frozen.real.any():
        raise PathError(
            f"top needs tokens to weigh paths by; received {tuple(frozen.real.shape)} of which none is real"
        )
    depth, ahead, step = len(frozen.layers), _ahead(frozen), shared_step(frozen)
    found, looked = _beam(frozen, count, by)
    done: list[tuple[float, Path]] = []
    # (-bound, tie, path so far, tokens before its last layer): a whole path's bound is its weight. Tokens
    # after it are computed again for the few beginnings that are extended: all of them would fill memory.
    queue: list[tuple[float, int, Path, Tensor]] = [(-_bound(frozen.X, ahead[0]), 0, (), frozen.X)]
    ties = 0
    while queue and len(done) < count and looked < budget:
        bound, _, path, Y = heapq.heappop(queue)
        if len(path) == depth:
            done.append((-bound, path))
            continue
        Y = step(len(path) - 1, Y, path[-1]) if path else Y
        for head, after in _extended(frozen, len(path), Y):
            longer, looked, ties = (*path, head), looked + 1, ties + 1
            if len(longer) == depth:
                found[longer] = _weight(frozen, after, by)
                heapq.heappush(queue, (-found[longer], ties, longer, frozen.X))
            else:
                heapq.heappush(queue, (-_bound(after, ahead[len(longer)]), ties, longer, Y))
        if progress is not None:
            progress(min(looked, budget), budget)
    while queue and len(done) < count and len(queue[0][2]) == depth:  # nothing is left to compute for these
        weight, _, path, _ = heapq.heappop(queue)
        done.append((-weight, path))
    proved = len(done)
    proven = {path for _, path in done}
    rest = sorted(((w, p) for p, w in found.items() if p not in proven), key=lambda item: -item[0])
    done += rest[: count - proved]
    left = -queue[0][0] if queue else 0.0
    return Heaviest([path for _, path in done], [weight for weight, _ in done], proved, left, looked)


def _beam(frozen: Frozen, count: int, by: str) -> tuple[dict[Path, float], int]:
    """Whole paths along the heaviest beginnings, and how many beginnings that took."""
    width, looked = max(count, 4), 0
    beam: list[tuple[Path, Tensor]] = [((), frozen.X)]
    for index in range(len(frozen.layers)):
        longer = [((*path, head), after) for path, Y in beam for head, after in _extended(frozen, index, Y)]
        looked += len(longer)
        longer.sort(key=lambda item: -float(torch.linalg.vector_norm(item[1])))
        beam = longer[:width]
    return {path: _weight(frozen, Y, by) for path, Y in beam}, looked


def _extended(frozen: Frozen, index: int, Y: Tensor) -> list[tuple[int | None, Tensor]]:
    """Every way on from Y through a layer, computed side by side."""
    layer = frozen.layers[index]
    ways = layer.ways
    heads = [way for way in ways if way is not None]
    parts = [layer.past(Y[None])] if None in ways else []
    if heads:
        spoken = layer.spoken(Y[None])[0]  # [batch, head, token, head_width]
        each = torch.einsum("bhtc,hcd->hbtd", spoken[:, heads], layer.weights.attention.output.weight[heads])
        parts.append(layer.after_heads(each))
    return list(zip(ways, layer.close(torch.cat(parts)), strict=True))


def _weight(frozen: Frozen, Y: Tensor, by: str) -> float:
    term = frozen.end(Y[None])[0]
    sizes = mu(term, ~frozen.real) if by == "residual" else frobenius_norm(term.double())
    return float(torch.linalg.vector_norm(sizes))


def _bound(Y: Tensor, ahead: Tensor) -> float:
    """The largest weight of any way on: rounding is allowed for."""
    sizes = frobenius_norm(Y.double())
    return float(torch.linalg.vector_norm(sizes * ahead)) * (1 + unit_of(Y.dtype) ** DIGITS)


def _ahead(frozen: Frozen) -> list[Tensor]:
    """[batch] for each layer: the product of the gains from there to the end, in float64."""
    last = torch.ones(len(frozen.X), dtype=torch.float64, device=frozen.X.device)
    ahead = [last if frozen.last is None else last * _norm_gain(frozen.last, frozen.real)]
    for layer in reversed(frozen.layers):
        ahead.append(ahead[-1] * _gain(layer))
    return ahead[::-1]


def _gain(layer: FrozenLayer) -> Tensor:
    """[batch]: by how much a layer can lengthen a term."""
    arch, real = layer.arch, layer.real
    gain = torch.zeros(len(real), dtype=torch.float64, device=real.device)
    for way in layer.ways:
        gain = torch.maximum(gain, _past_gain(layer) if way is None else _head_gain(layer, way))
    if arch.norm_place == "post" and layer.attention_norm is not None:
        gain = gain * _norm_gain(layer.attention_norm, real)
    if layer.serial:
        gain = gain * (abs(arch.mlp_skip) + _mlp_gain(layer))
        if arch.norm_place == "post" and layer.mlp_norm is not None:
            gain = gain * _norm_gain(layer.mlp_norm, real)
    return gain


def _past_gain(layer: FrozenLayer) -> Tensor:
    real, weight = layer.real, abs(layer.arch.attention_skip)
    skip = torch.full((len(real),), weight, dtype=torch.float64, device=real.device)
    return skip + _mlp_gain(layer) if layer.arch.parallel and layer.arch.mlp != "none" else skip


def _head_gain(layer: FrozenLayer, head: int) -> Tensor:
    arch, w = layer.arch, layer.weights.attention
    key = head // (arch.heads // arch.key_heads)
    inward, outward = w.value.weight[:, key].double(), w.output.weight[head].double()
    P = layer.P[:, head].double() * layer.real[:, :, None] * layer.real[:, None]
    norm = layer.reads_through
    if norm is not None:
        inward = inward if norm.weights.gain is None else norm.weights.gain.double()[:, None] * inward
        inward = inward - inward.mean(0) if norm.centred else inward
        P = P * norm.scale[..., 0].double()[:, None]
    gain = torch.linalg.matrix_norm(P, 2) * torch.linalg.matrix_norm(inward @ outward, 2)
    if arch.norm_place == "sandwich" and layer.attention_after is not None:
        gain = gain * _norm_gain(layer.attention_after, layer.real)
    return gain


def _mlp_gain(layer: FrozenLayer) -> Tensor:
    w = layer.weights.mlp
    assert w is not None and layer.gate is not None
    gain = _largest(layer.gate, layer.real)
    for weight in (w.up.weight, w.down.weight):
        gain = gain * torch.linalg.matrix_norm(weight.double(), 2)
    if layer.arch.norm_place != "post" and layer.mlp_norm is not None:
        gain = gain * _norm_gain(layer.mlp_norm, layer.real)
    if layer.arch.norm_place == "sandwich" and layer.mlp_after is not None:
        gain = gain * _norm_gain(layer.mlp_after, layer.real)
    return gain


def _norm_gain(norm: FrozenNorm, real: Tensor) -> Tensor:
    gain = _largest(norm.scale, real)
    return gain if norm.weights.gain is None else gain * norm.weights.gain.double().abs().max()


def _largest(values: Tensor, real: Tensor) -> Tensor:
    """[batch]: the largest entry at a real token. Padding is zero at the end of every layer: its gates, and
    the scales of its norms (1 / sqrt eps), bound nothing."""
    return (values.double().abs() * real[..., None]).flatten(1).amax(1)
