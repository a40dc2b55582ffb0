"""The heaviest single paths, by best-first search with a bound that proves it. Called by `Decomposition.top`.

A path's weight is the norm of its term over all samples (or its residual, at most the norm). Whatever way a
path takes from layer l on, its term grows at most by the product of the layers' gains, and a layer's gain is
at most the largest of

    ||P_h D|| ||C G W_h||    through head h     (D: the norm's scales, C: its centring, G: its gain)
    |lambda|                 past the heads     (in a parallel block, with the MLP's gain)

times what closes it. So `||term so far|| x product of gains` bounds every way on. The search extends the path
with the largest bound; a whole path that comes out first outweighs all others.

How far rounding may have moved a weight is measured by following the path again, perturbed: after every
product the numbers are off by some units of rounding, each its own way; so are attention, gates and the
scales of norms. A path is proved to be among the heaviest where it outweighs all others by more than what
that changes, and a weight that rounding alone could make proves nothing.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import PathError, require, require_one_of
from rankscope.extras import counted
from rankscope.metrics import frobenius_norm, mu, unit_of
from rankscope.nets import Arithmetic, Block, Branch, Half, Part, Tokens, traverse
from rankscope.paths.counts import Path
from rankscope.paths.frozen import DIGITS, Frozen, FrozenLayer, FrozenNorm, FrozenRules, HeadTerms, Terms
from rankscope.paths.single_paths import PathRules
from rankscope.results import lines

Progress = Callable[[int, int], None]  # called with (beginnings computed, at most so many)


@dataclass(frozen=True, repr=False)
class Heaviest:
    """Paths in descending order of weight, and how many of them are proved to be the heaviest."""

    paths: list[Path]
    weights: list[float]
    noise: list[float]  # how far rounding may have moved each weight; one that is not larger is noise
    proved: int  # the first so many outweigh every other path, by more than rounding
    tied: int  # so many more came out of the search first, and rounding could exchange them with others
    next_bound: float  # no path that is not listed weighs more than this
    explored: int  # the number of beginnings of paths that were computed

    def __repr__(self) -> str:
        title = f"{counted(len(self.paths), 'path')}, {self.proved} proved to be the heaviest"
        title += f", {self.tied} more within rounding of others" if self.tied else ""
        heads = [f"({', '.join('–' if head is None else str(head) for head in path)})" for path in self.paths]
        rows = [[path, *notes] for path, notes in zip(heads, self.weight_notes(), strict=True)]
        return lines(f"Heaviest: {title}; no other weighs over {self.next_bound:.3g}", (), rows)

    def weight_notes(self) -> list[list[str]]:
        """Each weight as text, and a note where rounding can make as much."""
        pairs = zip(self.weights, self.noise, strict=True)
        return [[f"{weight:.4g}", "" if weight > noise else "rounding can make as much"] for weight, noise in pairs]


@torch.no_grad()
def heaviest(
    frozen: Frozen, count: int, by: str = "norm", budget: int = 2000, progress: Progress | None = None
) -> Heaviest:
    """The `count` heaviest paths, with a budget of beginnings to compute; `progress` hears of those.

    A beam along the heaviest beginnings comes first, so that there is an answer whatever the budget proves.
    """
    require_one_of("by", by, ("norm", "residual"), PathError)
    sentence = f"count and budget must be at least 1; got {count} and {budget}"
    require(count >= 1 and budget >= 1, sentence, PathError, "count")
    require(frozen.valid.any(), "top needs tokens to weigh paths by; all are padding", PathError, "X")
    depth, ahead, rules, fork = len(frozen.layers), _ahead(frozen), PathRules(frozen), PathExtensions(frozen)
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
        Y = rules.after_layer(len(path) - 1, Y, path[-1]) if path else Y
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
    rest = sorted(((w, p) for p, w in weights_by_path.items() if p not in done_paths), key=lambda item: -item[0])
    done += rest[: count - first]
    paths, weights = [path for _, path in done], [weight for weight, _ in done]
    unlisted = rest[count - first : count - first + 1]  # the heaviest of those that are not listed
    noise = noise_of(frozen, [*paths, *(path for _, path in unlisted)], lambda term: _size(frozen, term, by))
    left = max([-queue[0][0] if queue else 0.0, *(weight for weight, _ in unlisted)])
    left = left + max(noise, default=0.0) if queue or unlisted else 0.0
    upper, lower = ([weight + sign * off for weight, off in zip(weights, noise, strict=False)] for sign in (1, -1))
    # The first k are proved where the least of them is above all that could come after, and above nothing.
    proved = max(
        k for k in range(first + 1) if k == 0 or (min(lower[:k]) > 0 and min(lower[:k]) >= max([left, *upper[k:]]))
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


class PathExtensions(FrozenRules):
    """Every way on from one path, side by side: past the heads first where that is a way, then each head."""

    def ways(self, index: int, Y: Tokens) -> list[tuple[int | None, Tokens]]:
        """Each way through layer `index`, and the tokens after it."""
        layer = self.frozen.layers[index]
        if not layer.ways:
            return []
        return list(zip(layer.ways, self.through(layer.block, Terms(Y[None])).parts, strict=True))

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Attention is taken where a head is active, and the MLP beside it where there is a way past."""
        return not half.attends or branch.part == "mlp" or bool(block.active_heads)

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What each head adds, as a part of its own."""
        active = list(block.active_heads)
        weight = block.weights.attention.output.weight[active]
        return Terms(torch.einsum("bhtc,hcd->hbtd", head_terms[0][:, active], weight))

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """What goes past the heads beside what goes through each."""
        if not half.attends:
            return super().add(block, half, terms, branches)
        past, heads = ({name: branches[name] for name in branches if name != "attention"}, branches.get("attention"))
        ways = [super().add(block, half, terms, past).parts] if None in self.layer(block).ways else []
        return Terms(torch.cat([*ways, *([] if heads is None else [heads.parts])]))


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
        return gain

    def pattern(self, block: Block, gain: Tensor) -> None:
        """Returns its input: `output` bounds attention as a whole."""

    def mix(self, block: Block, weights: None, gain: Tensor) -> Tensor:
        return gain

    def gate(self, block: Block, gain: Tensor, inside: Tensor) -> Tensor:
        return gain  # gates are open by at most one

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
        """Attention is taken as it was measured; of other parts of one's own nothing is known, unless they say it."""
        lengthens = getattr(part, "lengthens", None)
        if lengthens is not None:
            return gain * lengthens(block)
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
    """[batch]: the largest entry at a token. Padding is zero at the end of every layer: its gates, and
    the scales of its norms (1 / sqrt eps), bound nothing."""
    return (values.double().abs() * valid[..., None]).flatten(1).amax(1)


UNITS = 4.0  # by how many units of rounding a number is perturbed: a sum of products rounds more than once
COPIES = 3
SAFETY = 2.0  # the factor by which the largest change among the copies is enlarged


def _perturbing(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A method that perturbs what a rule gives."""
    return lambda self, *arguments: self._perturb(rule(self, *arguments))


class _PerturbedPath(PathRules):
    """Rules along one path, with every intermediate result perturbed by a few units of rounding."""

    norm, values, mix = _perturbing(PathRules.norm), _perturbing(PathRules.values), _perturbing(PathRules.mix)
    output, mlp, add = _perturbing(PathRules.output), _perturbing(PathRules.mlp), _perturbing(PathRules.add)

    def __init__(self, frozen: Frozen, seed: int) -> None:
        super().__init__(frozen)
        self.generator = torch.Generator(frozen.X.device).manual_seed(seed)
        self.layers = [self._perturbed_layer(layer) for layer in frozen.layers]

    def _perturb(self, x: Any) -> Any:
        if isinstance(x, Terms):
            return x._replace(parts=self._perturb(x.parts))
        sign = torch.randint(0, 2, x.shape, generator=self.generator, device=x.device, dtype=torch.int8)
        return x * (1 + UNITS * unit_of(x.dtype) * (2 * sign - 1).to(x.dtype))

    def _perturbed_layer(self, layer: FrozenLayer) -> FrozenLayer:
        norms = {name: replace(norm, scale=self._perturb(norm.scale)) for name, norm in layer.norms.items()}
        gate, head_gate = (None if t is None else self._perturb(t) for t in (layer.gate, layer.head_gate))
        kept = {name: self._perturb(kept_tensor) for name, kept_tensor in layer.kept.items()}
        perturbed = FrozenLayer(layer.block, norms, gate, head_gate, kept)
        perturbed.P = self._perturb(layer.P)
        return perturbed

    def layer(self, block: Block) -> FrozenLayer:
        """The measured quantities of a block, perturbed."""
        return self.layers[block.index]

    def walk(self, path: Path) -> Tensor:
        """The path's term at the output, perturbed."""
        return self._perturb(self.term(path, self._perturb(self.frozen.X)))


def noise_of(frozen: Frozen, paths: list[Path], weigh: Callable[[Tensor], float]) -> list[float]:
    """For each path, by how much rounding may have moved its weight, `weigh` of its term at the output."""
    perturbed = [_PerturbedPath(frozen, seed) for seed in range(COPIES)]
    along, noise = PathRules(frozen), []
    for path in paths:
        term = along.term(path, frozen.X)
        # Of the difference, not between weights: two noises may happen to weigh the same.
        noise.append(SAFETY * max(weigh(copy.walk(path) - term) for copy in perturbed))
    return noise
