"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, TokensError, one_of
from rankscope.metrics import Metric, Reading, metric
from rankscope.metrics.tokens import real_tokens, tokens, unit_of
from rankscope.nets import Step, Transformer
from rankscope.profiles.manifest import manifest_of
from rankscope.profiles.profile import SCHEMA, Profile

ARITHMETICS: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
DEFAULT_METRICS = ("relative_residual", "residual", "relative_mu", "mu")

Progress = Callable[[int, int], None]
"""Called after each layer with (layers done, layers in all)."""


def measure(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    arithmetic: str = "float64",
    *,
    variant: str = "as given",
    batch: int = 16,
    progress: Progress | None = None,
) -> Profile:
    """How uniform the tokens are at every layer.

    X is `[batch, token, width]` in any floating dtype; the network runs in `arithmetic`, and metrics are
    computed in float64 from what it gives. `variant` names the network in the table. At most `batch`
    samples run together. A sample whose tokens overflow has NaN from that layer on, and the manifest
    says so; what the other samples gave is kept.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> measure(net, torch.randn(3, 5, 8)).curve("mu").shape
    torch.Size([3, 3])
    """
    if arithmetic not in ARITHMETICS:
        raise MetricError(one_of("arithmetic", arithmetic, ARITHMETICS))
    if not metrics:
        raise MetricError("measure must be given at least one metric; received none")
    chosen = [metric(name) for name in metrics]
    if not isinstance(X, Tensor) or not X.is_floating_point():
        raise TokensError(
            "tokens must be a floating tensor [batch, token, width]; received "
            f"{X.dtype if isinstance(X, Tensor) else type(X).__name__}"
        )
    cast = net.to(ARITHMETICS[arithmetic])
    X = X.to(dtype=cast.dtype, device=cast.device)
    real = real_tokens(X.shape[:-1], padding, X.device)
    checks: dict[str, Any] = {
        "dropout": 0.0,
        "padded_tokens": int((~real).sum()),
        "largest_row_sum_defect": 0.0,
        "first_layer_not_finite": None,
    }
    frames = []
    starts = range(0, len(X), batch)
    with torch.no_grad():
        for number, start in enumerate(starts):
            part, kept = X[start : start + batch], real[start : start + batch]
            for step in cast.steps(part, ~kept):
                _check_step(step, kept, checks)
                frames += list(_frames(step, kept, chosen, unit_of(cast.dtype), start))
                if progress is not None:
                    progress(number * net.arch.layers + step.layer, len(starts) * net.arch.layers)
    columns = [pl.lit(variant).alias("variant"), pl.lit(arithmetic).alias("arithmetic")]
    table = pl.concat(frames).with_columns(columns) if frames else pl.DataFrame(schema=SCHEMA)
    return Profile(
        table.select(list(SCHEMA)).cast(pl.Schema(SCHEMA)), manifest_of(net, variant, arithmetic, checks)
    )


def _check_step(step: Step, real: Tensor, checks: dict[str, Any]) -> None:
    """Note what the reader must know: rows that do not sum to one, tokens that overflowed."""
    if checks["first_layer_not_finite"] is None and bool(_broken(step.state, real).any()):
        checks["first_layer_not_finite"] = step.layer
    if step.attention is not None and step.attention.numel():
        defect = (step.attention.sum(-1).double() - 1).abs() * real[:, None]
        checks["largest_row_sum_defect"] = max(
            checks["largest_row_sum_defect"], float(defect.nan_to_num(0).max())
        )


def _frames(
    step: Step, real: Tensor, chosen: list[Metric], unit: float, start: int
) -> Iterator[pl.DataFrame]:
    """Every metric of one step; a sample that is no longer finite has NaN."""
    broken = _broken(step.state, real)
    ready = tokens(step.state.masked_fill(broken[:, None, None], 0.0), ~real)
    for each in chosen:
        if each.of == "tokens":
            yield _frame(each, each.read(ready, unit=unit), broken, step.layer, start)
        elif step.attention is not None:
            unseen = _broken(step.attention, real[:, None])
            P = step.attention.masked_fill(unseen[:, None, None, None], 0.0)
            yield _frame(each, each.read(P, ~real, unit=unit), unseen, step.layer, start)


def _broken(x: Tensor, real: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a real token: their largest entry is one."""
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    return ~largest.masked_fill(~real, 0.0).flatten(1).isfinite().all(1)


def _frame(each: Metric, reading: Reading, broken: Tensor, layer: int, start: int) -> pl.DataFrame:
    shape = reading.value.shape
    hole = broken.reshape(-1, *[1] * (len(shape) - 1))
    reading = Reading(reading.value.masked_fill(hole, torch.nan), reading.floor.masked_fill(hole, torch.nan))
    sample = start + torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    head = torch.arange(shape[-1]).expand(shape).flatten().tolist() if len(shape) > 1 else None
    return pl.DataFrame(
        {
            "sample": sample.flatten().tolist(),
            "layer": layer,
            "head": head,
            "metric": each.name,
            "value": reading.value.flatten().tolist(),
            "log10": reading.log10.flatten().tolist(),
            "floor": reading.floor.flatten().tolist(),
            "below_floor": reading.below_floor.flatten().tolist(),
        },
        schema={name: kind for name, kind in SCHEMA.items() if name not in ("variant", "arithmetic")},
    )
