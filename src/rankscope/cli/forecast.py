"""`rankscope forecast`: will this design collapse, will it train, and what would mend it?"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import options as opt
from rankscope.cli.inputs import command_line, network, split_names
from rankscope.cli.measure import ANNOUNCED_SECONDS
from rankscope.cli.output import with_manifest
from rankscope.cli.show import complain, machine, progress, say, say_where, show_tables
from rankscope.errors import MetricError, require

if TYPE_CHECKING:
    from rankscope.forecasts import Forecast, Mend
    from rankscope.results import Table

MAPS = ("skip", "depth", "query_gain", "value_gain", "temperature", "rate")
TASKS = ("next-character", "induction", "copying", "digits")  # Packages add others


@dataclass(frozen=True)
class DesignOptions:
    """Options that change the design of a model, and how its weights are drawn."""

    layers: opt.Layers = None
    remedy: opt.Remedies = None
    init: Annotated[str, opt.option(opt.NETWORK, "NAME", "init", opt.INITS)] = "xavier"
    seed: Annotated[int, opt.option(opt.NETWORK, "N", "seed", min=0)] = 0


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training that is asked about."""

    task: Annotated[str, opt.option(opt.TRAINING, "NAME", "What is to be learnt.", TASKS)] = "next-character"
    tokens: Annotated[
        int | None, opt.option(opt.TEXT, "N", "Tokens of a sample.", min=2, show_default="those of the task")
    ] = None
    steps: Annotated[int, opt.option(opt.TRAINING, "N", "Steps of the training.", min=1)] = 300
    lr: Annotated[float, opt.option(opt.TRAINING, "RATE", "Its largest learning rate.")] = 1e-3


@dataclass(frozen=True)
class VariationOptions:
    """Options that say which changed designs are forecast as well."""

    mends: Annotated[
        bool, opt.option(opt.RESULT, " ", "Also forecast changes that may mend it.", (), "--mends/--no-mends")
    ] = True
    map_of: Annotated[
        str | None, opt.option(opt.RESULT, "X,Y", f"Forecast a grid of two of {', '.join(MAPS)}.", (), "--map")
    ] = None
    map_size: Annotated[int, opt.option(opt.RESULT, "N", "Values of each number of the map.", min=2, max=32)] = 7


def forecast(
    model: opt.Model,
    design: DesignOptions = DesignOptions(),
    training: TrainingOptions = TrainingOptions(),
    variations: VariationOptions = VariationOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Say before a training whether the network will learn, where its tokens and gradients go, and what would mend it.

    The weights of MODEL are drawn anew. Nothing is trained: a network of the design is measured at its initialisation,
    and compared with 2,009 networks of width 64 that were trained. Of a network unlike all of those the answer is a
    guess, and says so.
    """
    from rankscope.forecasts import Design, Recipe
    from rankscope.forecasts import forecast as forecast_of_network

    opt.require_positive(lr=training.lr)
    recipe = Recipe(steps=training.steps, lr=training.lr, seed=design.seed)
    map_of = variations.map_of
    axes = None if map_of is None else split_names("map", map_of)
    require(axes is None or len(axes) == 2, f"--map must name two numbers, X,Y; got {map_of}", MetricError, "map")
    arch = network(model, opt.NetworkOptions(), quiet=results.silent).arch
    with progress(results.silent) as start:
        start("the forecast")
        asked = Design(training.task, training.tokens, design.layers, tuple(design.remedy or ()), design.init)
        result = forecast_of_network(arch, design=asked, recipe=recipe)
    if not results.as_json:  # at once: changes may take many times as long
        show_tables(result.sections()[0].tables[0])
        say("", *result.verdict)
    changes = _changes(result, results.silent) if variations.mends else []
    plane = None
    if axes is not None:
        from rankscope.forecasts import forecast_map

        with progress(results.silent) as start:
            plane = forecast_map(result, axes[0], axes[1], size=variations.map_size, progress=start("map"))
    listed = [{"change": mend.change, **_numbers(mend.forecast)} for mend in changes]
    told = {**_told(result), "mends": listed, "map": None if plane is None else plane.to_dicts()}
    if results.output is not None:
        _write(results.output, result, told, plane, axes)
    if results.as_json:
        return machine(told)
    for table in [*([mends_table(changes)] if changes else []), *([map_table(plane, *axes)] if axes else [])]:
        say("")
        show_tables(table)
    if results.output is not None:
        say_where("Forecast and figures", results.output)


def _changes(result: "Forecast", silent: bool) -> "list[Mend]":
    """Forecast changes that may mend the design; how long all take is told by the first."""
    from rankscope.profiles import in_words

    with progress(silent) as start:
        bar, begun = start("changes"), time.monotonic()

        def tell(done: int, total: int, change: str) -> None:
            bar(done, total, change)
            left = (total - 1) * (time.monotonic() - begun)
            if done == 1 and left > ANNOUNCED_SECONDS and not silent:
                with start.paused():
                    complain(f"1 of {total} changes is forecast: the others take {in_words(left)} by estimate; "
                             "--no-mends leaves them out")  # fmt: skip

        return result.mends(progress=tell)


def _write(folder: Path, result: "Forecast", told: dict[str, Any], plane: Any, axes: list[str] | None) -> None:
    """Save the forecast, which `rankscope.read` gives back; beside it all that is told as JSON, figures and the map."""
    import json

    from rankscope.figures import plain, plot, save
    from rankscope.files import write_text
    from rankscope.forecasts import AXES, map_chart

    with_manifest(result, command=command_line()).save(folder)
    write_text(folder / "forecast.json", json.dumps(plain(told), indent=1) + "\n")
    save(result.plot(), folder / "layers")
    if plane is not None and axes is not None:
        save(plot(map_chart(plane, *(AXES[name].title for name in axes))), folder / "map")


def map_table(plane: Any, x: str, y: str) -> "Table":
    """The probability of learning at every cell, the largest value of y on top."""
    from rankscope.results import Table

    across, up = (sorted(plane[name].unique().to_list()) for name in ("x", "y"))
    cells = {(row["x"], row["y"]): row for row in plane.iter_rows(named=True)}
    rows = [[f"{b:.3g}", *(_probability(cells.get((a, b), {})) for a in across)] for b in reversed(up)]
    note = f"across {x}, up {y}; ?: a guess, unlike all trained designs"
    return Table("probability that it learns", [y, *(f"{value:.3g}" for value in across)], rows, note=note)


def _probability(row: dict[str, Any]) -> str:
    """The probability of a row, with a question mark where it is a guess; a dash where there is none."""
    known = row.get("probability")
    return "–" if known is None else f"{known:.2f}{'?' * bool(row['guess'])}"


TOLD = ("probability", "place", "place_spread", "similarity", "unfamiliar", "known", "entries", "share_right")


def _told(forecast: "Forecast") -> dict[str, Any]:
    """The JSON of a forecast."""
    details = forecast.details()
    numbers, recipe = details.pop("prediction"), details.pop("recipe")
    told = {name: numbers[name] for name in TOLD}
    told |= {"steps": recipe["steps"], "lr": recipe["lr"], "batch": recipe["batch_size"]}
    told |= {"nearest": forecast.prediction.nearest.to_dicts(), "table": forecast.table.to_dicts()}
    del details["learnt_below"]
    return {**told, **details, "notes": list(forecast.notes)}


def _numbers(forecast: "Forecast") -> dict[str, float]:
    """The numbers of a forecast that are compared between networks."""
    return {"probability": forecast.probability, "place": forecast.place, "guess": bool(forecast.doubts)}


def mends_table(mends: "list[Mend]") -> "Table":
    """A line for each change: how probable it is to learn with it, and its place."""
    from rankscope.forecasts import place_of_100
    from rankscope.results import Table

    rows = [
        [mend.change, _probability(_numbers(mend.forecast)), str(place_of_100(mend.forecast.place))] for mend in mends
    ]
    note = "each change alone, weights drawn anew; ?: a guess, unlike all trained designs"
    return Table("what would mend it", ["change", "probability", "place of 100"], rows, note=note)
