"""How fast single paths collapse: the residual of a path's term against its length.

A product of attention matrices makes rows alike, and soon to more digits than floating point has: by length
12 the residual of a path through pure attention may be 1e-300 of its size. Where the network has no norms and
no MLPs, terms are carried in deviation arithmetic, `Y = 1 y^T + e^s R`, with the attention matrices that it
splits into `1 p^T + Delta`; elsewhere in float64, and what lies below its floor is marked.
"""

import math

import polars as pl
import torch

from rankscope.deviation import DeviationPattern, DeviationStep, Scaled, State, applies, propagate
from rankscope.deviation.readings import read
from rankscope.metrics import Reading, metric
from rankscope.metrics.tokens import tokens
from rankscope.nets import Architecture, Layer
from rankscope.paths.counts import Path, length_of
from rankscope.paths.frozen import Frozen
from rankscope.paths.terms import PathRules

RELATIVE = metric("relative_residual")


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
    found = (step.attention for step in propagate(frozen.net, X, ~frozen.valid))
    return [P for P in found if isinstance(P, DeviationPattern)]


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
