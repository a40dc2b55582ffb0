"""From tensors to rows: what reads a layer, whoever ran the network.

`measure` runs a reference network and `watch` looks on while somebody else's runs; both hand what they see
of one layer to `readings`, and its answers to `table`. A sample that holds NaN or infinity at a real token
is **broken**: its values are NaN, the other samples of the batch are read as usual.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import Metric, Reading
from rankscope.metrics.metric import Of
from rankscope.metrics.rows import PatternRows
from rankscope.metrics.tokens import Tokens, tokens_of
from rankscope.profiles.profile import NUMBERS, SCHEMA

Found = list[tuple[Metric, Reading]]
WHOLE = 2**27
"""Bytes in float64 up to which P of a layer is taken whole."""
AT_ONCE = 2**25
"""Bytes of a block of rows of all heads, beyond."""


def readings(
    of: Of, x: Tensor, real: Tensor, chosen: Sequence[Metric], unit: float, whole: bool = False
) -> tuple[Found, Tensor]:
    """Those of the chosen metrics that are read off x, and which samples of x are broken.

    x is tokens `[batch, token, width]`, attention `[batch, head, token, token]`, what each head adds
    `[batch, head, token, width]` or routing `[batch, token, expert]`; real is `[batch, token]`; unit
    the eps of the arithmetic that made x; whole where every token is known to be real.
    """
    if of == "tokens":
        ready, broken = tokens_of(x, real, whole)
        return read_tokens(ready, broken, chosen, unit), broken
    asked = [each for each in chosen if each.of == of]
    broken = broken_samples(x, real if of == "routing" else real[:, None])
    if not asked:
        return [], broken
    found: Found = []
    if of == "attention" and 8 * x.numel() > WHOLE:
        found = _by_blocks(x, real & ~broken[:, None], [each for each in asked if each.streams], unit)
        asked = [each for each in asked if not each.streams]
    if asked:
        x = x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
        found += [(each, each.read(x, ~real, unit=unit)) for each in asked]
    order = [each.name for each in chosen]
    found.sort(key=lambda pair: order.index(pair[0].name))
    return with_holes(found, broken), broken


def _by_blocks(P: Tensor, real: Tensor, asked: Sequence[Metric], unit: float) -> Found:
    """Metrics of a large P a block of its rows at a time: no copy of it is made in float64."""
    rows = [each for each in asked if each.by_row is not None]
    numbers = [P.new_empty(P.shape[:-1], dtype=torch.float64) for _ in rows]
    step = max(1, AT_ONCE // (8 * P.shape[-1] * len(P) * P.shape[1]))
    for start in range(0, P.shape[-2], step):
        here = slice(start, start + step)
        counts = real[:, None, here, None] & real[:, None, None]
        part = P[..., here, :].to(torch.float64).masked_fill(~counts, 0.0)
        for each, number in zip(rows, numbers, strict=True):
            assert each.by_row is not None
            number[..., here] = each.by_row(part, real[:, None])
    found = [(each, each.from_rows(one, real, unit)) for each, one in zip(rows, numbers, strict=True)]
    held = PatternRows.of(P, real[:, None])
    others = [(each, each.by_head) for each in asked if each.by_row is None]
    return found + [(each, each.from_heads(of(held), unit)) for each, of in others if of is not None]


def read_tokens(ready: Tokens, broken: Tensor, chosen: Sequence[Metric], unit: float) -> Found:
    """Those of the chosen metrics that are of tokens."""
    asked = [each for each in chosen if each.of == "tokens"]
    return with_holes([(each, each.read(ready, unit=unit)) for each in asked], broken)


def broken_samples(x: Tensor, real: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a real token: the least or the largest entry is one."""
    if not x.shape[-1]:
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    least, largest = x.aminmax(dim=-1)
    fine = (least.isfinite() & largest.isfinite()) | ~real
    return ~fine.flatten(1).all(1)


def row_sum_defect(P: Tensor, real: Tensor) -> Tensor:
    """The largest |row sum - 1| of real rows, of what is finite."""
    if not P.numel():
        return torch.zeros((), dtype=torch.float64, device=P.device)
    defect = (P.sum(-1, dtype=torch.float64) - 1).abs() * real[:, None]
    return defect.nan_to_num(0.0).max()


class Entry(NamedTuple):
    """One metric of one layer, for a batch of samples."""

    layer: int
    start: int
    """The number of the batch's first sample."""
    metric: Metric
    reading: Reading


def table(entries: Sequence[Entry], variant: str, arithmetic: str) -> pl.DataFrame:
    """All rows of one network in one arithmetic, as a profile holds them."""
    columns: dict[str, list[Any]] = {name: [] for name in ("sample", "layer", "head", "metric")}
    for layer, start, metric, reading in entries:
        batch, *heads = reading.value.shape
        each = heads[0] if heads else 1
        columns["sample"] += [start + k for k in range(batch) for _ in range(each)]
        columns["head"] += [head if heads else None for _ in range(batch) for head in range(each)]
        columns["layer"] += [layer] * (batch * each)
        columns["metric"] += [metric.name] * (batch * each)
    parts = ([getattr(entry.reading, name) for entry in entries] for name in ("value", "log10", "floor"))
    whole = Reading(*map(_together, parts))
    numbers: dict[str, Any] = {name: getattr(whole, name).numpy() for name in NUMBERS}
    digits = [
        torch.full_like(each.value, torch.nan) if each.digits is None else each.digits
        for each in (entry.reading for entry in entries)
    ]
    numbers["digits"] = pl.Series(_together(digits).numpy()).fill_nan(None)
    rows = pl.DataFrame({**columns, **numbers}, schema_overrides={"head": pl.Int64})
    names = [pl.lit(variant).alias("variant"), pl.lit(arithmetic).alias("arithmetic")]
    return rows.with_columns(names).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))


def _together(parts: Sequence[Tensor]) -> Tensor:
    """All numbers in one row on the CPU, brought over at once from each device."""
    runs = groupby((part.flatten() for part in parts), key=lambda part: part.device)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(torch.cat(list(run)).cpu() for _, run in runs)])


def with_holes(found: Found, broken: Tensor) -> Found:
    """NaN where samples are broken; all readings at once, which is one call of an accelerator."""
    if not found:
        return found
    parts = [part for _, each in found for part in (each.value, each.log10, each.floor)]
    hole = broken.reshape(-1, *[1] * (parts[0].ndim - 1))
    rows = torch.stack(parts).masked_fill(hole, torch.nan).unbind()
    return [
        (metric, Reading(*row))
        for (metric, _), row in zip(found, zip(*[iter(rows)] * 3, strict=True), strict=True)
    ]
