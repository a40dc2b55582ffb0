"""The study of remedies: every remedy against collapse on one scale, to choose one by.

In order: jobs are planned (`plan`) and done here or by worker processes (`at_initialisation.py`,
`on_trained_model.py`, `theory_notes.py`; each is computed once and cached in the folder), networks are
trained where that is asked for (`trainings.py`), and all of it is joined (`measurements.py`), drawn
(`figures.py`), written as tables (`tables.py`) and held against published claims (`verdicts.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import polars as pl

from rankscope.errors import StudyError
from rankscope.extras import listed
from rankscope.files import write_text
from rankscope.remedies import REMEDIES, remedy
from rankscope.sources import is_drawn
from rankscope.workers import run_pieces
from rankscope_studies.remedies import at_initialisation, on_trained_model, theory_notes
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import HEADS, INIT, WIDTH, depths
from rankscope_studies.remedies.figures import figures
from rankscope_studies.remedies.measurements import PLACED, RemedyMeasurements, rows
from rankscope_studies.remedies.tables import page_tables
from rankscope_studies.remedies.trainings import FULL, QUICK, SLOWER, costs, gathered, recipes, trained
from rankscope_studies.remedies.verdicts import comparisons
from rankscope_studies.study import Setup, Study, StudyResult, StudyTexts
from rankscope_studies.trial import NONE, SIGMA

TEXTS = StudyTexts("remedies", "study")


@dataclass(frozen=True)
class RemedyOptions:
    """What is to be in the table of remedies."""

    remedies: tuple[str, ...] = tuple(REMEDIES.shipped)  # As `--remedy` has them
    model: str = "minilm"  # The model that they are put on
    seeds: int = 3
    train: bool = False
    depths: tuple[int, ...] | None = None  # Depths of networks that are trained; as the setup's size has it if left out
    steps: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in self.remedies:
            remedy(name)  # refused by its own sentence
        if not self.remedies or len(set(self.remedies)) < len(self.remedies):
            names = ", ".join(self.remedies)
            raise StudyError(f"remedies must be different ones, at least one; got {names}", subject="remedies")
        for name, count in (("seeds", self.seeds), ("workers", self.workers)):
            if count < 1:
                raise StudyError(f"{name} must be at least 1; got {count}", subject=name)
        if self.depths is not None and (not self.depths or min(self.depths) < 1):
            raise StudyError(f"depths must be whole numbers from 1 on; got {self.depths}", subject="depths")

    @property
    def trained(self) -> tuple[str, ...]:
        """Remedies that are trained; with all of them the parametrisation too that only training shows."""
        return (NONE, *self.remedies, *((SIGMA,) if set(REMEDIES.shipped) <= set(self.remedies) else ()))


class RemedyJob(NamedTuple):
    """One cached piece of the study, and roughly how many seconds it takes."""

    kind: str
    settings: dict[str, Any]
    seconds: float

    def __str__(self) -> str:
        return ", ".join([self.kind, *map(str, self.settings.values())])


def remedies_study(options: RemedyOptions) -> Study:
    """The study of these remedies, to be run and written like any other."""
    return Study("", "remedies", "Remedies side by side", partial(compare_remedies, options=options))


def compare_remedies(setup: Setup, options: RemedyOptions) -> StudyResult:
    """Measure and train, and say what came of it."""
    result = result_of(setup, options, gather(setup, options))
    write_text(setup.folder / "remedies.csv", result.tables["remedies"].write_csv())
    return result


def result_of(setup: Setup, options: RemedyOptions, measurements: RemedyMeasurements) -> StudyResult:
    """Figures, tables, claims and sentences from what was measured."""
    tables = {
        "remedies": rows(measurements), "initial": measurements.initial, "cold": measurements.cold,
        "theorems": measurements.theorems, "laws": measurements.laws,
    }  # fmt: skip
    for name in ("trained", "slower", "costs"):
        tables |= {name: table} if len(table := getattr(measurements, name)) else {}
    return StudyResult(
        figures(measurements), tables, comparisons(measurements), notes(setup, options, measurements),
        page_tables(measurements), summary(measurements),
    )  # fmt: skip


def plan(setup: Setup, options: RemedyOptions) -> list[RemedyJob]:
    """All jobs but trainings, the network without a remedy first; the trained model is loaded for it, or
    refused."""
    layers = on_trained_model.subject(options.model, setup.device)[0].arch.layers
    every = (NONE, *options.remedies)
    jobs = [RemedyJob("theorems", {"remedy": name}, 2.5) for name in every]
    seconds = on_trained_model.SECONDS * layers
    jobs += [RemedyJob("cold", {"remedy": name, "model": options.model}, seconds) for name in every]
    for depth in depths(setup.full):
        seconds = at_initialisation.SECONDS * depth * len(at_initialisation.VARIANTS)
        jobs += [
            RemedyJob("initial", {"remedy": name, "norm_place": norm_place, "depth": depth, "seed": seed}, seconds)
            for name in every for norm_place in at_initialisation.PLACES for seed in range(options.seeds)
        ]  # fmt: skip
    deepest = depths(setup.full)[-1]
    notes_of = {name: theory_notes.note_of(name) for name in every if ":" not in name}
    jobs += [
        RemedyJob("variance", {"remedy": name, "depth": deepest, "seed": seed}, 0.3)
        for name, note in notes_of.items() if note and note.layer_weight for seed in range(options.seeds)
    ]  # fmt: skip
    return jobs


def gather(setup: Setup, options: RemedyOptions) -> RemedyMeasurements:
    """Do every job, or read what an earlier run has cached of it, and join them with what was trained."""
    jobs, tables = plan(setup, options), dict[str, pl.DataFrame]()
    for job, table in do_jobs(setup, jobs, options.workers):
        tables[str(job)] = table
        setup.say(str(job))
        setup.progress(len(tables), len(jobs))
    joined = {
        kind: pl.concat([tables[str(job)] for job in jobs if job.kind == kind])
        for kind in dict.fromkeys(job.kind for job in jobs)
    }
    initial, theorems, cold = (joined[kind] for kind in ("initial", "theorems", "cold"))
    return RemedyMeasurements(initial, theorems, cold, joined.get("variance"), *trainings(setup, options))


def do_jobs(setup: Setup, jobs: Sequence[RemedyJob], workers: int = 1) -> Iterator[tuple[RemedyJob, pl.DataFrame]]:
    """Every job with its table, in the order in which they end; by worker processes where there are more than
    one. Whoever stops listening, or Ctrl-C, ends them: what was cached stays."""
    if workers < 2:
        yield from ((job, do_job(setup, job)) for job in jobs)
        return
    silent = replace(setup, folder=setup.folder.resolve(), say=_silent, progress=_silent)
    with closing(run_pieces(partial(do_job, silent), jobs, workers)) as done:
        for result in done:
            if result.value is None:
                advice = "the same command resumes from here, with fewer --workers where memory was short"
                sentence = f"{result.piece} could not be computed: {result.error}; {advice}"
                raise StudyError(sentence, subject=result.piece.kind)
            yield result.piece, result.value


def do_job(setup: Setup, job: RemedyJob) -> pl.DataFrame:
    """The table of one job, cached in the folder. Only jobs on the trained model depend on it."""
    kind, settings = job.kind, job.settings
    labels = [str(value) for setting, value in settings.items() if setting != "model"]
    name = "-".join([kind, *labels]).replace(":", "-").replace(",", "-")
    if kind == "cold":
        compute = partial(on_trained_model.measured, **settings, device=setup.device)
        size = (on_trained_model.TOKENS, on_trained_model.SAMPLES)
        return setup.cached(name, compute, remedy=settings["remedy"], size=size)
    setup = replace(setup, models=())
    if kind == "initial":
        compute = partial(at_initialisation.measured, **settings, device=setup.device)
        key = {setting.removeprefix("norm_"): value for setting, value in settings.items()}
        return setup.cached(name, compute, **key, size=(WIDTH, HEADS, at_initialisation.TOKENS))
    kinds: dict[str, Callable[..., pl.DataFrame]] = {
        "theorems": theory_notes.refusals,
        "variance": theory_notes.variances,
    }
    return setup.cached(name, partial(kinds[kind], **settings), **settings)


def _silent(*_: object) -> None:
    """Nobody hears what a worker says."""


def trainings(setup: Setup, options: RemedyOptions) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """What trainings gave, what steps cost, and what trainings with a smaller learning rate gave: run where that
    is asked for, else what the folder has of an earlier run, on whatever machine."""
    if not options.train:
        earlier = [gathered(setup.folder, how) for how in ("trained", f"at={SLOWER.sizes.lr:g}")]
        table, slower = (part.filter(pl.col("remedy").is_in(options.trained)) for part in earlier)
        timed = [results.priced(pl.read_parquet(path)) for path in setup.folder.glob("parts/costs-*.parquet")]
        return results.completed(table), pl.concat([results.priced(None), *timed]), results.completed(slower)
    train = partial(trained, setup, options.trained, workers=options.workers)
    table = train((FULL if setup.full else QUICK).changed(options.seeds, options.depths, options.steps))
    again = setup.full and options.depths is None
    slower = train(SLOWER.changed(options.seeds, None, options.steps)) if again else results.completed(None)
    return results.completed(table), results.priced(costs(setup, options.trained)), results.completed(slower)


def summary(measurements: RemedyMeasurements) -> str:
    """What one would tell somebody who must choose: of trained networks; where nothing was trained, of those
    at initialisation."""
    lines = [*_trained_summary(measurements)] or [*_start_summary(measurements)]
    cold = measurements.cold.filter(quantity="moved")
    start = measurements.at_start
    idle = [
        name for name in measurements.remedies[1:]
        if all(start(name, setting) == start(NONE, setting) for setting in PLACED)
        and len(moved := cold.filter(remedy=name)["value"]) and (moved == 0).all()
    ]  # fmt: skip
    if idle:
        lines.append(f"Before training {listed(idle)} {'does' if len(idle) == 1 else 'do'} nothing.")
    return " ".join(lines)


def _trained_summary(measurements: RemedyMeasurements) -> Iterator[str]:
    """Of settings in which a remedy decides: with which the deepest networks learn."""
    table = measurements.trained
    for setting, words in (("no skips", "without skips"), ("post", "with norms after their skips")):
        reached = {name: results.learns(table, name, setting) for name in dict.fromkeys(table["remedy"])}
        deepest = [name for name, depth in reached.items() if depth and depth.at_limit]
        plain = reached.get(NONE)
        if plain is not None and not plain.at_limit:
            which = f"with {listed(deepest)}" if deepest else "with none of them"
            yield f"Networks of {results.depths(table, setting)[-1]} layers {words} learn {which}."


def _start_summary(measurements: RemedyMeasurements) -> Iterator[str]:
    layers = measurements.deepest
    for setting, words in (("no skips", "Without skips"), ("post", "In whole post-norm networks")):
        apart = [
            name for name in measurements.remedies
            if (reached := measurements.at_start(name, setting)) and all(depth.at_limit for depth in reached)
        ]  # fmt: skip
        held = f"tokens stay apart for all {layers} layers with {listed(apart)}"
        none = f"none of them keeps tokens apart for all {layers} layers"
        yield f"{words}, at initialisation, {held if apart else none}."


def notes(setup: Setup, options: RemedyOptions, measurements: RemedyMeasurements) -> list[str]:
    """Sentences on what the study was run on, and on what was not run."""
    table = measurements.trained
    lines = TEXTS.notes(
        seeds=options.seeds, init=INIT, depths=", ".join(map(str, depths(setup.full))), width=WIDTH, heads=HEADS,
        model=named_with_weights(options.model), samples=on_trained_model.SAMPLES, tokens=on_trained_model.TOKENS,
    )  # fmt: skip
    lines += [] if setup.full else [TEXTS.sentence("quick")]
    lines += recipes(setup.folder) if len(table) else [TEXTS.sentence("untrained")]
    if left := len(table.filter(pl.col("refused").str.starts_with("not run"))):
        lines.append(TEXTS.sentence("unfinished", count=left))
    missing = [name for name in measurements.remedies if name not in set(table["remedy"])]
    if len(table) and missing:
        lines.append(TEXTS.sentence("not_trained", remedies=", ".join(missing)))
    return lines if len(measurements.costs) else [*lines, TEXTS.sentence("untimed")]


def named_with_weights(model: str) -> str:
    """The name of the model that remedies are put on; one whose weights are random says so.

    >>> named_with_weights("bert-tiny")
    'bert-tiny (random weights)'
    """
    return f"{model} (random weights)" if is_drawn(model) else model
