"""Put cold on a trained model: what each remedy, at its published numbers, does to weights that were never
trained with it.

| quantity  | what it is                                                                                        |
|-----------|---------------------------------------------------------------------------------------------------|
| `log10`   | of the relative residual after a layer                                                            |
| `entropy` | of the rows of attention in nats, the mean over heads; none where weights are negative            |
| `moved`   | `|Y - Y_0| / |Y_0|` of the last layer's tokens, Y_0 those without the remedy                      |
| `cosine`  | of a token of Y with the same of Y_0, the mean over tokens, at the last layer                     |
"""

import math
from functools import lru_cache

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, named_network
from rankscope_studies.remedies.at_initialisation import METRIC
from rankscope_studies.trial import NONE

TOKENS, SAMPLES = 32, 4
ENTROPY = "entropy"
SCHEMA = {
    "remedy": pl.String, "sample": pl.Int64, "layer": pl.Int64, "quantity": pl.String, "value": pl.Float64,
    "marked": pl.Boolean, "refused": pl.String,
}  # fmt: skip
QUANTITIES = ("log10", "entropy", "moved", "cosine")
SECONDS = 0.5  # A layer takes, roughly


def measured(remedy: str, model: str, device: str = "cpu") -> pl.DataFrame:
    """What came of one remedy, or of none; `refused` says why it does not go onto the model."""
    net, X, padding = subject(model, device)
    try:
        mine = net if remedy == NONE else net.with_remedy(remedy)
        profile = measure(mine, X, padding, [METRIC, ENTROPY])
    except ArchitectureError as refused:
        return pl.DataFrame([{"remedy": remedy, "refused": str(refused)}], schema=SCHEMA)
    residuals = profile.table.filter(metric=METRIC).with_columns(quantity=pl.lit("log10"))
    rows = residuals.select("sample", "layer", "quantity", value="log10", marked="below_floor").to_dicts()
    by_layer = profile.table.filter(metric=ENTROPY).group_by("sample", "layer", maintain_order=True)
    rows += by_layer.agg(pl.col("value").mean(), pl.lit("entropy").alias("quantity")).to_dicts()
    Y_0, Y = (model.run(X.to(model.dtype), padding).states[-1].double() for model in (net, mine))
    for sample in range(len(X)):
        before, after = (tokens[sample][~padding[sample]] for tokens in (Y_0, Y))
        moved = float((after - before).norm() / before.norm())
        cosine = float(torch.cosine_similarity(after, before, dim=-1).mean())
        last = {"sample": sample, "layer": net.arch.layers}
        rows += [last | {"quantity": "moved", "value": moved}, last | {"quantity": "cosine", "value": cosine}]
    return pl.DataFrame([{"remedy": remedy, **row} for row in rows], schema=SCHEMA)


@lru_cache(maxsize=1)
def subject(model: str, device: str = "cpu") -> tuple[Transformer, Tensor, Tensor]:
    """The model and what it reads."""
    net = named_network(model, device=device)
    X, padding = net.encode(bundled_excerpts(TOKENS)[:SAMPLES], TOKENS)
    return net, X, padding


def mean(table: pl.DataFrame, remedy: str, quantity: str) -> float | None:
    """The mean over samples at the last layer; None where the remedy was refused, or it is no number."""
    rows = table.filter(remedy=remedy, quantity=quantity)
    average = rows.filter(pl.col("layer") == pl.col("layer").max())["value"].mean()
    return average if isinstance(average, float) and not math.isnan(average) else None
