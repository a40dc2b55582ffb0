"""The tokens as a cloud that falls together: two axes for all layers, a frame for each."""

import math
from typing import Any

import polars as pl

from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.style import PAPER, evenly, figure, heading, in_order, suffix, trace
from rankscope.figures.text import power

PANELS = 4
FRAMES = 25
"""Layers drawn at most, evenly among those there are."""


def cloud(table: pl.DataFrame, magnified: bool = False, sample: int = 0) -> Figure:
    """A panel for each variant (four at most), a mark for each token, a frame for each layer; axes are those
    of all layers and, across panels, the same.

    `table` is that of `profiles.cloud`. As it is, the cloud shrinks by its scale; `magnified`, it is drawn
    at the same size at every layer, and one sees it turn into a line. Tokens are coloured by their place in
    the text. `figure["frames"]` has a `name` and new data for each layer; a network that ends earlier than
    another stays at its last. Where a few tokens lie far out, axes are those of the others.
    """
    rows = table.filter(sample=sample)
    variants = rows["variant"].unique(maintain_order=True).to_list()[:PANELS]
    layers = evenly(sorted(rows["layer"].unique().to_list()), FRAMES)
    seen = pl.col("shown").sqrt()  # the plane shows a part of the shape: magnified, it has size one
    factor = pl.when(seen > 0).then(1 / seen).otherwise(1.0) if magnified else 10.0 ** pl.col("log10_scale")
    whole = rows.filter(pl.col("variant").is_in(variants)).with_columns(
        (pl.col("x") * factor).alias("across"), (pl.col("y") * factor).alias("up")
    )
    frames = [_frame(whole, variants, layer) for layer in layers]
    rows = whole.filter(pl.col("layer").is_in(layers))
    # where they begin is always seen, however many layers they are one for
    size = max(_extent(rows), _extent(rows.filter(layer=layers[0]))) if layers else 1.0
    axis = {"range": [-1.08 * size, 1.08 * size], "zeroline": True, "showticklabels": True, "nticks": 5,
            "exponentformat": "power"}  # fmt: skip
    data, layout = [], dict[str, Any](frames[0]["layout"]) if frames else {}
    for panel, variant in enumerate(variants):
        first = rows.filter(variant=variant, layer=layers[0]).sort("token")
        number = max(1, len(first) - 1)
        said = [
            f"<b>{escaped(text)}</b><br>token {token} · {escaped(variant)}"
            for token, text in first.select("token", "text").iter_rows()
        ]
        colours = [in_order(k / number) for k in range(len(first))]
        marker = {"size": 8, "opacity": 0.85, "line": {"width": 0.6, "color": PAPER}, "color": colours}
        marks = {**frames[0]["data"][panel], "mode": "markers", "marker": marker, "showlegend": False}
        data.append(trace(said=said, panel=panel, **marks))
        layout[f"xaxis{suffix(panel)}"] = dict(axis)
        layout[f"yaxis{suffix(panel)}"] = {**axis, "scaleanchor": f"x{suffix(panel)}"}
    return figure(
        data,
        {**layout, "margin": {"l": 48, "r": 16, "t": 76, "b": 48}},
        rows.drop("across", "up").to_dict(as_series=False),
        f"Tokens on two principal axes by layer, {'each at unit size' if magnified else 'as they are'}, "
        f"of {', '.join(map(str, variants))}.",
        panels=len(variants), columns=min(2, len(variants)), frames=frames,
    )  # fmt: skip


def _extent(rows: pl.DataFrame) -> float:
    """The largest coordinate, or what all but a fiftieth lie within, where that is far less."""
    sizes = [abs(v) for v in (*rows["across"], *rows["up"]) if v is not None and math.isfinite(v)]
    if not sizes:
        return 1.0
    most, usual = max(sizes), 1.3 * sorted(sizes)[int(0.98 * (len(sizes) - 1))]
    return (usual if most > 2.5 * usual > 0 else most) or 1.0


def _short(values: list[float | None]) -> list[float | None]:
    """In five digits: there are many, and no eye sees more."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.5g}") for value in values]


def _frame(rows: pl.DataFrame, variants: list[str], layer: int) -> dict[str, Any]:
    data, titles = [], []
    for panel, variant in enumerate(variants):
        own = rows.filter(pl.col("layer") <= layer, variant=variant)
        last = max(own["layer"].to_list(), default=layer)
        own = own.filter(layer=last).sort("token")
        data.append({name: _short(own[column].to_list()) for name, column in (("x", "across"), ("y", "up"))})
        scale = own["log10_scale"][0] if len(own) else math.nan
        titles.append(heading(variant, panel))
        ended = "" if last == layer else f" · layer {last}"
        titles[-1]["text"] += f"{ended}<br>apart by {power(math.nan if scale is None else scale)}"
    return {"name": str(layer), "data": data, "layout": {"annotations": titles}}
