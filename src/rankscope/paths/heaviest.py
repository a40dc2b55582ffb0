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
from rankscope.paths.lengths import goes_past
from rankscope.paths.walk import shared_step


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
def heaviest(frozen: Frozen, count: int, by: str = "norm", budget: int = 20000) -> Heaviest:
    """The `count` heaviest paths; with a budget of beginnings to compute."""
    if by not in ("norm", "residual"):
        raise PathError(one_of("by", by, ("norm", "residual")))
    if count < 1 or budget < 1:
        raise PathError(f"top needs a count and a budget of at least 1; got {count} and {budget}")
    step, depth = shared_step(frozen), len(frozen.layers)
    ahead = _ahead(frozen)
    ties, looked = 0, 0
    # (-bound, tie, path so far, tokens): a whole path's bound is its weight.
    queue: list[tuple[float, int, Path, Tensor]] = [(-_bound(frozen.X, ahead[0]), 0, (), frozen.X)]
    done: list[tuple[float, Path]] = []
    found: list[tuple[float, Path]] = []
    while queue and len(done) < count and looked < budget:
        bound, _, path, Y = heapq.heappop(queue)
        if len(path) == depth:
            done.append((-bound, path))
            continue
        layer = frozen.layers[len(path)]
        for head in _ways(layer):
            after, longer = step(len(path), Y, head), (*path, head)
            looked, ties = looked + 1, ties + 1
            if len(longer) == depth:
                weight = _weight(frozen, after, by)
                found.append((weight, longer))
                heapq.heappush(queue, (-weight, ties, longer, after.new_zeros(())))
            else:
                heapq.heappush(queue, (-_bound(after, ahead[len(longer)]), ties, longer, after))
    left = -queue[0][0] if queue else 0.0
    proved = len(done)
    if proved < count:
        rest = sorted(set(found) - set(done), key=lambda item: -item[0])
        done += rest[: count - proved]
    return Heaviest([path for _, path in done], [weight for weight, _ in done], proved, left, looked)


def _ways(layer: FrozenLayer) -> list[int | None]:
    kept = layer.arch.kept_heads
    heads = range(layer.arch.heads) if kept is None else sorted(set(kept[layer.index]))
    return [*([None] if goes_past(layer) else []), *heads]


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
    for head in (way for way in _ways(layer) if way is not None):
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
