"""Singular values of the residual, layer by layer: on how many directions tokens still differ."""

from typing import Any

import polars as pl

from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import evenly, figure, heading, in_order, suffix, trace
from rankscope.figures.text import power

PANELS = 6
LINES = 9
"""Layers drawn at most, evenly among those there are."""


def spectrum(table: pl.DataFrame) -> Figure:
    """A panel for each variant (six at most) and in it a line for each layer, dark to light: the singular
    values of the residual as shares of the tokens' norm, geometric means over samples. `table` is that of
    `profiles.spectra`."""
    variants = table["variant"].unique(maintain_order=True).to_list()[:PANELS]
    layers = evenly(sorted(table["layer"].unique().to_list()), LINES)
    # A value that is noise in some samples is not there: the mean of the others would be of other texts.
    samples = table["sample"].n_unique()
    means = table.group_by("variant", "layer", "index", maintain_order=True).agg(
        pl.col("log10").mean(), pl.len().alias("samples")
    )
    means = means.filter(pl.col("samples") == samples, pl.col("log10").is_finite()).drop("samples")
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": []}
    for panel, variant in enumerate(variants):
        own = means.filter(pl.col("variant") == variant, pl.col("layer").is_in(layers)).drop_nulls("log10")
        axis = Powers(own["log10"].to_list())
        for number, layer in enumerate(layers):
            rows = own.filter(layer=layer).sort("index")
            logs, name = rows["log10"].to_list(), f"layer {layer}"
            said = [
                f"{escaped(variant)}, {name}<br>singular value {index}: <b>{power(k)}</b>"
                for index, k in zip(rows["index"], logs, strict=True)
            ]
            look = {"width": 1.6, "color": in_order(number / max(1, len(layers) - 1))}
            line = trace(rows["index"].to_list(), axis.place(logs), said, panel, line=look)
            data.append({**line, "name": name, "legendgroup": name, "showlegend": panel == 0})
        layout[f"xaxis{suffix(panel)}"] = {"title": {"text": "singular value"}, "zeroline": False}
        layout[f"yaxis{suffix(panel)}"] = axis.axis("σ / ‖X‖<sub>F</sub>" if panel % 2 == 0 else "")
        layout["annotations"].append(heading(variant, panel))
    return figure(
        data, {**layout, "height": 320}, means.to_dict(as_series=False),
        f"Singular values of the residual by layer, of {', '.join(map(str, variants))}.",
        panels=len(variants), columns=2 if len(variants) > 1 else 1,
    )  # fmt: skip
