"""The tables of a depth card with a row for each sample: by layer, by head, by norm.

`card.py` calls `sample_tables` with what was read, what paths carry and what was lost. What is not known is null.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl
from torch import Tensor

from rankscope.depths.readings import ForwardReadings
from rankscope.depths.removals import Loss
from rankscope.paths import LayerShares

Shares = tuple[LayerShares, LayerShares]  # Of the output, and of its residual
Columns = dict[str, Tensor | None]  # Numbers of all samples by column; None where they are not known
SHARES = ("share", "share_embedding", "share_bias", "residual_share")
LOST = ("lost", "lost_cosine", "lost_residual", "lost_below_floor", "lost_residual_below_floor")
MARKS = ("lost_below_floor", "lost_residual_below_floor", "rank_doubtful")
"""Columns that say whether rounding may have decided a number."""
READ = ("cosine", "entropy", "sink")
HEAD_COLUMNS = ("sample", "layer", "head", *SHARES, *READ, *LOST)
LAYER_COLUMNS = (
    "sample", "layer", *SHARES, "share_attention", "share_mlp", "influence", "cosine_attention", "cosine_mlp", *READ,
    "sink_heads", "rank", "rank_doubtful", *LOST,
)  # fmt: skip
NORM_COLUMNS = ("sample", "layer", "norm_name", "rank_before", "rank_after", "rank_doubtful")
"""The columns of each table."""
PLACES = {"sample": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "norm_name": pl.String}


def sample_tables(
    forward: ForwardReadings, shares: Mapping[int, Shares], losses: Mapping[tuple[int, int | None], Loss]
) -> dict[str, pl.DataFrame]:
    """The tables `layers`, `heads` and `norms`.

    Args:
        forward: What was read of each layer.
        shares: What passes through each layer, by its number from 1; empty where paths are not known.
        losses: What is lost, by layer and head; the head is None where the layer itself was taken out.
    """
    layers, heads = [], []
    for layer, (of_layer, of_heads) in enumerate(zip(forward.layers, forward.heads, strict=True), 1):
        through = shares.get(layer)
        layers.append(_rows({"layer": layer}, _layer_shares(through) | of_layer | _lost(losses[layer, None])))
        for head in range(of_heads["entropy"].shape[1]):
            columns = _head_shares(through, head) | _lost(losses.get((layer, head)))
            columns |= {name: values[:, head] for name, values in of_heads.items()}
            heads.append(_rows({"layer": layer, "head": head}, columns))
    norms = [pl.DataFrame(schema=SCHEMAS[2]), *(_rows(place, ranks) for place, ranks in forward.norms)]
    return {
        "layers": pl.concat(layers).select(LAYER_COLUMNS), "heads": pl.concat(heads).select(HEAD_COLUMNS),
        "norms": pl.concat(norms),
    }  # fmt: skip


def _kind(name: str) -> Any:
    """The type of a column."""
    return PLACES.get(name, pl.Boolean if name in MARKS else pl.Float64)


SCHEMAS = [{name: _kind(name) for name in columns} for columns in (LAYER_COLUMNS, HEAD_COLUMNS, NORM_COLUMNS)]
"""The columns of the tables of layers, heads and norms, and their types."""


def _rows(place: Mapping[str, Any], columns: Mapping[str, Tensor | None]) -> pl.DataFrame:
    """The rows of all samples at one place."""
    samples = next(len(values) for values in columns.values() if values is not None)
    series = [pl.Series("sample", list(range(samples)), _kind("sample"))]
    series += [pl.Series(name, [value] * samples, _kind(name)) for name, value in place.items()]
    for name, values in columns.items():
        numbers = [None] * samples if values is None else values.tolist()
        series.append(pl.Series(name, numbers, _kind(name)))
    return pl.DataFrame(series).fill_nan(None)


def _layer_shares(shares: Shares | None) -> Columns:
    names = (*SHARES[:3], "share_attention", "share_mlp", SHARES[3])
    if shares is None:
        return dict.fromkeys(names)
    (layer, mlp, heads), residual = shares
    values = (layer.sum(0), layer[0], layer[1], heads.sum((0, 2)), mlp.sum(0), residual.layer.sum(0))
    return dict(zip(names, values, strict=True))


def _head_shares(shares: Shares | None, head: int) -> Columns:
    if shares is None:
        return dict.fromkeys(SHARES)
    of_output, of_residual = (part.heads[..., head] for part in shares)
    return dict(zip(SHARES, (of_output.sum(0), of_output[0], of_output[1], of_residual.sum(0)), strict=True))


def _lost(loss: Loss | None) -> Columns:
    return dict(zip(LOST, (None,) * len(LOST) if loss is None else loss[2:], strict=True))
