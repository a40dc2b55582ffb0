"""`rankscope forecast`: will this design collapse, will it train, and what would mend it?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.inputs import network
from rankscope.cli.show import console, machine, progress, say, sparkline, thinned, titled

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.forecasts import Forecast, Mend

TASKS = ("next-character", "induction", "copying", "sort", "digits", "hull", "memorization")
MOST = 32  # Layers of a line, at most
CURVES = {
    "residual": "what tells tokens apart, measured",
    "residual_theory": "the same in mean-field theory",
    "separation": "one minus the cosine of tokens",
    "gradient": "gradient at tokens",
    "query": "gradient of queries",
    "key": "gradient of keys",
    "value": "gradient of values",
    "mlp": "gradient of the MLP",
}
"""Columns of the table that are shown, in words."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training that is asked about."""

    task: Annotated[str, opt.option(opt.TEXT, "NAME", "What is to be learnt.", TASKS)] = "next-character"
    tokens: Annotated[
        int | None, opt.option(opt.TEXT, "N", "Tokens of a sample.", min=2, show_default="those of the task")
    ] = None
    steps: Annotated[int, opt.option(opt.TEXT, "N", "Steps of the training.", min=1)] = 300
    lr: Annotated[float, opt.option(opt.TEXT, "RATE", "Its largest learning rate.")] = 1e-3


def forecast(
    model: opt.Model,
    depth: Annotated[int | None, opt.option(opt.NETWORK, "N", "Layers, instead of the model's.", min=1)] = None,
    remedy: Annotated[
        list[str] | None, opt.option(opt.NETWORK, "SPEC", "remedy", names.REMEDIES, "--remedy", show_default="none")
    ] = None,
    init: Annotated[str, opt.option(opt.NETWORK, "NAME", "init", opt.INITS)] = "xavier",
    seed: Annotated[int, opt.option(opt.NETWORK, "N", "seed", min=0)] = 0,
    training: TrainingOptions = TrainingOptions(),
    mends: Annotated[
        bool, typer.Option("--mends/--no-mends", metavar=" ", help="Also forecast changes that may mend it.")
    ] = True,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Say before a training whether the network will learn, where its tokens and gradients go, and what would mend it.

    MODEL is a name, a folder or an architecture as JSON; its weights are drawn anew. Nothing is trained: a network of
    the design is measured at its initialisation, and trained designs of the lab that read alike say what to expect.
    """
    from rankscope.forecasts import forecast as forecast_of_network

    opt.require_positive(lr=training.lr)
    arch = network(model, opt.NetworkOptions(), quiet=printing.silent).arch
    found = forecast_of_network(
        arch, task=training.task, tokens=training.tokens, init=init, steps=training.steps, lr=training.lr, depth=depth,
        remedies=tuple(remedy or ()), seed=seed,
    )  # fmt: skip
    changes: list[Mend] = []
    if mends:
        with progress(printing.silent) as start:
            changes = found.mends(progress=start("changes"))
    if printing.as_json:
        listed = [{"change": mend.change, **_numbers(mend.forecast)} for mend in changes]
        return machine({**found.to_dict(), "mends": listed})
    console().print(layers_table(found))
    say("", *found.verdict)
    if changes:
        say("")
        console().print(mends_table(changes))


def _numbers(forecast: "Forecast") -> dict[str, float]:
    """The numbers of a forecast that are compared between networks."""
    return {"probability": forecast.probability, "place": forecast.place}


def layers_table(forecast: "Forecast") -> "Table":
    """Tokens and gradients by layer: a line for each, from the first layer to the last."""
    table = titled("from the first layer to the last", "log10; marked numbers are left out")
    for heading in ("", "by layer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("first", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, said in CURVES.items():
        logs = [None if log != log else log for log in forecast.table[name].to_list()]
        known = [log for log in logs if log is not None]
        if known:
            table.add_row(said, sparkline(thinned(logs, MOST)), f"{known[0]:.2f}", f"{known[-1]:.2f}")
    return table


def mends_table(mends: "list[Mend]") -> "Table":
    """A line for each change: how probable it is to learn with it, and its place."""
    from rankscope.forecasts.verdict import place_of_100

    table = titled("what would mend it", "each change alone, weights drawn anew", words=["change"])
    for heading in ("probability", "place of 100"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mend in mends:
        table.add_row(mend.change, f"{mend.forecast.probability:.2f}", str(place_of_100(mend.forecast.place)))
    return table
