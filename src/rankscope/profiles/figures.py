"""Figures of profiles: a metric by layer, arithmetics side by side, the cloud of tokens, singular values.

`Profile.plot`, cards, the report and the explorer draw what is described here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.figures import LISTED, NUMBER, evenly, in_sequence, power
from rankscope.metrics import symbol_of
from rankscope.profiles.views import CurveView, Layers, digits_lost, line_numbers, span

LAYERS = 200  # layers drawn at most; what is saved as CSV has all
CURVE_COLUMNS = ("variant", "arithmetic", "metric", "layer", "log10", "log10_low", "log10_high", "value",
                 "low", "high", "at_floor", "log10_floor")  # fmt: skip
VARIANTS = 6  # panels of a cloud and of spectra at most
FRAMES = 25  # layers of a cloud at most, evenly among those there are
SPECTRA = 9  # layers of a spectrum at most


def metric_title(metric: str) -> fig.Formula:
    """The symbol of a metric, as an axis has it."""
    return fig.Formula(symbol_of(metric), symbol_of(metric, tex=True))


def curves_chart(
    curves: Sequence[CurveView], log: bool | None = None, bounds: Mapping[str, Mapping[str, Layers]] | None = None
) -> fig.Chart:
    """A metric by layer: a line for each variant, the range about it, its floor, and hollow marks where it is noise.

    Lines that differ in one number, as steps of a training do, are coloured in their order; where there are many, a bar
    of colours says which is which.

    Args:
        curves: The lines, all of one metric.
        log: Draw on an axis of powers of ten; None does where the values span over two decades.
        bounds: By variant, and "upper" or "lower": log10 of what is proved of the metric at each layer.
    """
    log = span(curves) > 2 if log is None else log
    bounds = (bounds or {}) if log else {}
    places = order_of(curves)
    many = places is not None and len(curves) > LISTED
    lines: list[fig.Line] = []
    for k, (index, curve) in enumerate(zip(line_numbers(curves), curves, strict=True)):
        colour = fig.ordered_colour(places[k] / (len(curves) - 1)) if places else fig.line_colour(index)
        lines.append(_curve(curve, log, index, colour, min(1.0, 4 / len(curves)), places, many))
        if curve.variant in bounds and curve.arithmetic == "deviation":
            lines += [_bound(curve, kind, logs, colour) for kind, logs in bounds[curve.variant].items()]
    lines += _floors(curves) if log else []
    drawn = [side for line in lines for side in (line.y, *(side for band in line.bands for side in band))]
    title = metric_title(curves[0].metric)
    return fig.Chart([fig.Panel(fig.Axis("layer", last=max(curve.depth for curve in curves)),
            fig.Axis(title, fig.Powers(np.concatenate(drawn))) if log else fig.Axis(title, from_zero=True),
            lines)],
        _curve_table(curves),
        f"{curves[0].metric} by layer, {'logarithmic' if log else 'linear'}: "
        + "; ".join(f"{curve.label} ends {_ending(curve)}" for curve in curves) + ".",
        colour_bar=_steps_bar(curves, places) if places is not None and many else None)  # fmt: skip


def _ending(curve: CurveView) -> str:
    floor = f"below its floor, from layer {curve.floor_from}"
    return f"at {power(float(curve.log10[-1]))}" if curve.floor_from is None else floor


def order_of(curves: Sequence[CurveView]) -> list[int] | None:
    """The place of each curve in a sequence, as of steps of a training; None where they are no sequence."""
    numbers = in_sequence([curve.label for curve in curves])
    return None if numbers is None else [sorted(numbers).index(index) for index in numbers]


def _curve(
    curve: CurveView, log: bool, index: int, colour: str, strength: float, places: list[int] | None, many: bool
) -> fig.Line:
    layers = np.array(evenly(range(curve.depth + 1), LAYERS))
    centre, bands = curve.on_axis(log)
    hover: list[fig.Hover] = [
        (f"{curve.label}\nlayer {layer}: ", power(float(curve.log10[layer])),
         f"\nat {curve.arithmetic}'s floor: rounding noise" if curve.noise[layer] else "")
        for layer in layers]  # fmt: skip
    return fig.Line(layers, centre[layers], colour, None if many else curve.label, f"line {index}", index,
        marker=None if many else "index",
        dash="solid" if places else "index",
        noise=curve.noise[layers],
        bands=[] if many else [(low[layers], high[layers]) for low, high in bands],
        strength=strength, hover=hover)  # fmt: skip


def _floors(curves: Sequence[CurveView]) -> list[fig.Line]:
    """Each floor once: ratios have one per arithmetic, absolute values one per variant."""
    lines: dict[tuple[str, bytes], fig.Line] = {}
    for curve in curves:
        key = (curve.arithmetic, curve.floor.round(6).tobytes())
        if np.isfinite(curve.floor).any() and key not in lines:
            name, layers = f"floor of {curve.arithmetic}", np.array(evenly(range(curve.depth + 1), LAYERS))
            named = None if curve.arithmetic in {arithmetic for arithmetic, _ in lines} else name
            hover: list[fig.Hover] = [(f"{name}: {power(float(k))}", "", "") for k in curve.floor[layers]]
            lines[key] = fig.Line(layers, curve.floor[layers], "faint", named, name, dash="dot", width=1.4, hover=hover)
    return list(lines.values())


def _bound(curve: CurveView, kind: str, logs: Layers, colour: str) -> fig.Line:
    side = "at most" if kind == "upper" else "at least"
    name = f"{curve.label}: proved {side}"
    hover: list[fig.Hover] = [(f"{name} {power(float(k))}\nat layer {layer}", "", "") for layer, k in enumerate(logs)]
    return fig.Line(np.arange(len(logs)), logs, colour, name, marker=side, dash="dot", width=1, hover=hover)


def _steps_bar(curves: Sequence[CurveView], places: Sequence[int]) -> fig.ColourBar:
    names = [name for _, name in sorted(zip(places, (curve.label for curve in curves), strict=True))]
    columns = zip(*map(NUMBER.findall, names), strict=True)
    varied = next(column for column in columns if len(set(column)) > 1)
    title = names[0].replace(varied[0], "", 1).strip(" -_:=") or "line"
    return fig.ColourBar(title, varied)


def _curve_table(curves: Sequence[CurveView]) -> dict[str, list[Any]]:
    """For CSV: log10 at every layer, which does not underflow, the value, and the widest band of each."""
    rows: list[tuple[Any, ...]] = []
    for curve in curves:
        both = ((curve.log10, curve.log10_bands), (curve.value, curve.value_bands))
        sides = [side for centre, bands in both for side in (centre, *(bands or [(centre, centre)])[0])]
        numbers = zip(*sides, curve.noise, curve.floor, strict=True)
        rows += [(curve.variant, curve.arithmetic, curve.metric, layer, *row) for layer, row in enumerate(numbers)]
    return fig.columns_of(CURVE_COLUMNS, rows)


def arithmetics_chart(curves: Sequence[CurveView]) -> fig.Chart:
    """One variant in several arithmetics. Left: digits lost, -log10, on an axis of powers. Right: the ratio of logs
    from layer to layer, which tends to 3 where each layer cubes the residual. Hollow where it is noise."""
    left: list[fig.Line] = []
    right: list[fig.Line] = []
    rows: list[tuple[Any, ...]] = []
    for index, curve in enumerate(curves):
        lost, ratio = digits_lost(curve)
        layers, name, colour = np.arange(len(lost)), curve.arithmetic, fig.line_colour(index)
        digits: list[fig.Hover] = [(f"{name}, layer {k}\n", f"{lost[k]:.6g}", " digits") for k in layers]
        ratios: list[fig.Hover] = [(f"{name}, layer {k}\nratio ", f"{ratio[k]:.4g}", "") for k in layers]
        left.append(fig.Line(layers, np.log10(lost), colour, name, name, index, "index",
                             noise=curve.noise, hover=digits))  # fmt: skip
        right.append(fig.Line(layers, ratio, colour, None, name, index, "index",
                              noise=curve.noise, hover=ratios))  # fmt: skip
        rows += zip([name] * len(lost), layers, lost, ratio, curve.noise, strict=True)
    last, variant = max(curve.depth for curve in curves), curves[0].variant
    right.append(fig.Line([0, last], [3.0, 3.0], "faint", dash="dash", width=1))
    x, minus_log = fig.Axis("layer", last=last), rf"-\log_{{10}}\,{metric_title(curves[0].metric).tex}"
    powers = fig.Powers(np.concatenate([line.y for line in left]))
    ratio_axis = fig.Axis(fig.Formula("", r"\log r_l\,/\,\log r_{l-1}"), range=(0.0, 6.0))
    return fig.Chart([
            fig.Panel(x, fig.Axis(fig.Formula("−log₁₀", minus_log), powers), left, f"{variant}: digits lost"),
            fig.Panel(x, ratio_axis, right, "ratio of logs, layer to layer")],
        fig.columns_of(("arithmetic", "layer", "digits", "ratio", "at_floor"), rows),
        f"Digits lost by layer of {variant} in {', '.join(curve.arithmetic for curve in curves)}, and the "
        "ratio of logs from layer to layer.",
        size=(5.0, 4.0))  # fmt: skip


def cloud_chart(table: pl.DataFrame, magnified: bool = False) -> fig.Chart:
    """The tokens on two principal axes: a panel for each variant, a mark for each token, a frame for each layer.

    As it is, the cloud shrinks by its scale; magnified, it has the same size at every layer, and one sees it turn into
    a line. Tokens are coloured by their place in the text. A network that ends earlier than another stays at its last
    layer. Where a few tokens lie far out, axes are those of the others: tokens beyond stand at the edge, and the
    heading counts them.

    Args:
        table: As `cloud_table` gives it; of its samples the first is drawn.
        magnified: Draw the shape at unit size at every layer.
    """
    rows = table.filter(sample=0)
    variants = rows["variant"].unique(maintain_order=True).to_list()[:VARIANTS]
    layers = evenly(sorted(rows["layer"].unique().to_list()), FRAMES)
    visible = pl.col("shown").sqrt()  # the plane shows a part of the shape: magnified, it has size one
    factor = pl.when(visible > 0).then(1 / visible).otherwise(1.0) if magnified else 10.0 ** pl.col("log10_scale")
    rows = rows.filter(pl.col("variant").is_in(variants)).with_columns(
        (pl.col("x") * factor).alias("across"), (pl.col("y") * factor).alias("up")
    )
    drawn = rows.filter(pl.col("layer").is_in(layers))
    # where they begin is always seen, however many layers they are one for
    size = max(_extent(drawn), _extent(drawn.filter(layer=layers[0]))) if layers else 1.0
    frames = [_frame(rows, variants, layer, 1.04 * size) for layer in layers]
    axis = fig.Axis(range=(-1.08 * size, 1.08 * size))
    panels = []
    for k, variant in enumerate(variants):
        first = drawn.filter(variant=variant, layer=layers[0]).sort("token")
        last = max(1, len(first) - 1)
        hover: list[fig.Hover] = [
            ("", text, f"\ntoken {token} · {variant}") for token, text in first.select("token", "text").iter_rows()
        ]
        colours = [fig.ordered_colour(rank / last) for rank in range(len(first))]
        panels.append(fig.Panel(
            axis, axis, [fig.Points(*frames[0].points[k], colours, size=8, hover=hover)], variant, square=True
        ))  # fmt: skip
    return fig.Chart(panels, drawn.drop("across", "up").to_dict(as_series=False),
        f"Tokens on two principal axes by layer, {'each at unit size' if magnified else 'as they are'}, "
        f"of {', '.join(map(str, variants))}.",
        columns=min(3 if len(variants) > 4 else 2, len(variants)), frames=frames, size=(4.0, 4.0),
    )  # fmt: skip


def _extent(rows: pl.DataFrame) -> float:
    """The largest coordinate, or what all but a fiftieth lie within, where that is far less."""
    sizes = [abs(v) for v in (*rows["across"], *rows["up"]) if v is not None and math.isfinite(v)]
    if not sizes:
        return 1.0
    most, usual = max(sizes), 1.3 * sorted(sizes)[int(0.98 * (len(sizes) - 1))]
    return (usual if most > 2.5 * usual > 0 else most) or 1.0


def _frame(rows: pl.DataFrame, variants: Sequence[str], layer: int, edge: float) -> fig.Frame:
    points, headings = [], []
    for variant in variants:
        tokens = rows.filter(pl.col("layer") <= layer, variant=variant)
        last = max(tokens["layer"].to_list(), default=layer)
        tokens = tokens.filter(layer=last).sort("token")
        places = tokens.select("across", "up").to_numpy().astype(float)
        beyond = int((np.abs(places) > edge).any(1).sum())
        points.append(tuple(np.clip(places, -edge, edge).T))
        scale = tokens["log10_scale"][0] if len(tokens) else math.nan
        ended = "" if last == layer else f" · layer {last}"
        outside = f" · {beyond} beyond the edge" if beyond else ""
        headings.append(f"{variant}{ended}\napart by {power(math.nan if scale is None else scale)}{outside}")
    return fig.Frame(str(layer), points, headings)


def spectrum_chart(table: pl.DataFrame) -> fig.Chart:
    """Singular values of the residual as shares of the tokens' norm: a panel for each variant and in it a line for each
    layer, dark to light; geometric means over samples. `table` is that of a `SpectrumReader`."""
    variants = table["variant"].unique(maintain_order=True).to_list()[:VARIANTS]
    layers = evenly(sorted(table["layer"].unique().to_list()), SPECTRA)
    # A value that is noise in some samples is not there: the mean of the others would be of other texts.
    samples = table["sample"].n_unique()
    means = table.group_by("variant", "layer", "index", maintain_order=True).agg(
        pl.col("log10").mean(), pl.len().alias("samples")
    )
    means = means.filter(pl.col("samples") == samples, pl.col("log10").is_finite()).drop("samples")
    panels = []
    for k, variant in enumerate(variants):
        drawn = means.filter(pl.col("variant") == variant, pl.col("layer").is_in(layers)).drop_nulls("log10")
        lines = []
        for rank, layer in enumerate(layers):
            rows, name = drawn.filter(layer=layer).sort("index"), f"layer {layer}"
            hover: list[fig.Hover] = [
                (f"{variant}, {name}\nsingular value {index}: ", power(log10), "")
                for index, log10 in rows.select("index", "log10").iter_rows()
            ]
            colour = fig.ordered_colour(rank / max(1, len(layers) - 1))
            lines.append(fig.Line(rows["index"].to_list(), rows["log10"].to_list(), colour, name, name,
                              width=1.6, hover=hover))  # fmt: skip
        y = fig.Axis(
            fig.Formula("σ / ‖X‖_F" if k % 2 == 0 else "", r"\sigma\,/\,\|X\|_F"), fig.Powers(drawn["log10"].to_list())
        )
        panels.append(fig.Panel(fig.Axis("singular value"), y, lines, variant))
    return fig.Chart(panels, means.to_dict(as_series=False),
        f"Singular values of the residual by layer, of {', '.join(map(str, variants))}.",
        columns=min(2, len(variants)), height=320, shared=True, size=(4.6, 3.2))  # fmt: skip
