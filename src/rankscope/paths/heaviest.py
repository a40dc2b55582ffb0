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
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import PathError, one_of
from rankscope.metrics.residual import mu
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen, FrozenLayer, FrozenNorm


@dataclass(frozen=True)
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


@torch.no_grad()
def heaviest(frozen: Frozen, count: int, by: str = "norm", budget: int = 5000) -> Heaviest:
    """The `count` heaviest paths, with a budget of beginnings to compute.

    A beam along the heaviest beginnings comes first, so that there is an answer whatever the budget proves.
    """
    if by not in ("norm", "residual"):
        raise PathError(one_of("by", by, ("norm", "residual")))
    if count < 1 or budget < 1:
        raise PathError(f"top needs a count and a budget of at least 1; got {count} and {budget}")
    depth, ahead = len(frozen.layers), _ahead(frozen)
    found, looked = _beam(frozen, count, by)
    done: list[tuple[float, Path]] = []
    # (-bound, tie, path so far, tokens): a whole path's bound is its weight.
    queue: list[tuple[float, int, Path, Tensor]] = [(-_bound(frozen.X, ahead[0]), 0, (), frozen.X)]
    ties = 0
    while queue and len(done) < count and looked < budget:
        bound, _, path, Y = heapq.heappop(queue)
        if len(path) == depth:
            done.append((-bound, path))
            continue
        for head, after in _extended(frozen, len(path), Y):
            longer, looked, ties = (*path, head), looked + 1, ties + 1
            if len(longer) == depth:
                found[longer] = _weight(frozen, after, by)
                heapq.heappush(queue, (-found[longer], ties, longer, after.new_zeros(())))
            else:
                heapq.heappush(queue, (-_bound(after, ahead[len(longer)]), ties, longer, after))
    while queue and len(done) < count and len(queue[0][2]) == depth:  # nothing is left to compute for these
        weight, _, path, _ = heapq.heappop(queue)
        done.append((-weight, path))
    proved = len(done)
    proven = {path for _, path in done}
    rest = sorted(((w, p) for p, w in found.items() if p not in proven), key=lambda item: -item[0])
    done += rest[: count - proved]
    left = -queue[0][0] if queue else max((w for w, _ in rest[count - proved :]), default=0.0)
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
    sizes = mu(term, ~frozen.real) if by == "residual" else torch.linalg.vector_norm(term, dim=(1, 2))
    return float(torch.linalg.vector_norm(sizes))


def _bound(Y: Tensor, ahead: Tensor) -> float:
    """The largest weight of any way on: rounding is allowed for."""
    return float(torch.linalg.vector_norm(torch.linalg.vector_norm(Y, dim=(1, 2)) * ahead)) * (1 + 1e-9)


def _ahead(frozen: Frozen) -> list[Tensor]:
    """[batch] for each layer: the product of the gains from there to the end."""
    last = torch.ones(len(frozen.X), dtype=frozen.X.dtype, device=frozen.X.device)
    ahead = [last if frozen.last is None else last * _norm_gain(frozen.last)]
    for layer in reversed(frozen.layers):
        ahead.append(ahead[-1] * _gain(layer, frozen))
    return ahead[::-1]


def _gain(layer: FrozenLayer, frozen: Frozen) -> Tensor:
    """[batch]: by how much a layer can lengthen a term."""
    arch = layer.arch
    through = torch.zeros(len(frozen.X), dtype=frozen.X.dtype, device=frozen.X.device)
    for head in (way for way in layer.ways if way is not None):
        through = torch.maximum(through, _head_gain(layer, head))
    past = torch.full_like(through, abs(arch.attention_skip))
    if arch.parallel and arch.mlp != "none":
        past = past + _mlp_gain(layer)
    gain = torch.maximum(through, past)
    if arch.norm_place == "post" and layer.attention_norm is not None:
        gain = gain * _norm_gain(layer.attention_norm)
    if layer.serial:
        gain = gain * (abs(arch.mlp_skip) + _mlp_gain(layer))
        if arch.norm_place == "post" and layer.mlp_norm is not None:
            gain = gain * _norm_gain(layer.mlp_norm)
    return gain


def _head_gain(layer: FrozenLayer, head: int) -> Tensor:
    arch, w = layer.arch, layer.weights.attention
    key = head // (arch.heads // arch.key_heads)
    inward, P = w.value.weight[:, key], layer.P[:, head]
    norm = layer.reads_through
    if norm is not None:
        inward = inward if norm.weights.gain is None else norm.weights.gain[:, None] * inward
        inward = inward - inward.mean(0) if norm.centred else inward
        P = P * norm.scale[..., 0][:, None]
    gain = torch.linalg.matrix_norm(P, 2) * torch.linalg.matrix_norm(inward @ w.output.weight[head], 2)
    if arch.norm_place == "sandwich" and layer.attention_after is not None:
        gain = gain * _norm_gain(layer.attention_after)
    return gain


def _mlp_gain(layer: FrozenLayer) -> Tensor:
    w = layer.weights.mlp
    assert w is not None and layer.gate is not None
    gate = layer.gate.abs().flatten(1).amax(1)
    gain = gate * torch.linalg.matrix_norm(w.up.weight, 2) * torch.linalg.matrix_norm(w.down.weight, 2)
    if layer.arch.norm_place != "post" and layer.mlp_norm is not None:
        gain = gain * _norm_gain(layer.mlp_norm)
    if layer.arch.norm_place == "sandwich" and layer.mlp_after is not None:
        gain = gain * _norm_gain(layer.mlp_after)
    return gain


def _norm_gain(norm: FrozenNorm) -> Tensor:
    gain = norm.scale.flatten(1).amax(1)
    return gain if norm.weights.gain is None else gain * norm.weights.gain.abs().max()
