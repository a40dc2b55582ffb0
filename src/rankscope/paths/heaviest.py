"""The heaviest single paths, by best-first search with a bound that proves it.

A path's weight is the norm of its term over all samples. Whatever way a path takes from layer l on, its term
grows at most by the product of the layers' gains, and a layer's gain is at most the largest of

    ||P_h D|| ||C G W_h||    through head h     (D: the norm's scales, C: its centring, G: its gain)
    |lambda|                 past the heads     (in a parallel block, with the MLP's gain)

times what closes it. So `||term so far|| x product of gains` bounds every way on. The search extends the path
with the largest bound; a whole path that comes out first outweighs all others. A residual is at most the
norm. How far rounding may have moved a weight is measured (`rounding.py`): a path is proved to be among the
heaviest where it outweighs all others by more than that, and a weight that rounding alone could make proves
nothing.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import PathError, one_of
from rankscope.metrics.residuals import frobenius_norm, mu
from rankscope.metrics.tokens import unit_of
from rankscope.nets.order import Half
from rankscope.nets.parts import Part
from rankscope.nets.traversal import Arithmetic, Block, traverse
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen, FrozenLayer, FrozenNorm
from rankscope.paths.lengths import DIGITS
from rankscope.paths.rounding import noise_of
from rankscope.paths.terms import FrozenRules, PathExtensions, Terms
from rankscope.paths.walk import shared_step

Progress = Callable[[int, int], None]
"""Called with (beginnings computed, at most so many)."""


@dataclass(frozen=True, repr=False)
class Heaviest:
    """Paths in descending order of weight, and how many of them are proved to be the heaviest."""

    paths: list[Path]
    weights: list[float]
    noise: list[float]
    """How far rounding may have moved each weight; one that is not larger is noise."""
    proved: int
    """The first so many outweigh every other path, by more than rounding."""
    tied: int
    """So many more came out of the search first, and rounding could exchange them with others."""
    next_bound: float
    """No path that is not listed weighs more than this."""
    explored: int
    """The number of beginnings of paths that were computed."""

    def __repr__(self) -> str:
        from rankscope.cards import counted, lines

        title = f"{counted(len(self.paths), 'path')}, {self.proved} proved to be the heaviest"
        title += f", {self.tied} more within rounding of others" if self.tied else ""
        heads = [f"({', '.join('–' if head is None else str(head) for head in path)})" for path in self.paths]
        rows = [[path, *notes] for path, notes in zip(heads, self.said(), strict=True)]
        return lines(f"Heaviest: {title}; no other weighs over {self.next_bound:.3g}", rows)

    def said(self) -> list[list[str]]:
        """Each weight, and what it is where it is noise."""
        pairs = zip(self.weights, self.noise, strict=True)
        return [
            [f"{weight:.4g}", "" if weight > noise else "rounding can make as much"]
            for weight, noise in pairs
        ]


@torch.no_grad()
def heaviest(
    frozen: Frozen, count: int, by: str = "norm", budget: int = 2000, progress: Progress | None = None
) -> Heaviest:
    """The `count` heaviest paths, with a budget of beginnings to compute; `progress` hears of those.

    A beam along the heaviest beginnings comes first, so that there is an answer whatever the budget proves.
    """
    if by not in ("norm", "residual"):
        raise PathError(one_of("by", by, ("norm", "residual")), subject="by")
    if count < 1 or budget < 1:
        raise PathError(
            f"top needs a count and a budget of at least 1; got {count} and {budget}", subject="count"
        )
    if not frozen.valid.any():
        raise PathError(
            f"top needs tokens to weigh paths by; received {tuple(frozen.valid.shape)} of which none is real",
            subject="X",
        )
    depth, ahead, step, fork = len(frozen.layers), _ahead(frozen), shared_step(frozen), PathExtensions(frozen)
    weights_by_path, explored = _beam(frozen, count, by)
    done: list[tuple[float, Path]] = []
    # (-bound, tie, path so far, tokens before its last layer): a whole path's bound is its weight. Tokens
    # after it are computed again for the few beginnings that are extended: all of them would fill memory.
    queue: list[tuple[float, int, Path, Tensor]] = [(-_bound(frozen.X, ahead[0]), 0, (), frozen.X)]
    ties = 0
    while queue and len(done) < count and explored < budget:
        bound, _, path, Y = heapq.heappop(queue)
        if len(path) == depth:
            done.append((-bound, path))
            continue
        Y = step(len(path) - 1, Y, path[-1]) if path else Y
        for head, after in fork.ways(len(path), Y):
            longer, explored, ties = (*path, head), explored + 1, ties + 1
            if len(longer) == depth:
                weights_by_path[longer] = _weight(frozen, after, by)
                heapq.heappush(queue, (-weights_by_path[longer], ties, longer, frozen.X))
            else:
                heapq.heappush(queue, (-_bound(after, ahead[len(longer)]), ties, longer, Y))
        if progress is not None:
            progress(min(explored, budget), budget)
    while queue and len(done) < count and len(queue[0][2]) == depth:  # nothing is left to compute for these
        weight, _, path, _ = heapq.heappop(queue)
        done.append((-weight, path))
    first = len(done)
    done_paths = {path for _, path in done}
    rest = sorted(
        ((w, p) for p, w in weights_by_path.items() if p not in done_paths), key=lambda item: -item[0]
    )
    done += rest[: count - first]
    paths, weights = [path for _, path in done], [weight for weight, _ in done]
    unlisted = rest[count - first : count - first + 1]  # the heaviest of those that are not listed
    noise = noise_of(frozen, [*paths, *(path for _, path in unlisted)], lambda term: _size(frozen, term, by))
    left = max([-queue[0][0] if queue else 0.0, *(weight for weight, _ in unlisted)])
    left = left + max(noise, default=0.0) if queue or unlisted else 0.0
    upper = [weight + off for weight, off in zip(weights, noise, strict=False)]
    lower = [weight - off for weight, off in zip(weights, noise, strict=False)]
    # The first k are proved where the least of them is above all that could come after, and above nothing.
    proved = max(
        k
        for k in range(first + 1)
        if k == 0 or (min(lower[:k]) > 0 and min(lower[:k]) >= max([left, *upper[k:]]))
    )
    return Heaviest(paths, weights, noise[: len(paths)], proved, first - proved, left, explored)


def _beam(frozen: Frozen, count: int, by: str) -> tuple[dict[Path, float], int]:
    """Whole paths along the heaviest beginnings, and how many beginnings that took."""
    width, explored, fork = max(count, 4), 0, PathExtensions(frozen)
    beam: list[tuple[Path, Tensor]] = [((), frozen.X)]
    for index in range(len(frozen.layers)):
        longer = [((*path, head), after) for path, Y in beam for head, after in fork.ways(index, Y)]
        explored += len(longer)
        longer.sort(key=lambda item: -float(torch.linalg.vector_norm(item[1])))
        beam = longer[:width]
    return {path: _weight(frozen, Y, by) for path, Y in beam}, explored


def _weight(frozen: Frozen, Y: Tensor, by: str) -> float:
    return _size(frozen, FrozenRules(frozen).end(Terms(Y[None]))[0], by)


def _size(frozen: Frozen, term: Tensor, by: str) -> float:
    sizes = mu(term, ~frozen.valid) if by == "residual" else frobenius_norm(term.double())
    return float(torch.linalg.vector_norm(sizes))


def _bound(Y: Tensor, ahead: Tensor) -> float:
    """The largest weight of any way on: rounding is allowed for."""
    sizes = frobenius_norm(Y.double())
    return float(torch.linalg.vector_norm(sizes * ahead)) * (1 + unit_of(Y.dtype) ** DIGITS)


def _ahead(frozen: Frozen) -> list[Tensor]:
    """[batch] for each layer: the product of the gains from there to the end, in float64."""
    last = torch.ones(len(frozen.X), dtype=torch.float64, device=frozen.X.device)
    ahead = [last if frozen.last is None else last * _norm_gain(frozen.last, frozen.valid)]
    for layer in reversed(frozen.layers):
        gain: Tensor = traverse(layer.block, _GainRules(frozen, layer), torch.ones_like(last)).state
        ahead.append(ahead[-1] * gain)
    return ahead[::-1]


class _GainRules(Arithmetic):
    """Rules on `[batch]`: by how much a part can lengthen a term. Heads are bounded together with the norm
    that they read through, which waits until they come."""

    def __init__(self, frozen: Frozen, layer: FrozenLayer) -> None:
        self.layer, self.valid = layer, frozen.valid

    def norm(self, block: Block, name: str, gain: Tensor) -> Tensor:
        """The largest scale and gain."""
        reads = any(half.attends and half.branches[0].before == name for half in block.halves)
        return gain if reads else gain * _norm_gain(self.layer.norms[name], self.valid)

    def values(self, block: Block, gain: Tensor) -> Tensor:
        """Returns its input: `output` bounds attention as a whole."""
        return gain

    def pattern(self, block: Block, gain: Tensor) -> None:
        """Returns its input: `output` bounds attention as a whole."""

    def mix(self, block: Block, weights: None, gain: Tensor) -> Tensor:
        """Returns its input: `output` bounds attention as a whole."""
        return gain

    def gate(self, block: Block, gain: Tensor, inside: Tensor) -> Tensor:
        """Open by at most one."""
        return gain

    def output(self, block: Block, gain: Tensor) -> Tensor:
        """The largest of all heads."""
        gains = [self._head(block, head) for head in block.active_heads]
        return gain * torch.stack(gains).amax(0) if gains else torch.zeros_like(gain)

    def mlp(self, block: Block, gain: Tensor) -> Tensor:
        """The largest gate, and the norms of both matrices."""
        w, gate = block.mlp, self.layer.gate
        assert gate is not None
        gain = gain * _largest(gate, self.valid)
        for weight in (w.up.weight, w.down.weight):
            gain = gain * torch.linalg.matrix_norm(weight.double(), 2)
        return gain

    def add(self, block: Block, half: Half, gain: Tensor, branches: dict[str, Tensor]) -> Tensor:
        """A path goes through a head or past all of them; the MLP and its skip it takes together."""
        past = abs(half.skip) * gain + branches.get("mlp", torch.zeros_like(gain))
        return torch.maximum(past, branches["attention"]) if half.attends else past

    def part(self, block: Block, part: Part, gain: Tensor, inside: Tensor) -> Tensor:
        """Attention is taken as it was measured; of other parts of one's own nothing is known, unless they
        say it."""
        done_paths = getattr(part, "lengthens", None)
        if done_paths is not None:
            return gain * done_paths(block)
        return gain if part.place == "pattern" else torch.full_like(gain, torch.inf)

    def _head(self, block: Block, head: int) -> Tensor:
        arch, w = block.arch, block.weights.attention
        key = head // (arch.heads // arch.key_heads)
        inward, outward = w.value.weight[:, key].double(), w.output.weight[head].double()
        P = self.layer.P[:, head].double() * self.valid[:, :, None] * self.valid[:, None]
        before = next(half.branches[0].before for half in block.halves if half.attends)
        if before is not None:
            norm = self.layer.norms[before]
            inward = inward if norm.weights.gain is None else norm.weights.gain.double()[:, None] * inward
            inward = inward - inward.mean(0) if norm.centred else inward
            P = P * norm.scale[..., 0].double()[:, None]
        return torch.linalg.matrix_norm(P, 2) * torch.linalg.matrix_norm(inward @ outward, 2)


def _norm_gain(norm: FrozenNorm, valid: Tensor) -> Tensor:
    gain = _largest(norm.scale, valid)
    return gain if norm.weights.gain is None else gain * norm.weights.gain.double().abs().max()


def _largest(values: Tensor, valid: Tensor) -> Tensor:
    """[batch]: the largest entry at a real token. Padding is zero at the end of every layer: its gates, and
    the scales of its norms (1 / sqrt eps), bound nothing."""
    return (values.double().abs() * valid[..., None]).flatten(1).amax(1)
