"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import applies, propagate
from rankscope.deviation.readings import read
from rankscope.errors import MetricError, TokensError, one_of
from rankscope.metrics import Metric, metric
from rankscope.metrics.catalogue import ROUNDING
from rankscope.metrics.tokens import real_tokens, unit_of
from rankscope.nets import Step, Transformer
from rankscope.nets.block import contributions
from rankscope.nets.weights import Layer
from rankscope.profiles.profile import Profile
from rankscope.profiles.rows import Entry, Found, readings, row_sum_defect, table
from rankscope.runs import manifest_of

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
    readings: Found
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
    chosen = chosen_metrics("measure", metrics)
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
    rounding = max(rounding, min(1e-9, rounding * X.shape[1]))  # a row is a sum of so many
    entries: list[Entry] = []
    starts = range(0, len(X), batch)
    run = _in_deviations if arithmetic == "deviation" else _plainly
    with torch.no_grad():
        for number, start in enumerate(starts):
            part, kept = X[start : start + batch], real[start : start + batch]
            for found in run(cast, part, kept, chosen):
                entries += [Entry(found.layer, start, *pair) for pair in found.readings]
                defect = max(checks["largest_row_sum_defect"], found.row_sum_defect)
                checks["largest_row_sum_defect"] = defect
                if not found.finite and checks["first_layer_not_finite"] is None:
                    checks["first_layer_not_finite"] = found.layer
                if progress is not None:
                    progress(number * net.arch.layers + found.layer, len(starts) * net.arch.layers)
    checks["rows_sum_to_one"] = checks["largest_row_sum_defect"] <= rounding
    described = {"fingerprint": net.fingerprint, "architecture": net.arch.to_dict()}
    names = [each.name for each in chosen]
    return Profile(
        table(entries, variant, arithmetic),
        manifest_of(described, str(net.device), variant, arithmetic, names, checks),
    )


def chosen_metrics(who: str, metrics: str | Sequence[str]) -> list[Metric]:
    """The metrics of these names, each once; at least one."""
    if not metrics:
        raise MetricError(f"{who} must be given at least one metric; received none")
    return [metric(name) for name in dict.fromkeys([metrics] if isinstance(metrics, str) else metrics)]


def _in_deviations(net: Transformer, X: Tensor, real: Tensor, chosen: list[Metric]) -> Iterator[_Layer]:
    for step in propagate(net, X, ~real):
        found = [(each, read(each, step)) for each in chosen]
        defect = 0.0 if step.attention is None else float(row_sum_defect(step.attention.matrix(), real))
        there = [(each, reading) for each, reading in found if reading is not None]
        finite = all(bool(part.value.isfinite().all()) for part in (step.state.x, step.state.R))
        yield _Layer(step.layer, there, defect, finite)


def _plainly(net: Transformer, X: Tensor, real: Tensor, chosen: list[Metric]) -> Iterator[_Layer]:
    for step in net.steps(X, ~real):
        found, broken = _read_plainly(step, net.weights.layers, real, chosen, unit_of(net.dtype))
        defect = 0.0 if step.attention is None else float(row_sum_defect(step.attention, real))
        yield _Layer(step.layer, found, defect, finite=not bool(broken.any()))


def _read_plainly(
    step: Step, layers: Sequence[Layer], real: Tensor, chosen: list[Metric], unit: float
) -> tuple[Found, Tensor]:
    """Every metric of one step, in the order asked, and the samples that are no longer finite."""
    found, broken = readings("tokens", step.state, real, chosen, unit)
    if step.attention is not None:
        found += readings("attention", step.attention, real, chosen, unit)[0]
    if step.heads is not None and any(each.of == "heads" for each in chosen):
        added = contributions(layers[step.layer - 1], step.heads)
        found += readings("heads", added, real, chosen, unit)[0]
    return sorted(found, key=lambda pair: chosen.index(pair[0])), broken
