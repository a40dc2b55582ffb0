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
from rankscope.metrics.catalogue import Of
from rankscope.metrics.tokens import Tokens, tokens_of
from rankscope.profiles.profile import NUMBERS, SCHEMA

Found = list[tuple[Metric, Reading]]


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
    x = x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
    return with_holes([(each, each.read(x, ~real, unit=unit)) for each in asked], broken), broken


def read_tokens(ready: Tokens, broken: Tensor, chosen: Sequence[Metric], unit: float) -> Found:
    """Those of the chosen metrics that are of tokens."""
    asked = [each for each in chosen if each.of == "tokens"]
    return with_holes([(each, each.read(ready, unit=unit)) for each in asked], broken)


def broken_samples(x: Tensor, real: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a real token: their largest entry is one."""
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    return ~largest.masked_fill(~real, 0.0).flatten(1).isfinite().all(1)


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
