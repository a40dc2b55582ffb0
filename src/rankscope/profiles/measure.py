"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.deviation import applies, propagate
from rankscope.deviation.readings import read
from rankscope.errors import MetricError, TokensError, one_of
from rankscope.metrics import Metric, Reading, metric
from rankscope.metrics.catalogue import ROUNDING
from rankscope.metrics.tokens import real_tokens, tokens, unit_of
from rankscope.nets import Step, Transformer
from rankscope.nets.block import contributions
from rankscope.nets.weights import Layer
from rankscope.profiles.manifest import manifest_of
from rankscope.profiles.profile import SCHEMA, Profile

ARITHMETICS: dict[str, torch.dtype] = {
    "deviation": torch.float64,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
DEFAULT_METRICS = ("relative_residual", "residual", "relative_mu", "mu")

Progress = Callable[[int, int], None]
"""Called after each layer with (layers done, layers in all)."""


class _Layer(NamedTuple):
    """What was read at one layer, and what the reader must know of it."""

    layer: int
    readings: list[tuple[Metric, Reading]]
    row_sum_defect: float
    finite: bool


def measure(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    variant: str = "as given",
    batch: int = 16,
    progress: Progress | None = None,
) -> Profile:
    """How uniform the tokens are at every layer.

    X is `[batch, token, width]` in any floating dtype. `arithmetic` is how the network runs: `deviation`
    resolves any residual, however small; `float64`, `float32` and `bfloat16` show their floors. Metrics are
    computed in float64 from what it gives. `variant` names the network in the table. At most `batch` samples
    run together. Layer l is the output of block l; a final norm is not applied.

    A kernel without a rule in deviation arithmetic runs in float64, and the table says so. A sample whose
    tokens overflow has NaN from that layer on, and the manifest says from which.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> measure(net, torch.randn(3, 5, 8)).curve("mu").shape
    torch.Size([3, 3])
    """
    if arithmetic not in ARITHMETICS:
        raise MetricError(one_of("arithmetic", arithmetic, ARITHMETICS))
    if not metrics:
        raise MetricError("measure must be given at least one metric; received none")
    chosen = [metric(name) for name in dict.fromkeys([metrics] if isinstance(metrics, str) else metrics)]
    if batch < 1:
        raise TokensError(f"batch must be at least 1 sample; got {batch}")
    if not isinstance(X, Tensor) or not X.is_floating_point():
        raise TokensError(
            "tokens must be a floating tensor [batch, token, width]; received "
            f"{X.dtype if isinstance(X, Tensor) else type(X).__name__}"
        )
    asked = arithmetic
    if arithmetic == "deviation" and not applies(net):
        arithmetic = "float64"
    cast = net.to(ARITHMETICS[arithmetic])
    X = X.to(dtype=cast.dtype, device=cast.device)
    real = real_tokens(X.shape[:-1], padding, X.device)
    checks: dict[str, Any] = {
        "arithmetic_asked": asked,
        "dropout": 0.0,
        "padded_tokens": int((~real).sum()),
        "largest_row_sum_defect": 0.0,
        "first_layer_not_finite": None,
    }
    rounding = ROUNDING * unit_of(cast.dtype)
    frames = []
    starts = range(0, len(X), batch)
    run = _in_deviations if arithmetic == "deviation" else _plainly
    with torch.no_grad():
        for number, start in enumerate(starts):
            part, kept = X[start : start + batch], real[start : start + batch]
            for found in run(cast, part, kept, chosen):
                frames += [_frame(each, reading, found.layer, start) for each, reading in found.readings]
                defect = max(checks["largest_row_sum_defect"], found.row_sum_defect)
                checks["largest_row_sum_defect"] = defect
                if not found.finite and checks["first_layer_not_finite"] is None:
                    checks["first_layer_not_finite"] = found.layer
                if progress is not None:
                    progress(number * net.arch.layers + found.layer, len(starts) * net.arch.layers)
    checks["rows_sum_to_one"] = checks["largest_row_sum_defect"] <= rounding
    columns = [pl.lit(variant).alias("variant"), pl.lit(arithmetic).alias("arithmetic")]
    table = pl.concat(frames).with_columns(columns) if frames else pl.DataFrame(schema=SCHEMA)
    return Profile(
        table.select(list(SCHEMA)).cast(pl.Schema(SCHEMA)),
        manifest_of(net, variant, arithmetic, [each.name for each in chosen], checks),
    )


def _in_deviations(net: Transformer, X: Tensor, real: Tensor, chosen: list[Metric]) -> Iterator[_Layer]:
    for step in propagate(net, X, ~real):
        found = [(each, read(each, step)) for each in chosen]
        defect = 0.0 if step.attention is None else _row_sum_defect(step.attention.matrix(), real)
        readings = [(each, reading) for each, reading in found if reading is not None]
        finite = all(bool(part.value.isfinite().all()) for part in (step.state.x, step.state.R))
        yield _Layer(step.layer, readings, defect, finite)


def _plainly(net: Transformer, X: Tensor, real: Tensor, chosen: list[Metric]) -> Iterator[_Layer]:
    for step in net.steps(X, ~real):
        broken = _broken(step.state, real)
        defect = 0.0 if step.attention is None else _row_sum_defect(step.attention, real)
        readings = list(_read_plainly(step, net.weights.layers, real, broken, chosen, unit_of(net.dtype)))
        yield _Layer(step.layer, readings, defect, finite=not bool(broken.any()))


def _read_plainly(
    step: Step, layers: Sequence[Layer], real: Tensor, broken: Tensor, chosen: list[Metric], unit: float
) -> Iterator[tuple[Metric, Reading]]:
    """Every metric of one step; a sample that is no longer finite has NaN."""
    ready = tokens(step.state.masked_fill(broken[:, None, None], 0.0), ~real)
    for each in chosen:
        if each.of == "tokens":
            yield each, _with_holes(each.read(ready, unit=unit), broken)
        elif each.of == "heads" and step.heads is not None:
            added = contributions(layers[step.layer - 1], step.heads)
            unsaid = _broken(added, real[:, None])
            added = added.masked_fill(unsaid[:, None, None, None], 0.0)
            yield each, _with_holes(each.read(added, ~real, unit=unit), unsaid)
        elif each.of == "attention" and step.attention is not None:
            unseen = _broken(step.attention, real[:, None])
            P = step.attention.masked_fill(unseen[:, None, None, None], 0.0)
            yield each, _with_holes(each.read(P, ~real, unit=unit), unseen)


def _row_sum_defect(P: Tensor, real: Tensor) -> float:
    """The largest |row sum - 1| of real rows, of what is finite."""
    if not P.numel():
        return 0.0
    defect = (P.sum(-1, dtype=torch.float64) - 1).abs() * real[:, None]
    return float(defect.nan_to_num(0.0).max())


def _broken(x: Tensor, real: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a real token: their largest entry is one."""
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    return ~largest.masked_fill(~real, 0.0).flatten(1).isfinite().all(1)


def _with_holes(reading: Reading, broken: Tensor) -> Reading:
    hole = broken.reshape(-1, *[1] * (reading.value.ndim - 1))
    return Reading(
        *(part.masked_fill(hole, torch.nan) for part in (reading.value, reading.log10, reading.floor))
    )


def _frame(each: Metric, reading: Reading, layer: int, start: int) -> pl.DataFrame:
    shape = reading.value.shape
    sample = start + torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    rows = reading.value.numel()
    head = torch.arange(shape[-1]).expand(shape).flatten().tolist() if len(shape) > 1 else [None] * rows
    return pl.DataFrame(
        {
            "sample": sample.flatten().tolist(),
            "layer": [layer] * rows,  # polars repeats a single value by a query of its own
            "head": head,
            "metric": [each.name] * rows,
            "value": reading.value.flatten().tolist(),
            "log10": reading.log10.flatten().tolist(),
            "floor": reading.floor.flatten().tolist(),
            "below_floor": reading.below_floor.flatten().tolist(),
        },
        schema={name: kind for name, kind in SCHEMA.items() if name not in ("variant", "arithmetic")},
    )
