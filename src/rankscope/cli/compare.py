"""`rankscope compare`: models, variants and runs side by side, on the same text."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankscope.cli import options as opt
from rankscope.cli.inputs import described, drawn, excerpts_of, network
from rankscope.cli.named import model_named
from rankscope.cli.output import opened, with_manifest
from rankscope.errors import ArchitectureError, FileError, MetricError

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Profile


def compare(
    things: opt.Compared,
    mask: opt.Mask = None,
    layers: opt.Layers = None,
    remedy: opt.Remedy = None,
    init: opt.Init = None,
    seed: opt.Seed = None,
    device: opt.Device = "cpu",
    text: opt.Text = None,
    split: opt.Split = "auto",
    field: opt.Field = "text",
    samples: opt.Samples = 4,
    tokens: opt.Tokens = 128,
    metrics: opt.Metrics = opt.DEFAULT_METRICS,
    arithmetic: opt.Arithmetic = "deviation",
    threshold: opt.Threshold = 1e-3,
    output: opt.Output = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Set models, variants and runs side by side: who keeps tokens apart longer?

    All read the same excerpts, each with its own tokenizer. Depths and widths may differ. A run is a folder
    that [bold]measure -o[/bold] or [bold]compare -o[/bold] has written; it keeps the text it was measured on.
    Cells of a [bold]sweep[/bold] are named by number or by factors: runs/study:17, runs/study:depth=6,seed=0.

    Training runs, which a [bold]Monitor[/bold] or [bold]checkpoints[/bold] has written, are set side by side
    at the steps that they have in common.
    """
    from rankscope.cli.compare_training import compare_trainings, is_training

    if any(map(is_training, things)):
        refuse_twice(things, alone=True)
        named = None if metrics == opt.DEFAULT_METRICS else metrics
        return compare_trainings(things, named, output, as_json, quiet)
    from rankscope.cli.bounds import require_positive_threshold
    from rankscope.cli.measure import checked, command, end_if_stopped, together
    from rankscope.cli.show import show_run
    from rankscope.metrics import is_share
    from rankscope.profiles.verdict import disagreement, ends_of, listing
    from rankscope.report import write_run_directory

    _, numbers, arithmetics = checked("transformer", metrics, arithmetic)
    require_positive_threshold(threshold)
    sides = [Side.of(thing) for thing in things]
    refuse_twice(things)
    models = list(dict.fromkeys(side.model for side in sides if side.model is not None))
    random = [model for model in models if drawn(model, None, None)]
    if models and not random:
        drawn(models[0], init, seed)  # no weights here for --init or --seed to draw
    store = opened(output)
    titles = unique([side.title for side in sides], things)
    titles = [
        f"{title} (random weights)" if side.model in random else title
        for title, side in zip(titles, sides, strict=True)
    ]
    saved_runs = {
        thing: saved(thing, title, numbers)
        for thing, side, title in zip(things, sides, titles, strict=True)
        if side.model is None
    }
    runs = list(saved_runs.values())
    read = excerpts_of(text, split, field, samples, tokens) if models else []
    jobs = {}
    nets: dict[str, Transformer] = {}
    encoded: dict[str, tuple[Tensor, Tensor]] = {}
    for side, title in zip(sides, titles, strict=True):
        model = side.model
        if model is None:
            continue
        if model not in nets:
            own = (init, seed) if model in random else (None, None)
            nets[model] = network(model, mask, layers, *own, device, remedies=remedy, quiet=quiet or as_json)
            encoded[model] = nets[model].encode(read, tokens)
        jobs[title] = (nets[model].variant(side.variant), *encoded[model])
    profile = together(jobs, numbers, arithmetics, quiet or as_json, beside=runs)
    compared = dict(zip(titles, things, strict=True))
    shown = {side.model for side, title in zip(sides, titles, strict=True) if title in profile.variants}
    origins = {m: net.origin.described() for m, net in nets.items() if net.origin is not None and m in shown}
    for folder, each in saved_runs.items():
        origins |= each.manifest.more.get("origins") or {folder: each.manifest.origin or {}}
    profile = with_manifest(profile, command=command(), compared=compared, origins=origins)
    if models:
        profile = with_manifest(profile, **described(text, split, field, read, tokens))
    curves = profile.views(numbers[0])
    differ = disagreement(ends_of({each: profile.views(each) for each in profile.metrics}))
    said = [listing(curves, threshold), *([differ] if differ else [])]
    title = " · ".join(titles)
    written = None if store is None else write_run_directory(profile, store, title, entry="compare")
    lines = [
        {"name": curve.name, "arithmetic": curve.arithmetic, "first_layer": curve.first,
         "log10": curve.log10[curve.first:].tolist(), "floor_from": curve.floor_from,
         "uniform_from": curve.uniform_from(threshold) if is_share(numbers[0]) else None}
        for curve in curves
    ]  # fmt: skip
    more = {"lines": lines, "verdict": said[0], "disagreement": differ or None}
    if runs and models and not quiet:
        said.append("Runs keep the text that they were measured on.")
    show_run(profile, numbers[0], said, written, as_json, quiet, threshold, more)
    end_if_stopped(profile, output)


class Side(NamedTuple):
    """One thing to compare: a model and a variant of it, or a run, which has no model."""

    model: str | None
    variant: str
    title: str

    @classmethod
    def of(cls, thing: str) -> "Side":
        """What a word of the command line means: a run, a model, or model:variant."""
        from rankscope.engine import choice_in

        if (Path(thing) / "sweep.parquet").is_file():
            raise FileError(
                f"of a sweep, cells must be named by number or factors, as {thing}:0 or {thing}:seed=0; got "
                "all of it"
            )
        if choice_in(thing):
            return cls(None, "", _last(thing))
        if (Path(thing) / "profile.parquet").is_file() or thing.endswith(".parquet"):
            return cls(None, "", _last(thing))
        if (Path(thing) / "summary.parquet").is_file():
            raise FileError(
                f"a run to compare must hold profile.parquet; {thing} holds statistics over a corpus: "
                "compare the models themselves, with --text"
            )
        model, colon, variant = thing.rpartition(":")
        if colon and not Path(thing).exists():
            if not variant.startswith(("san", "transformer")):
                raise ArchitectureError(
                    "after a model's colon comes a variant: 'transformer', or 'san' and parts joined by +, "
                    f"or 'transformer' less parts, as in transformer-norm; got {thing!r}"
                )
            model = model_named(model)
            return cls(model, variant, f"{_last(model)}:{variant}")
        model = model_named(thing)
        return cls(model, "transformer", _last(model))


def _last(path: str) -> str:
    """The last part of a path or hub id."""
    return Path(path).name or Path(path).resolve().name or path


def refuse_twice(things: list[str], alone: bool = False) -> None:
    """What is compared must differ; one thing is enough where it may stand `alone`."""
    several = "=" in things[0] or (Path(things[0]) / "profile.parquet").is_file()
    if len(things) < 2 and not alone and not several:
        raise MetricError(
            f"compare must be given at least two things, as in compare {things[0]} {things[0]}:san; got one"
        )
    for thing in things:
        if things.count(thing) > 1:
            raise MetricError(f"things to compare must differ; {thing} comes twice: leave one out")


def unique(titles: list[str], things: list[str]) -> list[str]:
    """Short titles, but the whole words where two would be the same."""
    return [title if titles.count(title) == 1 else thing for title, thing in zip(titles, things, strict=True)]


def saved(thing: str, title: str, metrics: list[str]) -> "Profile":
    """The run in a folder, its lines named after it, with as many of the metrics as it has."""
    import polars as pl

    from rankscope.engine import choice_in, profile_of
    from rankscope.profiles import Profile
    from rankscope.runs import read

    cells = choice_in(thing)
    profile = (
        profile_of(*cells)
        if cells
        else Profile.read(thing if thing.endswith(".parquet") else read(thing).path("profile.parquet"))
    )
    if metrics[0] not in profile.metrics:
        raise MetricError(
            f"{thing} must have been measured in {metrics[0]}; it has {', '.join(profile.metrics)}: name one "
            "of these with --metrics"
        )
    names = {name: name if cells else f"{title}:{name}" for name in profile.variants}
    table = profile.table.filter(pl.col("metric").is_in(metrics))
    table = table.with_columns(pl.col("variant").replace_strict(names, return_dtype=pl.String))
    networks = tuple(
        each.adding(variant=names.get(each.variant, each.variant)) for each in profile.manifest.networks
    )
    return Profile(table, profile.manifest.adding(networks=networks))
