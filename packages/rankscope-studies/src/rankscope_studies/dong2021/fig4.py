"""Figure 4: path effectiveness. Trained networks, evaluated on a few paths of one length at a time.

Networks of attention, skips and norms learn to memorise, to sort and to find convex hulls (`lab/tasks/`).
Then only k paths of one length are kept, summed, normalised and classified with the trained head
(`path_effects.py`). Short paths carry nearly everything; from length 3 on, what a few paths say is a guess.

| | memorization | sort | convex hull |
|---|---|---|---|
| token | a word of a text | a symbol | a point of the plane |
| label | drawn at random, 0 or 1 | the symbol here when all are sorted | whether it is on the hull |
| evaluated on | what it was trained on | other samples | other samples |

Beyond the paper: the theorem's own paths (attention of the full network), and the exact sum over ALL paths of
each length, which tells whether long paths say nothing or whether five of them are too few to hear it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

from rankscope.figures import FAINT, INK, MARKERS, PALETTE, Axes, Figure, panels
from rankscope.lab import UNLABELLED, Initialisation, Interface, Recipe, Training
from rankscope.nets import Architecture
from rankscope_studies.dong2021.path_effects import path_effects
from rankscope_studies.dong2021.tasks import SORTED, FixedTask, Hull, Memorization, Sort, attention_alone
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts, published

COUNTS = (5, 20)
REPEATS = 5
TOLERANCE = 0.15  # How far the published accuracy, one network's, may lie outside the range of ours over seeds
NEAR_GUESS = 0.05  # How far above the best constant guess still is a guess
DROPOUT = 0.1  # BertConfig's default, which the published code leaves as it is. `research/recipes.py` trains without
LENGTHS = range(7)
WITHOUT_CONTEXT = {"context-free ceiling", "majority by position"}  # They see one token: its word, or its position
LEGEND = (
    "5 paths (own attention)", "20 paths (own attention)", "all paths (exact; shared attention)",
    "5 paths, published", "20 paths, published", "whole network, published",
    "whole network", "best constant guess", "best guess without context",
)  # fmt: skip
Published = dict[str, Any]  # What the paper's figure has of a task: numbers by name, and curves by path length
TITLES = {"memorization": "Memorization", "sort": "Sorting", "hull": "Convex hull"}
TEXTS = StudyTexts("dong2021", "fig4")


class PublishedSort(Sort):
    """Sorting with positions in the embedding, before its norm, as BERT has them."""

    @property
    def interface(self) -> Interface:
        """A table of positions beside that of symbols."""
        return replace(super().interface, positions=SORTED)

    def architecture(self, layers: int, width: int, heads: int = 2, **fields: Any) -> Architecture:
        """A network without positions of its own."""
        return attention_alone(layers, width, heads, **fields)


@dataclass(frozen=True)
class TaskPlan:
    """The network of one task, and how it is trained: gains of its norms stay 1."""

    task: FixedTask
    width: int
    heads: int
    epochs: int
    batch: int
    lr: float
    embedding_std: float = 1.0  # A norm follows the embedding, so a smaller one learns faster
    dropout: float = DROPOUT
    checkpoint_every: int = 10  # Epochs between checkpoints
    seeds: int = 1  # Networks that are trained; a hull or a memorization takes longer than a sort
    layers: int = 6
    fields: dict[str, Any] = field(default_factory=dict)  # Fields of the architecture in place of the usual ones

    @property
    def batches(self) -> int:
        """The number of steps of an epoch."""
        return math.ceil(len(self.task.data[0]) / self.batch)

    def training(self, seed: int, run: Path | None = None, device: str = "cpu") -> Training:
        """The training of one seed, which resumes from a checkpoint in `run`."""
        recipe = Recipe(
            steps=self.epochs * self.batches, batch_size=self.batch, lr=self.lr, weight_decay=0.0, seed=seed,
            checkpoint_every=self.checkpoint_every * self.batches, frozen=("gain",),
        )  # fmt: skip
        arch = self.task.architecture(self.layers, self.width, self.heads, **self.fields)
        start = Initialisation("kaiming", self.embedding_std, self.dropout)
        return Training(self.task, arch, recipe, initialisation=start, run=run, device=device, monitored=False)


QUICK = {
    "memorization": TaskPlan(
        Memorization(texts=60, longest=48), 250, 2, epochs=30, batch=8, lr=3e-4, embedding_std=0.02, checkpoint_every=5
    ),
    "sort": TaskPlan(PublishedSort(), 48, 2, epochs=60, batch=50, lr=1e-3, seeds=3),
    "hull": TaskPlan(Hull(), 84, 3, epochs=3, batch=100, lr=1e-3, checkpoint_every=1, seeds=2),
}
FULL = {
    "memorization": replace(QUICK["memorization"], task=Memorization(), epochs=50, checkpoint_every=1, seeds=5),
    "sort": replace(QUICK["sort"], seeds=5),
    "hull": replace(QUICK["hull"], epochs=15, seeds=5),
}


def _run(setup: Setup, plans: Mapping[str, TaskPlan] | None = None, repeats: int = REPEATS) -> StudyResult:
    """Train each task's networks, evaluate their paths, and hold the accuracies against the published ones;
    plans are those of the setup's size if left out."""
    plans = plans or (FULL if setup.full else QUICK)
    tasks = {name: plan.task for name, plan in plans.items()}
    table = pl.concat([
        accuracies(setup, plan, seed, repeats).select(pl.lit(name).alias("task"), pl.lit(seed).alias("seed"), pl.all())
        for name, plan in plans.items()
        for seed in range(plan.seeds)
    ])  # fmt: skip
    baselines = [(name, *baseline) for name, task in tasks.items() for baseline in task.baselines.items()]
    summary, seeds = summarised(table), by_seed(table)
    theirs = published("dong2021")["figure4_accuracy_by_path_length_0_to_6"]
    comparisons = [claim for name, task in tasks.items() for claim in compared(task, summary, seeds, theirs[name])]
    tables = {"accuracies": table, "summary": summary}
    tables["baselines"] = pl.DataFrame(baselines, schema=["task", "baseline", "accuracy"], orient="row")
    words = plans["memorization"].task.data[0]
    notes = TEXTS.notes(
        dropout=DROPOUT, texts=len(words), longest=words.labels.shape[1],
        tokens=int((words.labels != UNLABELLED).sum()),
        seeds=", ".join(f"{name} {plan.seeds}" for name, plan in plans.items()),
    )  # fmt: skip
    notes += [] if setup.full else [TEXTS.sentence("quick")]
    return StudyResult({"fig4": _figure(summary, tasks, theirs)}, tables, comparisons, notes)


def accuracies(setup: Setup, plan: TaskPlan, seed: int, repeats: int) -> pl.DataFrame:
    """The accuracies of one trained network and of its paths; training resumes where it was interrupted."""
    name = f"{plan.task.name}-{seed}" if seed else plan.task.name

    def compute() -> pl.DataFrame:
        training = plan.training(seed, setup.folder / "parts" / name, setup.device)
        for step in training:
            if step % training.recipe.checkpoint_every == 0:
                loss = float(torch.stack(training.losses[-plan.batches :]).mean())
                setup.say(f"{name}: epoch {step // plan.batches} of {plan.epochs}, loss {loss:.4f}")
        setup.say(f"{name}: paths")
        test = plan.task.data[1].to(setup.device)
        return path_effects(training.models[0], test, COUNTS, repeats)

    settings = {**asdict(plan), "task": {"name": plan.task.name, **asdict(plan.task)}}  # type: ignore[call-overload]
    return setup.cached(name, compute, plan=settings, seed=seed, counts=COUNTS, repeats=repeats)


def summarised(table: pl.DataFrame) -> pl.DataFrame:
    """Mean and deviation over draws of paths and training seeds."""
    return table.group_by("task", "attention", "paths", "length", maintain_order=True).agg(
        pl.col("accuracy").mean(), pl.col("accuracy").std(ddof=0).alias("std"), pl.len().alias("repeats")
    )


def by_seed(table: pl.DataFrame) -> pl.DataFrame:
    """The least and the most accurate training seed, each the mean over draws."""
    keys = ["task", "attention", "paths", "length"]
    means = table.group_by(*keys, "seed", maintain_order=True).agg(pl.col("accuracy").mean())
    return means.group_by(keys, maintain_order=True).agg(
        pl.col("accuracy").min().alias("least"), pl.col("accuracy").max().alias("most"), pl.len().alias("seeds")
    )


def curve(summary: pl.DataFrame, task: str, attention: str, paths: str, what: str = "accuracy") -> list[float]:
    """A column of the summary by path length, of one task and kind of path."""
    return summary.filter(task=task, attention=attention, paths=paths).sort("length")[what].to_list()


def compared(task: FixedTask, summary: pl.DataFrame, seeds: pl.DataFrame, theirs: Published) -> list[Comparison]:
    """What the paper's figure shows of a task, and what came out here."""
    name, baselines = task.name, task.baselines
    guess = max(baselines["chance"], baselines["majority"])
    by_paths = {paths: curve(summary, name, "own", paths) for paths in ("5", "20")}
    published_by_paths = {paths: theirs[f"{paths} paths"] for paths in by_paths}
    long, long_theirs = (max(max(row[3:]) for row in rows.values()) for rows in (by_paths, published_by_paths))
    shared, exact = (curve(summary, name, "shared", paths) for paths in ("20", "all"))
    above = max((length for length in LENGTHS if exact[length] > guess + NEAR_GUESS), default=None)
    heard = "no length is above a guess" if above is None else f"above a guess up to length {above}"
    comparisons = [
        _whole_network(task, curve(summary, name, "full", "all")[0], theirs["full"]),
        *(_own_paths(name, paths, ours, seeds, published_by_paths[paths]) for paths, ours in by_paths.items()),
        TEXTS.compare(
            "guess", long <= guess + NEAR_GUESS, task=name, theirs=long_theirs, ours=long, guess=guess, near=NEAR_GUESS
        ),
        TEXTS.compare("shared_paths", None, task=name, ours=_listed(shared)),
        TEXTS.compare("all_paths", None, task=name, ours=_listed(exact), heard=heard),
    ]  # fmt: skip
    ours = ", ".join(f"{what} {value:.3f}" for what, value in baselines.items())
    if name == "hull":
        drawn, recomputed = theirs["majority as drawn"], theirs["majority recomputed"]
        agrees = abs(baselines["majority"] - drawn) <= 0.02
        last = TEXTS.compare("majority", agrees, drawn=drawn, ours=ours, recomputed=recomputed)
    else:
        why = TEXTS.sentence("chance", name)
        last = TEXTS.compare("chance", True, task=name, theirs=theirs["chance"], ours=ours, why=why)
    return [*comparisons, last]


def _whole_network(task: FixedTask, ours: float, theirs: float) -> Comparison:
    close, why = abs(ours - theirs) <= NEAR_GUESS, ""
    if not close and ours > theirs and task.name == "memorization":
        why = TEXTS.sentence("full", "other_texts", ceiling=task.baselines["ceiling"])
    elif not close:
        why = TEXTS.sentence("full", "further" if ours > theirs else "less_long")
    return TEXTS.compare("full", close or ours > theirs, task=task.name, theirs=theirs, ours=ours, why=why)


def _own_paths(task: str, paths: str, ours: list[float], seeds: pl.DataFrame, theirs: list[float]) -> Comparison:
    least, most = (curve(seeds, task, "own", paths, end) for end in ("least", "most"))
    gaps = [max(low - value, value - high, 0.0) for low, value, high in zip(least, theirs, most, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    agrees, trained = gaps[worst] <= TOLERANCE, max(seeds.filter(task=task)["seeds"])
    several = f", where {trained} training seeds give {least[worst]:.2f} to {most[worst]:.2f}"
    return TEXTS.compare(
        "own_paths", agrees, task=task, paths=paths, theirs=_listed(theirs), ours=_listed(ours), gap=gaps[worst],
        length=worst, range=several if trained > 1 else ", one training seed", tolerance=TOLERANCE,
        why="" if agrees else TEXTS.sentence("own_paths", task),
    )  # fmt: skip


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _figure(summary: pl.DataFrame, tasks: Mapping[str, FixedTask], said: dict[str, Published]) -> Figure:
    """One panel per task: accuracy by path length, ours with the published points."""
    figure, axes = panels(len(tasks), width=4.3, height=4.4)
    for panel, (name, task) in zip(axes, tasks.items(), strict=True):
        _panel(panel, summary, task, said[name])
    axes[0].set_ylabel("accuracy")
    handles = {name: handle for panel in axes for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = {label: handles[label] for label in LEGEND if label in handles}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _panel(axes: Axes, summary: pl.DataFrame, task: FixedTask, said: Published) -> None:
    name = task.name
    axes.axhline(curve(summary, name, "full", "all")[0], color=INK, linewidth=1.2, label="whole network")
    axes.axhline(said["full"], color=INK, linestyle=":", label="whole network, published")
    axes.axhline(task.baselines["majority"], color=FAINT, linewidth=1.2, linestyle="--", label="best constant guess")
    for which in WITHOUT_CONTEXT & task.baselines.keys():
        axes.axhline(task.baselines[which], color=FAINT, linestyle="-.", label="best guess without context")
    for at, (attention, paths) in enumerate((("own", "5"), ("own", "20"), ("shared", "all"))):
        places = [length + 0.08 * (at - 1) for length in LENGTHS]
        accuracy = curve(summary, name, attention, paths)
        deviation = curve(summary, name, attention, paths, "std") if paths != "all" else None
        line: dict[str, Any] = {"color": PALETTE[at], "marker": MARKERS[at], "markersize": 5, "linewidth": 1.4}
        axes.errorbar(places, accuracy, yerr=deviation, elinewidth=1, capsize=2, label=LEGEND[at], **line)
        if f"{paths} paths" in said:
            ring: dict[str, Any] = {"linestyle": "none", "markersize": 8, "markerfacecolor": "none"}
            ring |= {"marker": MARKERS[at], "markeredgecolor": PALETTE[at], "markeredgewidth": 1.0}
            axes.plot(places, said[f"{paths} paths"], label=f"{paths} paths, published", **ring)
    axes.set(xlabel="path length", ylim=(0, 1.02), xticks=list(LENGTHS))
    axes.set_title(TITLES[name], loc="left", fontsize=11)


STUDY = Study("dong2021", "fig4", "path effectiveness on memorization, sorting, convex hull", _run, seconds=160.0)
