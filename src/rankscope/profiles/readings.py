"""Readings of one layer from ordinary tensors, and their rows in a table, whoever ran the network.

`measure` runs a network and `watch` looks on while somebody else's runs; both hand the tensors of a layer to
`read_tensor` (by way of `readers.py` and of `live/state_readings.py`), and the readings to `table`. A sample
that holds NaN or infinity at a token is **broken**: its values are NaN, the other samples of the batch are
read as usual. Deviation arithmetic has readings of its own, `deviation/readings.py`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import Metric, Of, PatternRows, Reading, Tokens, tokens_of
from rankscope.profiles.profile import NUMBERS, SCHEMA

Readings = list[tuple[Metric, Reading]]
WHOLE = 2**27  # bytes in float64 up to which P of a layer is taken whole
BLOCK = 2**25  # bytes of a block of rows of all heads, beyond


def read_tensor(
    of: Of,
    x: Tensor,
    valid: Tensor,
    metrics: Sequence[Metric],
    unit: float,
    unpadded: bool = False,
    *,
    whole: int = WHOLE,
    block: int = BLOCK,
) -> tuple[Readings, Tensor]:
    """The readings of those metrics that are of x, and which samples of x are broken.

    Args:
        of: What x is.
        x: Tokens `[batch, token, width]`, attention `[batch, head, token, token]`, what each head adds
            `[batch, head, token, width]`, or routing `[batch, token, expert]`.
        valid: `[batch, token]`, True at tokens and False at padding.
        metrics: Metrics of anything; those of x are read.
        unit: The eps of the arithmetic that made x.
        unpadded: True where every token is known to be valid.
        whole: Bytes in float64 up to which P is taken whole.
        block: Bytes of a block of rows, beyond.
    """
    chosen = [metric for metric in metrics if metric.of == of]
    if of == "tokens" and chosen:
        ready, broken = tokens_of(x, valid, unpadded)
        return read_tokens(ready, broken, metrics, unit), broken
    broken = broken_samples(x, valid if of in ("tokens", "routing") else valid[:, None])
    if not chosen:
        return [], broken
    readings: Readings = []
    if of == "attention" and 8 * x.numel() > whole:
        streamed = [metric for metric in chosen if metric.streams]
        readings = _read_blocks(x, valid & ~broken[:, None], streamed, unit, block)
        chosen = [metric for metric in chosen if not metric.streams]
    if chosen:
        x = x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
        readings += [(metric, metric.read(x, ~valid, unit=unit)) for metric in chosen]
    return nan_where_broken(in_order(readings, metrics), broken), broken


def in_order(readings: Readings, metrics: Sequence[Metric]) -> Readings:
    """The readings in the order in which their metrics were asked for."""
    order = [metric.name for metric in metrics]
    return sorted(readings, key=lambda pair: order.index(pair[0].name))


def _read_blocks(P: Tensor, valid: Tensor, metrics: Sequence[Metric], unit: float, size: int) -> Readings:
    """Metrics of a large P a block of its rows at a time: no copy of it is made in float64."""
    of_rows = [(metric, metric.by_row) for metric in metrics if metric.by_row is not None]
    numbers = [P.new_empty(P.shape[:-1], dtype=torch.float64) for _ in of_rows]
    step = max(1, size // (8 * P.shape[-1] * len(P) * P.shape[1]))
    for start in range(0, P.shape[-2], step):
        block = slice(start, start + step)
        counts = valid[:, None, block, None] & valid[:, None, None]
        rows = P[..., block, :].to(torch.float64).masked_fill(~counts, 0.0)
        for (_, by_row), values in zip(of_rows, numbers, strict=True):
            values[..., block] = by_row(rows, valid[:, None])
    pairs = zip(of_rows, numbers, strict=True)
    readings = [(metric, metric.from_rows(values, valid, unit)) for (metric, _), values in pairs]
    pattern = PatternRows.of(P, valid[:, None])
    of_heads = [(metric, metric.by_head) for metric in metrics if metric.by_row is None and metric.by_head is not None]
    return readings + [(metric, metric.from_heads(by_head(pattern), unit)) for metric, by_head in of_heads]


def read_tokens(ready: Tokens, broken: Tensor, metrics: Sequence[Metric], unit: float) -> Readings:
    """The readings of those metrics that are of tokens, from tokens that are ready to be measured."""
    chosen = [metric for metric in metrics if metric.of == "tokens"]
    return nan_where_broken([(metric, metric.read(ready, unit=unit)) for metric in chosen], broken)


def broken_samples(x: Tensor, valid: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a token: the least or the largest entry is one."""
    if not x.shape[-1]:
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    least, largest = x.aminmax(dim=-1)
    fine = (least.isfinite() & largest.isfinite()) | ~valid
    return ~fine.flatten(1).all(1)


def row_sum_defect(P: Tensor, valid: Tensor) -> Tensor:
    """The largest |row sum - 1| of the rows of tokens, of what is finite."""
    if not P.numel():
        return torch.zeros((), dtype=torch.float64, device=P.device)
    defect = (P.sum(-1, dtype=torch.float64) - 1).abs() * valid[:, None]
    return defect.nan_to_num(0.0).max()


def nan_where_broken(readings: Readings, broken: Tensor) -> Readings:
    """NaN where samples are broken; all readings at once, which is one call of an accelerator."""
    if not readings:
        return readings
    parts = [part for _, reading in readings for part in (reading.value, reading.log10, reading.floor)]
    hole = broken.reshape(-1, *[1] * (parts[0].ndim - 1))
    rows = iter(torch.stack(parts).masked_fill(hole, torch.nan).unbind())
    return [(metric, Reading(next(rows), next(rows), next(rows))) for metric, _ in readings]


class ReadingRow(NamedTuple):
    """One metric of one layer, for a batch of samples."""

    layer: int
    start: int  # the index of the batch's first sample
    metric: Metric
    reading: Reading


def readings_table(rows: Sequence[ReadingRow], variant: str, arithmetic: str) -> pl.DataFrame:
    """The table of one network in one arithmetic, as a profile holds it."""
    columns: dict[str, list[Any]] = {name: [] for name in ("sample", "layer", "head", "metric")}
    for layer, start, metric, reading in rows:
        batch, *heads = reading.value.shape
        count = heads[0] if heads else 1
        columns["sample"] += [start + k for k in range(batch) for _ in range(count)]
        columns["head"] += [head if heads else None for _ in range(batch) for head in range(count)]
        columns["layer"] += [layer] * (batch * count)
        columns["metric"] += [metric.name] * (batch * count)
    parts = ([getattr(row.reading, name) for row in rows] for name in ("value", "log10", "floor"))
    joined = Reading(*map(_on_cpu, parts))
    digits = [
        torch.full_like(reading.value, torch.nan) if reading.digits is None else reading.digits
        for reading in (row.reading for row in rows)
    ]
    numbers = {name: getattr(joined, name).numpy() for name in NUMBERS} | {"digits": _on_cpu(digits).numpy()}
    count = len(columns["sample"])
    known: dict[str, Any] = {"variant": [variant] * count, "arithmetic": [arithmetic] * count, **columns, **numbers}
    return pl.DataFrame(
        [pl.Series(name, known[name], kind, nan_to_null=name == "digits") for name, kind in SCHEMA.items()]
    )


def _on_cpu(parts: Sequence[Tensor]) -> Tensor:
    """All numbers in one row on the CPU, brought over at once from each device."""
    runs = groupby((part.flatten() for part in parts), key=lambda part: part.device)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(torch.cat(list(run)).cpu() for _, run in runs)])
