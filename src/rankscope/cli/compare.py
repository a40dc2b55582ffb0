"""`rankscope compare`: models, variants and runs side by side, on the same text; training runs at the same steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.cli import options as opt
from rankscope.cli.inputs import MeasureTask, command_line, is_random, network, read_inputs, split_names, text_fields
from rankscope.cli.measure import measure_all, raise_if_stopped
from rankscope.cli.options import ResultOptions, model_named
from rankscope.cli.output import open_store, require_same_network, with_manifest
from rankscope.cli.show import machine, say, show_run, show_tables
from rankscope.errors import ArchitectureError, FileError, MetricError, require

if TYPE_CHECKING:
    import numpy as np

    from rankscope.nets import Encoded, Transformer
    from rankscope.profiles import Profile
    from rankscope.trainings import RunComparison, TrainingRun


@dataclass(frozen=True)
class CompareOptions(opt.MetricOptions):
    """Options that say what is compared."""

    threshold: opt.Threshold = 1e-3


def compare(
    things: opt.Compared,
    options: opt.NetworkOptions = opt.NetworkOptions(),
    device: opt.Device = "cpu",
    text: opt.TextOptions = opt.TextOptions(),
    measured: CompareOptions = CompareOptions(),
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Set models, variants and runs side by side: which keeps tokens apart longer?

    All read the same excerpts, each with its own tokenizer. Depths and widths may differ. A run is a folder
    that [bold]measure -o[/bold] or [bold]compare -o[/bold] has written; it keeps the text it was measured on.
    Cells of a [bold]sweep[/bold] are named by number or by factors: runs/study:17, runs/study:depth=6,seed=0.

    Training runs, which a [bold]Monitor[/bold] or [bold]checkpoints[/bold] has written, are set side by side
    at the steps that they have in common.
    """
    if any(map(is_training, things)):
        require_different(things, one_is_enough=True)
        named = None if measured.metrics == opt.DEFAULT_METRICS else measured.metrics
        return compare_trainings(things, named, results)
    from rankscope.metrics import is_share
    from rankscope.profiles import disagreement, ends_of, listing, undecided
    from rankscope.report import write_run_directory

    task, threshold = MeasureTask.parse(measured.metrics, measured.arithmetic), measured.threshold
    metric = task.metrics[0]
    opt.require_positive(threshold=threshold)
    sides = sides_of(things, options)
    store = open_store(results.output)
    saved = {side.thing: saved_profile(side, task.metrics) for side in sides if side.model is None}
    asked = {side.model: options if side.random else replace(options, init=None, seed=None) for side in sides}
    models = [model for model in asked if model is not None]
    excerpts = read_inputs(text, *models, quiet=results.silent) if models else []
    nets = {model: network(model, asked[model], device, quiet=results.silent) for model in models}
    encoded = {model: net.encode(excerpts, text.max_length) for model, net in nets.items()}
    jobs = {
        side.title: (nets[side.model].variant(side.variant), *encoded[side.model])
        for side in sides
        if side.model is not None
    }
    compared = {side.title: side.thing for side in sides}
    require_same_network(store, "compare", {name: net for name, (net, _, _) in jobs.items()}, {"compared": compared})
    profile = measure_all(jobs, task, results.silent, saved=list(saved.values()))
    fields = {"compared": compared, "origins": origins_of(sides, nets, saved, profile.variants)}
    fields |= text_fields(text, excerpts) if models else {}
    profile = with_manifest(profile, command=command_line(), **fields)
    curves = profile.views(metric)
    differ = disagreement(ends_of({name: profile.views(name) for name in profile.metrics}))
    tied = undecided(ends_by_sample(profile, metric), paired=not saved)
    complete = profile.manifest.stopped is None
    states = state_differences(sides, nets, encoded, excerpts, text.max_length) if complete else []
    sentences = [listing(curves, threshold), *filter(None, (tied, differ, states_sentence(states)))]
    written = None if store is None else write_run_directory(profile, store, " · ".join(compared), entry="compare")
    lines = [
        {"name": curve.name, "arithmetic": curve.arithmetic, "first_layer": curve.first,
         "log10": curve.log10[curve.first :].tolist(), "floor_from": curve.floor_from,
         "uniform_from": curve.uniform_from(threshold) if is_share(metric) else None}
        for curve in curves
    ]  # fmt: skip
    more = {
        "lines": lines, "verdict": sentences[0], "undecided": tied or None, "disagreement": differ or None,
        "hidden_states": [difference._asdict() for difference in states],
    }  # fmt: skip
    if saved and models and not results.quiet:
        sentences.append("Runs keep the text that they were measured on.")
    show_run(profile, metric, sentences, written, results, threshold, more)
    raise_if_stopped(profile, results.output)


def origins_of(
    sides: "list[Side]", nets: "dict[str, Transformer]", saved: "dict[str, Profile]", measured: list[str]
) -> dict[str, Any]:
    """Where the weights of each model came from that was measured, and of each saved run what it says of that."""
    shown = {side.model for side in sides if side.title in measured}
    origins = {name: net.origin.described() for name, net in nets.items() if net.origin is not None and name in shown}
    for folder, run in saved.items():
        origins |= run.manifest.more.get("origins") or {folder: run.manifest.origin or {}}
    return origins


def ends_by_sample(profile: "Profile", metric: str) -> "dict[str, np.ndarray]":
    """The log10 of a metric at the last layer, of each sample, by the name of each line that does not end at a floor;
    of attention the mean over heads."""
    ends = {
        curve.name: profile.curve(metric, "log10", variant=curve.variant, arithmetic=curve.arithmetic)[:, -1].numpy()
        for curve in profile.views(metric)
        if curve.floor_from is None
    }
    return {name: values.reshape(len(values), -1).mean(1) for name, values in ends.items()}


class Side(NamedTuple):
    """One side of the comparison: a model and a variant of it, or a run, which has no model."""

    thing: str
    model: str | None
    variant: str
    title: str
    random: bool = False  # True if the weights of the model are drawn

    @classmethod
    def parse(cls, thing: str) -> "Side":
        """Understand an argument: the folder of a run, cells of a sweep, a model, or model:variant."""
        from rankscope.engine import choice_in

        folder = Path(thing)
        sentence = f"cells of a sweep must be named, as {thing}:0 or {thing}:seed=0; got all of it"
        require(not (folder / "sweep.parquet").is_file(), sentence, FileError, "cells")
        if choice_in(thing) or (folder / "profile.parquet").is_file() or thing.endswith(".parquet"):
            return cls(thing, None, "", _last(thing))
        sentence = f"{thing} holds statistics over a corpus, not a profile: compare the models, with --text"
        require(not (folder / "summary.parquet").is_file(), sentence, FileError, thing)
        model, colon, variant = thing.rpartition(":")
        if not colon or folder.exists():
            model = model_named(thing)
            return cls(thing, model, "transformer", _last(model))
        sentence = f"after a model's colon comes a variant, as transformer-norm or san+skip; got {thing!r}"
        require(variant.startswith(("san", "transformer")), sentence, ArchitectureError, "variant")
        model = model_named(model)
        return cls(thing, model, variant, f"{_last(model)}:{variant}")


def sides_of(things: list[str], options: opt.NetworkOptions) -> list[Side]:
    """The sides that are named, each with a title of its own; what a comparison cannot be made of is refused, and so
    are --init and --seed where no model has weights to draw."""
    sides = [Side.parse(thing) for thing in things]
    require_different(things)
    random = {side.model: is_random(side.model) for side in sides if side.model is not None}
    if random and not any(random.values()):
        is_random(next(iter(random)), options)
    titles = unique_titles([side.title for side in sides], things)
    return [
        side._replace(title=f"{title} (random weights)", random=True)
        if side.model is not None and random[side.model]
        else side._replace(title=title)
        for title, side in zip(titles, sides, strict=True)
    ]


class StateDifference(NamedTuple):
    """How far the hidden states of a network are from those of another of its shape on the same tokens, at the last
    layer: `||Y' - Y|| / ||Y||`, mean over texts."""

    name: str  # The network whose hidden states are Y'
    other: str  # The network whose hidden states are Y
    relative: float


def state_differences(
    sides: list[Side], nets: "dict[str, Transformer]", encoded: "dict[str, Encoded]", excerpts: Any, tokens: int
) -> list[StateDifference]:
    """How far the hidden states of each model are from those of the first model that has its variant, depth and width
    and reads the same tokens. Saved runs keep no hidden states and are passed over."""
    from rankscope.depths import Sample, fidelity_of

    def of_shape(side: Side) -> Any:
        net = nets[str(side.model)]
        words = net.words(excerpts, tokens) if isinstance(excerpts, list) else "images"
        return side.variant, net.arch.layers, net.arch.width, words

    differences: list[StateDifference] = []
    firsts: list[tuple[Any, Side, Any]] = []  # shape, side and output of the first of each shape
    for side in sides:
        if side.model is None:
            continue
        shape, net, sample = of_shape(side), nets[side.model].variant(side.variant), Sample(*encoded[side.model])
        output = sample.output(net)
        known = next((first for first in firsts if first[0] == shape and first[2].shape == output.shape), None)
        if known is None:
            firsts.append((shape, side, output))
        else:
            relative = fidelity_of(known[2], output, sample.valid()).relative_error
            differences.append(StateDifference(side.title, known[1].title, relative))
    return differences


def states_sentence(differences: list[StateDifference]) -> str:
    """A sentence with the known differences of hidden states; without any, one on what a comparison does not show."""
    beside = "; ".join(f"those of {name} from those of {first} by {100 * x:.3g} %" for name, first, x in differences)
    if not beside:
        return "Compared is how far tokens are apart, not what they hold: equal numbers do not make networks alike."
    return f"Hidden states at the last layer differ, {beside} (mean over texts of |Y' - Y| / |Y|)."


def _last(path: str) -> str:
    """The last part of a path or hub id."""
    return Path(path).name or Path(path).resolve().name or path


def require_different(things: list[str], one_is_enough: bool = False) -> None:
    """Refuse to compare something with itself, or one thing alone unless it holds several."""
    holds_several = "=" in things[0] or (Path(things[0]) / "profile.parquet").is_file()
    sentence = f"compare must be given at least two things, as in compare {things[0]} {things[0]}:san; got one"
    require(len(things) >= 2 or one_is_enough or holds_several, sentence, MetricError, "things")
    for thing in things:
        sentence = f"things to compare must differ; {thing} comes twice: leave one out"
        require(things.count(thing) <= 1, sentence, MetricError, "things")


def saved_profile(side: Side, metrics: list[str]) -> "Profile":
    """The profile of a saved run or of cells of a sweep; its variants are named after it."""
    import polars as pl

    from rankscope.engine import choice_in, profile_of
    from rankscope.profiles import Profile
    from rankscope.runs import read

    thing = side.thing
    cells = choice_in(thing)
    if cells:
        profile = profile_of(*cells)
    else:
        profile = Profile.read(thing if thing.endswith(".parquet") else read(thing).path("profile.parquet"))
    sentence = (
        f"{thing} must have been measured in {metrics[0]}; it has {', '.join(profile.metrics)}: name one of these"
    )
    require(metrics[0] in profile.metrics, sentence, MetricError, "metrics")
    names = {name: name if cells else f"{side.title}:{name}" for name in profile.variants}
    table = profile.table.filter(pl.col("metric").is_in(metrics))
    table = table.with_columns(pl.col("variant").replace_strict(names, return_dtype=pl.String))
    networks = tuple(
        network.adding(variant=names.get(network.variant, network.variant)) for network in profile.manifest.networks
    )
    return Profile(table, profile.manifest.adding(networks=networks))


def is_training(thing: str) -> bool:
    """True for a folder that holds a training run and no profile."""
    from rankscope.runs import read
    from rankscope.trainings import TRAINING_TABLE

    folder = Path(thing)
    return folder.is_dir() and not (folder / "profile.parquet").is_file() and TRAINING_TABLE in read(folder).names


def compare_trainings(things: list[str], metrics: str | None, results: ResultOptions) -> None:
    """Print training runs side by side; folders that are no training runs, and `-o`, are refused."""
    from rankscope.trainings import compare_runs, read_training

    for thing in things:
        sentence = f"training runs are compared with training runs; {thing} is none: leave it out"
        require(is_training(thing), sentence, FileError, thing)
    require(len(things) >= 2, "compare must be given at least two training runs; got one", MetricError, "things")
    sentence = f"-o goes with what compare measures; use rankscope report {' '.join(things)} -o PAGE"
    require(results.output is None, sentence, FileError, "output")
    runs = [read_training(thing) for thing in things]
    comparison = compare_runs(runs, things, None if metrics is None else split_names("metrics", metrics)[0])
    names = unique_titles([Path(thing).resolve().name for thing in things], things)
    sentence, differ = comparison.verdict, _metric_disagreement(dict(zip(names, runs, strict=True)), comparison)
    if results.as_json:
        lines = [
            {
                "of": line.name,
                "values": dict(zip(things, line.values, strict=True)),
                "below_floor": dict(zip(things, line.noise, strict=True)),
                "parted_at": line.parted,
            }
            for line in comparison.lines
        ]
        more = {"verdict": sentence, "notes": list(comparison.notes), "disagreement": differ or None}
        return machine({"metric": comparison.metric, "steps": comparison.steps, "lines": lines, **more})
    show_tables(*replace(comparison, names=tuple(names)).sections()[0].tables)
    say("", sentence, *([differ] if differ else []), *([] if results.quiet else comparison.notes))


def _metric_disagreement(runs: "dict[str, TrainingRun]", comparison: "RunComparison") -> str:
    """A sentence on two metrics that rank the runs differently at the last step and layer that all have."""
    from rankscope.profiles import disagreement

    names = [name for run in runs.values() for name in run.metrics]
    shared = [name for name in dict.fromkeys([comparison.metric, *names]) if names.count(name) == len(runs)]
    layer = min(run.grid(comparison.metric).layers[-1] for run in runs.values())
    ends = {
        metric: {
            name: logs[comparison.steps[-1]]
            for name, run in runs.items()
            if comparison.steps[-1] in (logs := run.grid(metric).logs(layer))
        }
        for metric in shared
    }
    return disagreement(ends)


def unique_titles(titles: list[str], things: list[str]) -> list[str]:
    """The titles; where two are equal, the arguments themselves."""
    return [title if titles.count(title) == 1 else thing for title, thing in zip(titles, things, strict=True)]
