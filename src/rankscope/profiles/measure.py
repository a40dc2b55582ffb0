"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, TokensError, one_of
from rankscope.metrics import Metric, Reading, metric, row_sum_defect
from rankscope.metrics.spectrum import unit_of
from rankscope.metrics.tokens import real_tokens
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
    if not bool(step.state[real].isfinite().all()) and checks["first_layer_not_finite"] is None:
        checks["first_layer_not_finite"] = step.layer
    if step.attention is not None and bool(step.attention.isfinite().all()):
        defect = row_sum_defect(step.attention, ~real).nan_to_num(0.0)
        checks["largest_row_sum_defect"] = max(checks["largest_row_sum_defect"], float(defect.max()))


def _frames(
    step: Step, real: Tensor, chosen: list[Metric], unit: float, start: int
) -> Iterator[pl.DataFrame]:
    for each in chosen:
        x = step.state if each.of == "tokens" else step.attention
        if x is not None:
            yield _frame(each, _read(each, x, real, unit), step.layer, start)


def _read(each: Metric, x: Tensor, real: Tensor, unit: float) -> Reading:
    """The metric, with NaN for samples that are no longer finite."""
    counted = real[..., None] if each.of == "tokens" else (real[:, None, :, None] & real[:, None, None, :])
    broken = (~x.isfinite() & counted).flatten(1).any(1)
    safe = x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
    reading = each.read(safe, ~real, unit=unit)
    hole = broken.reshape(-1, *[1] * (reading.value.ndim - 1))
    return Reading(reading.value.masked_fill(hole, torch.nan), reading.floor.masked_fill(hole, torch.nan))


def _frame(each: Metric, reading: Reading, layer: int, start: int) -> pl.DataFrame:
    shape = reading.value.shape
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
