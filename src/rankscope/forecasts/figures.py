"""Figures of forecasts: tokens and gradients by layer, and the plane of a map."""

import numpy as np
import polars as pl

from rankscope.figures import description as fig

PANELS = {
    "tokens: what tells them apart": {
        "residual": "measured", "residual_theory": "mean-field theory", "separation": "1 - cosine, measured",
    },
    "gradients of the loss": {
        "gradient": "at tokens", "query": "of queries", "key": "of keys", "value": "of values", "mlp": "of the MLP",
    },
}  # fmt: skip
"""By heading, the columns of a forecast's table and their names in the legend."""


def layers_chart(table: pl.DataFrame, said: str) -> fig.Chart:
    """Tokens and gradients by layer, measured beside theory.

    Args:
        table: That of a `Forecast`.
        said: What is expected, in a sentence.
    """
    panels, layers = [], table["layer"].to_list()
    for heading, columns in PANELS.items():
        lines = []
        for index, (name, label) in enumerate(columns.items()):
            y = table[name].to_numpy()
            if np.isfinite(y).any():
                dash = "dash" if name == "residual_theory" else "solid"
                lines.append(fig.Line(layers, y, fig.line_colour(index), label, index=index, dash=dash))
        logs = np.concatenate([line.y for line in lines]) if lines else np.zeros(1)
        panels.append(fig.Panel(fig.Axis("layer", last=layers[-1]), fig.Axis("", fig.Powers(logs)), lines, heading))
    alt = f"Tokens and gradients of {len(layers) - 1} layers before training. {said}"
    return fig.Chart(panels, table.to_dict(as_series=False), alt)


def map_chart(table: pl.DataFrame, x: str, y: str) -> fig.Chart:
    """The probability of learning over the plane of two numbers of a design.

    Args:
        table: What `forecast_map` returns.
        x: What goes across, in words.
        y: What goes up.
    """
    across, up = (sorted(table[name].unique().to_list()) for name in ("x", "y"))
    cells = {(row["x"], row["y"]): row for row in table.iter_rows(named=True)}
    values = np.array([[cells[a, b].get("probability") for a in across] for b in up], dtype=float)
    guesses = table["guess"].drop_nulls() if "guess" in table.columns else pl.Series([False])
    doubt = "" if not guesses.any() else ", as a guess" if guesses.all() else ", partly as a guess"
    heat = fig.Heatmap(
        range(len(across)), range(len(up)), values, f"probability that it learns{doubt}", range=(0.0, 1.0),
        numbers=len(across) * len(up) <= 64,
    )  # fmt: skip
    labels = [{float(k): f"{value:g}" for k, value in enumerate(axis)} for axis in (across, up)]
    ends = [(-0.5, len(axis) - 0.5) for axis in (across, up)]
    panel = fig.Panel(
        fig.Axis(x, range=ends[0], labels=labels[0], grid=False),
        fig.Axis(y, range=ends[1], labels=labels[1], grid=False),
        [heat],
    )
    alt = f"Probability of learning by {x} and {y}: from {np.nanmin(values):.2f} to {np.nanmax(values):.2f}."
    return fig.Chart([panel], table.to_dict(as_series=False), alt)


def cosines_chart(table: pl.DataFrame) -> fig.Chart:
    """The cosine of two tokens by layer: networks (dots, a band of one standard deviation), theory (lines).

    Args:
        table: What `giorlandino2026.figure_1` returns; each weight of skips has a panel.
    """
    panels = []
    for (skip,), part in table.sort("skip", descending=True).group_by("skip", maintain_order=True):
        marks: list[fig.Line] = []
        betas = part["beta"].unique().sort().to_list()
        for index, beta in enumerate(betas):
            mine = part.filter(pl.col("beta") == beta).sort("layer")
            layer, colour = mine["layer"].to_list(), fig.ordered_colour(index / max(1, len(betas) - 1) * 0.85)
            measured, spread = mine["measured"].to_numpy(), mine["measured_sd"].to_numpy()
            marks += [
                fig.Line(layer, measured, colour, f"β {beta:g}", marker="dot", width=0.0, index=index,
                         bands=[(measured - spread, measured + spread)], strength=0.5),
                fig.Line(layer, mine["mean_field"].to_numpy(), colour, width=1.5),
                fig.Line(layer, mine["closed_form"].to_numpy(), colour, dash="dot", width=1.5),
            ]  # fmt: skip
        heading = f"skip around attention of weight {skip:g}"
        y = fig.Axis("cosine of two tokens", range=(-0.05, 1.05))
        panels.append(fig.Panel(fig.Axis("layer", last=int(part["layer"].max())), y, marks, heading))  # type: ignore[arg-type]
    alt = "Cosines of tokens by layer: dots are networks, lines our recursion, dotted lines the published closed form."
    return fig.Chart(panels, table.to_dict(as_series=False), alt)
