"""Single paths: the term of a path, with attention of the full network or of its own, and how fast terms collapse.

`path_terms` follows many paths at once: what they have in common at the start is computed once. The theorem's
path takes attention from the full network (`shared`). The code of Dong et al. 2021 runs the path as a network
of its own: one head, or the skip, in every layer, with attention, norms, MLPs and biases computed from what
the path itself has come to (`own`). Those terms do not add up to the output.

`path_residuals` is the residual of a path's term, and `rate` its fall with the path's length. A
product of attention matrices makes rows alike, and soon to more digits than floating point has: by length 12 the
residual of a path through pure attention may be 1e-300 of its size. Where the network has no norms and no MLPs, terms
are carried in deviation arithmetic, `Y = 1 y^T + e^s R`, with the attention matrices that it splits into `1 p^T +
Delta`; elsewhere in float64, and what lies below its floor is marked.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.deviation import DeviationPattern, DeviationStep, Scaled, State, applies, propagate, read
from rankscope.metrics import Reading, metric, tokens
from rankscope.nets import Architecture, Arithmetic, Block, Branch, Half, Layer, PassSettings, Plain, Tokens, traverse
from rankscope.paths.counts import Path, length_of
from rankscope.paths.frozen import Frozen, FrozenRules, Terms

AfterLayer = Callable[[int, Tensor, int | None], Tensor]  # (layer, tokens, head or None) -> tokens
RELATIVE = metric("relative_residual")


class OnePath(Arithmetic):
    """A mixin before an arithmetic's rules: follows one path, through one head per layer or past all."""

    head: int | None = None

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The head that the path takes in this layer, if any."""
        return () if self.head is None else (self.head,)

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Through the head attention alone, past it everything else."""
        return not half.attends or (branch.part == "attention") == (self.head is not None)

    def add(self, block: Block, half: Half, state: Any, branches: dict[str, Any]) -> Any:
        """Through a head there is no skip."""
        if half.attends and self.head is not None:
            return branches["attention"]
        return super().add(block, half, state, branches)


class PathRules(OnePath, FrozenRules):
    """Rules along one path, with attention of the full network."""

    def after_layer(self, index: int, Y: Tokens, head: int | None) -> Tokens:
        """Tokens `[batch, token, width]` after layer `index`, through that head or past all."""
        self.head = head
        return self.through(self.frozen.layers[index].block, Terms(Y[None])).parts[0]

    def term(self, path: Path, Y: Tokens) -> Tokens:
        """Tokens at the output, after all layers along the path and the final norm."""
        for index, head in enumerate(path):
            Y = self.after_layer(index, Y, head)
        return self.end(Terms(Y[None]))[0]


class OwnAttention(OnePath, Plain):
    """The plain rules along one path, one layer at a time."""

    def __init__(self, frozen: Frozen) -> None:
        net = frozen.net
        super().__init__(net.arch, PassSettings.of(net.arch, net.weights, frozen.X, frozen.valid))
        self.frozen = frozen

    def after_layer(self, index: int, X: Tokens, head: int | None) -> Tokens:
        """Tokens after layer `index`, through that head or past all."""
        self.head = head
        state: Tokens = traverse(self.frozen.layers[index].block, self, X).state
        return state * self.frozen.valid[..., None]

    def matrices(self, path: Path) -> dict[int, Tensor]:
        """By layer in which the path takes a head: that head's attention `[batch, token, token]`."""
        patterns, X = {}, self.frozen.X
        for index, self.head in enumerate(path):
            output = traverse(self.frozen.layers[index].block, self, X)
            if self.head is not None:
                patterns[index] = output.pattern[:, self.head]
            X = output.state * self.frozen.valid[..., None]
        return patterns


def path_terms(frozen: Frozen, paths: Iterable[Path], after_layer: AfterLayer) -> Iterator[tuple[Path, Tensor]]:
    """Each path once, with its term `[batch, token, width]` before the final norm."""
    last = Path()
    walked = [frozen.X]  # where the last path stood before each layer, and at its end
    for path in sorted(set(paths), key=lambda path: [-1 if head is None else head for head in path]):
        common = next((at for at, (a, b) in enumerate(zip(last, path, strict=False)) if a != b), len(last))
        del walked[common + 1 :]
        for index in range(common, len(path)):
            walked.append(after_layer(index, walked[-1], path[index]))
        last = path
        yield path, walked[-1]


@torch.no_grad()
def path_sum(frozen: Frozen, paths: Iterable[Path], after_layer: AfterLayer) -> Tensor:
    """The sum of the path_terms of some paths, `[batch, token, width]`, before the final norm."""
    summed = torch.zeros_like(frozen.X)
    for _, term in path_terms(frozen, paths, after_layer):
        summed = summed + term
    return summed


@torch.no_grad()
def path_residuals(frozen: Frozen, paths: list[Path]) -> pl.DataFrame:
    """One row per path and sample:

    path · length · sample · relative_residual · log10 · below_floor · arithmetic
    """
    arch = frozen.net.arch
    linear = arch.norm == "none" and arch.mlp == "none" and not arch.parts and not arch.head_gate
    deviation = linear and applies(frozen.net)
    attention = _attention(frozen) if deviation else []
    frames, samples = [], len(frozen.X)
    for path in paths:
        if deviation:
            reading = _carried(frozen, attention, path)
        else:
            reading = RELATIVE.read(tokens(PathRules(frozen).term(path, frozen.X), ~frozen.valid))
        columns = {
            "path": [" ".join("·" if head is None else str(head) for head in path)] * samples,
            "length": [length_of(path)] * samples,
            "sample": list(range(samples)),
            "relative_residual": reading.value.tolist(),
            "log10": reading.log10.tolist(),
            "below_floor": reading.below_floor.tolist(),
            "arithmetic": ["deviation" if deviation else "float64"] * samples,
        }
        frames.append(pl.DataFrame(columns))
    return pl.concat(frames)


def _attention(frozen: Frozen) -> list[DeviationPattern]:
    """Attention of every layer of the full network, split into what all rows share and what they do not."""
    X, table = frozen.X, frozen.net.weights.positions
    if table is not None:  # layer 0 before its positions were added: `propagate` adds them again
        X = (X - table[: X.shape[1]]) * frozen.valid[..., None]
    patterns = (layer.attention for layer in propagate(frozen.net, X, ~frozen.valid))
    return [P for P in patterns if isinstance(P, DeviationPattern)]


def _carried(frozen: Frozen, attention: list[DeviationPattern], path: Path) -> Reading:
    state = State.of(frozen.X.double(), frozen.valid)
    for layer, P, head in zip(frozen.net.weights.layers, attention, path, strict=True):
        if head is None:
            weight = frozen.net.arch.attention_skip
            state = State(state.x * weight, state.R * weight, state.valid).tidy()
        else:
            state = _through(frozen.net.arch, layer, P, head, state)
    reading = read(RELATIVE, DeviationStep(len(path), state, None))
    assert reading is not None
    return reading


def _through(arch: Architecture, layer: Layer, P: DeviationPattern, head: int, state: State) -> State:
    """`P_h Y W_h` of a state: P_h = 1 p^T + Delta, about the token that most attend to."""
    w = layer.attention
    key = head // (arch.heads // arch.key_heads)
    W = (w.value.weight[:, key] @ w.output.weight[head]).double()
    top = P.top[:, head, 0]
    top_token = state.R.value[torch.arange(len(top), device=top.device), top][:, None]  # [batch, 1, width]
    relative_to_top = state.R.value - top_token
    mean = Scaled((top_token + P.p[:, head, None] @ relative_to_top)[:, 0], state.R.log)
    mixed = Scaled(P.off_top.value[:, head] @ relative_to_top, P.off_top.log[:, head] + state.R.log)
    x = (state.x + mean).mapped(lambda t: t @ W)
    return State(x, mixed.mapped(lambda t: t @ W), state.valid).tidy()


def rate(table: pl.DataFrame) -> float:
    """Digits lost per head: the slope of log10 of the relative residual against length, by least squares."""
    seen = table.filter(~pl.col("below_floor") & pl.col("log10").is_finite())
    length, digits = seen["length"].to_numpy(), seen["log10"].to_numpy()
    spread = float(((length - length.mean()) ** 2).sum()) if len(length) else 0.0
    return float(((length - length.mean()) * digits).sum()) / spread if spread else math.nan
