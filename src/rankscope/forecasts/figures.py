"""Figures of forecasts: tokens and gradients by layer, and the plane of a map."""

import numpy as np
import polars as pl

from rankscope.figures import description as fig
from rankscope.figures import sparkline, thinned
from rankscope.results import Table

MOST = 32  # Layers of a line of a table, at most
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


def layers_table(table: pl.DataFrame) -> Table:
    """Tokens and gradients in numbers: those of the first layer that has one, and of the last."""
    columns = [(heading.split()[0].strip(":"), *item) for heading, of in PANELS.items() for item in of.items()]
    logs = {f"{of}, {label}": table[name].fill_nan(None) for of, name, label in columns}
    known = {title: column for title, column in logs.items() if column.drop_nulls().len()}
    rows = [[title, *(f"{column.drop_nulls()[k]:.2f}" for k in (0, -1))] for title, column in known.items()]
    curves = [sparkline(thinned(column.to_list(), MOST)) for column in known.values()]
    note = "log10; marked numbers are left out"
    return Table(
        "From the first layer to the last", ["", "first", "last"], rows, note=note, curves=("by layer", curves)
    )


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
