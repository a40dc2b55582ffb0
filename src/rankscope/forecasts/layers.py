"""Tokens and gradients of a network, layer by layer, at its initialisation: measured, and beside that in theory.

`forecasting.py` calls `by_layer`. In order: a few samples of the task go through `measure`; the mean-field recursion
takes the second moments of their tokens along (`mean_field.py`); closed forms say in which phase attention of each
layer is (`phases.py`); the gradient of the task's loss goes back through every layer, however small it becomes
(`gradients.py`).
"""

import math
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope import figures as fig
from rankscope.errors import ArchitectureError, RankscopeError
from rankscope.figures import sparkline, thinned
from rankscope.forecasts.gradients import gradients
from rankscope.forecasts.mean_field import Moments, mean_field
from rankscope.forecasts.phases import Phase, giorlandino, log_gradient
from rankscope.forecasts.plan import Plan
from rankscope.forecasts.readings import IN_BLOCKS, token_curves
from rankscope.lab import Model
from rankscope.nets import Transformer
from rankscope.results import Table
from rankscope.shapes import Float

SAMPLES = 2  # Samples of a batch that are followed: each costs two forward and backward passes of its own
MOST = 32  # Layers of a line of a table, at most
COLUMNS = ("layer", "residual", "residual_theory", "separation", "entropy", "phase", "boundary", "gradient",
           *IN_BLOCKS)  # fmt: skip

SCHEMA = {name: {"layer": pl.Int64, "phase": pl.String}.get(name, pl.Float64) for name in COLUMNS}


PANELS = {
    "tokens: what tells them apart": {
        "residual": "measured", "residual_theory": "mean-field theory", "separation": "1 - cosine, measured",
    },
    "gradients of the loss": {
        "gradient": "at tokens", "query": "of queries", "key": "of keys", "value": "of values", "mlp": "of the MLP",
    },
}  # fmt: skip
"""By heading, the columns of a forecast's table and their names in the legend."""


def by_layer(model: Model, plan: Plan, *, theory: bool = True) -> tuple[pl.DataFrame, dict[str, float], list[str]]:
    """(The table of a `Forecast`, its exponents, notes on what theory has no rule for).

    Args:
        model: Embedding, network and head before the first step.
        plan: What the network is to learn, and how.
        theory: Whether columns of theory are filled.
    """
    batch = plan.task.batch(plan.recipe.batch_size, plan.recipe.seed, 0).part(slice(SAMPLES))
    net, notes = model.network(torch.float64), []
    X = model.tokens(batch.inputs).detach().double()
    residual, entropy = token_curves(net, X, batch.padding, check=True)
    columns: dict[str, Any] = {"layer": list(range(net.arch.layers + 1))}
    columns["residual"] = residual.log10.masked_fill(residual.below_floor, math.nan).mean(0).tolist()
    exponents: dict[str, float] = {}
    phases: list[Phase] = []
    if batch.padding is not None and bool(batch.padding.any()):
        notes.append("samples are padded: theory and gradients by layer are of unpadded ones, and left out")
    else:
        first: list[Moments] = []  # with positions, where the network adds a table of them
        try:
            columns |= {"residual_theory": _theory(net, X, first)} if theory else {}
        except ArchitectureError as error:
            notes.append(f"mean-field theory has no rule: {error}")
        try:
            q, p = (first[0].q, first[0].p) if first else (math.nan, math.nan)
            phases = list(giorlandino(net, q, p, X.shape[1])) if theory else []
        except ArchitectureError as error:
            notes.append(f"phases have no closed form here: {error}")
        try:
            Y = model.net(model.tokens(batch.inputs), batch.padding).detach().requires_grad_()  # after the last norm
            (cotangent,) = torch.autograd.grad(plan.task.loss(model.logits(Y, batch.padding), batch), Y)
            profile = gradients(net, X, cotangent.double())
            of_weights = {kind: profile.weights[kind] for kind in IN_BLOCKS if kind in profile.weights}
            for name, readings in {"separation": profile.separation, "gradient": profile.tokens, **of_weights}.items():
                logs = readings.log10.masked_fill(readings.below_floor, math.nan).tolist()
                columns[name] = [math.nan] * (name in of_weights) + logs  # the input has no weights
            measured = profile.exponents()
            exponents |= {"angle": measured.angle, "gradient": measured.gradient}
        except RankscopeError as error:
            notes.append(f"gradients by layer are left out: {error}")
    if phases:
        columns["phase"] = ["", *(phase.name for phase in phases)]
        columns["boundary"] = [math.nan, *(phase.distance for phase in phases)]
        exponents["angle_theory"] = sum(phase.angle_exponent for phase in phases) / len(phases)
        exponents["gradient_theory"] = log_gradient(phases, X.shape[1]) / len(phases)
    columns["entropy"] = entropy.nanmean((0, 2)).tolist()
    return filled_table(columns), exponents, notes


def filled_table(columns: dict[str, Any]) -> pl.DataFrame:
    """The table of a `Forecast`: these columns, NaN in all others, and no phase where none is given."""
    height = len(columns["layer"])
    empty = {name: [""] * height if name == "phase" else [math.nan] * height for name in COLUMNS}
    return pl.DataFrame({name: columns.get(name, empty[name]) for name in COLUMNS}, schema_overrides=SCHEMA)


def _theory(net: Transformer, X: Float[Tensor, "batch token width"], first: list[Moments]) -> list[float]:
    """log10 of the relative residual in mean-field theory, by layer; NaN from the layer on where tokens leave
    float64's range, or what tells them apart is below what theory carries. Moments of layer 0 go into `first`."""
    logs = []
    try:
        for moments in mean_field(net, X):
            first += [] if first else [moments]
            residual = moments.relative_residual
            logs.append(math.log10(residual) if 0 < residual < math.inf else math.nan)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # C is not finite
        pass
    return logs + [math.nan] * (net.arch.layers + 1 - len(logs))


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
