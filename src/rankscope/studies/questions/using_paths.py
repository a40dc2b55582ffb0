"""Can paths be used? Networks are trained with lengths dropped, weighted at random, or with a price on them.

A network of L layers is a sum over paths of lengths 0 to L (Dong et al. 2021), and in networks trained as usual short
paths carry nearly all of it. If paths are parts of an ensemble, as of a residual network (Veit et al. 2016), a training
could make use of that: drop lengths so that no one is relied on, weight them at random, or put a price on the short or
on the long ones. Each is trained beside the plain network from the same weights, with the same samples, steps and rate.

What else a gain could be, and how it is held apart: dropout of any kind may help, so ordinary dropout of the same
strength (the variance of its noise, `path_uses.py`) is trained too, and a gain must be one over plain training and over
ordinary dropout at every strength. Networks that withstand what they were trained with are no surprise: lengths removed
at test time are read apart from noise on embeddings, removed heads and removed layers, which no network was trained
with. A price may be paid without effect: shares of lengths after training say whether it had one.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from rankscope.lab import Initialisation, Recipe, Training
from rankscope.lab.trial import free_memory
from rankscope.studies.questions.long_paths import judged
from rankscope.studies.questions.path_networks import SCHEMES, TITLES, attention_network, path_task
from rankscope.studies.questions.path_uses import (
    ALONE,
    DRAWS,
    DROPOUT,
    HEADS_OUT,
    LONG_PRICE,
    NOISE,
    NOISES,
    PATH_DROPOUT,
    PRICES,
    SHORT_PRICE,
    PathUseModel,
    PathUseTraining,
    Use,
    evaluation_rows,
    finish_training,
)  # fmt: skip
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import spread
from rankscope.studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = 0.05  # Accuracy that attention must add, with every seed, for a task to tell anything
WORTH = 0.01  # A smaller gain in accuracy is not called one
CHANCE = 0.05  # Gains that would be seen by chance in all comparisons together, at most, for one to be believed
MEASURES = {
    "accuracy": "all in place", "noise": "noise on embeddings", "heads": "1/4 of heads out",
    "layers": "one layer out", "length out": "one length out", "one length": "one length alone",
}  # fmt: skip
CHANGED = (
    "Changed after a first quick run (2 seeds, 200 steps, batches of 32, rate 0.001), which named a gain of 0.01 that "
    "may be chance: the rule on chance, and the quick run's sizes, seeds and rate. The full run's text has 1600 steps "
    "in place of 2000, for time. Expectations and the other thresholds stayed as they were."
)
UNTRAINED = ("noise", "heads", "layers")  # What no network was trained with
ROWS = {
    "task": pl.String, "kind": pl.String, "strength": pl.Float64, "seed": pl.Int64, "quantity": pl.String,
    "at": pl.Int64, "value": pl.Float64,
}  # fmt: skip
ROWS_OF_SEED = ("task", "kind", "strength", "quantity", "seed")  # Columns that are the same over draws and lengths


@dataclass(frozen=True)
class UseSizes:
    """How large the experiment is. `widths` to `rates` have one number for each task."""

    tasks: tuple[str, ...]
    layers: int
    seeds: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]
    steps: tuple[int, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    context: int  # Characters of a sample of text
    samples: int  # Samples of hulls to learn from
    chances: tuple[float, ...]  # Strengths of ordinary dropout, path dropout and diverse lengths
    prices: tuple[float, ...]  # Nats for all of the output
    evaluation_samples: int
    probe_samples: int  # Samples that shares are read on

    @property
    def long(self) -> int:
        """The length from which on paths count as long: 3 of 6, as in figure 4."""
        return math.ceil(self.layers / 2)

    @property
    def controls(self) -> list[Use]:
        """What a gain must be one over: plain training, and ordinary dropout."""
        return [Use(), *(Use(DROPOUT, p) for p in self.chances)]

    @property
    def uses(self) -> list[Use]:
        """Every use of paths, at each strength."""
        return [
            *(Use(kind, p) for kind in NOISES for p in self.chances),
            *(Use(kind, price) for kind in PRICES for price in self.prices),
        ]


QUICK = UseSizes(
    ("sort",), layers=3, seeds=4, widths=(48,), heads=(2,), steps=(160,), batches=(20,), rates=(2e-3,), context=32,
    samples=2000, chances=(0.1, 0.4), prices=(0.1, 1.0), evaluation_samples=200, probe_samples=8,
)  # fmt: skip
FULL = UseSizes(
    ("sort", "text"), layers=6, seeds=5, widths=(48, 96), heads=(2, 4), steps=(1200, 1600), batches=(50, 32),
    rates=(1e-3, 3e-3), context=64, samples=10000, chances=(0.1, 0.4), prices=(0.1, 1.0), evaluation_samples=300,
    probe_samples=16,
)  # fmt: skip


# ---- What is run


def training_of(name: str, use: Use, sizes: UseSizes, seeds: Sequence[int], device: str = "cpu") -> Training:
    """The training of some seeds with a use of paths, not begun yet."""
    place, task = sizes.tasks.index(name), path_task(name, sizes.context, sizes.samples)
    arch = attention_network(name, task, sizes.layers, sizes.widths[place], sizes.heads[place])
    recipe = Recipe(
        steps=sizes.steps[place], batch=sizes.batches[place], lr=sizes.rates[place], weight_decay=0.0, frozen=("gain",)
    )
    lengths = range(sizes.layers + 1)
    priced = {SHORT_PRICE: [k < sizes.long for k in lengths], LONG_PRICE: [k >= sizes.long for k in lengths]}
    model = partial(
        PathUseModel, lengths=[float(use.kind != ALONE or k == 0) for k in lengths], samples=recipe.batch,
        prices=[use.strength * chosen for chosen in priced.get(use.kind, [])],
    )  # fmt: skip
    start = Initialisation(SCHEMES[name], 1.0, dropout=use.strength if use.kind == DROPOUT else 0.0)
    return PathUseTraining(
        task, arch, recipe, seeds=seeds, device=device, initialisation=start, capture=True, model=model
    )


def gather(setup: Setup, sizes: UseSizes) -> dict[str, pl.DataFrame]:
    """Train every use of every task and read what came of it.

    One cached piece has all seeds of a use, which learn at once; with ordinary dropout networks learn one after the
    other, and each has a piece.
    """
    parts: dict[str, Callable[[], pl.DataFrame]] = {}
    for task in sizes.tasks:
        for use in (*sizes.controls, Use(ALONE), *sizes.uses):
            if use.kind == DROPOUT:
                groups = {f" seed {seed}": [seed] for seed in range(sizes.seeds)}
            else:
                groups = {"": [*range(sizes.seeds)]}
            for suffix, seeds in groups.items():
                parts[f"{task} {use.label}{suffix}"] = partial(trained, task, use, sizes, seeds, setup.device)
    return {"uses": setup.cached_parts(parts, **asdict(sizes))}


def trained(task: str, use: Use, sizes: UseSizes, seeds: Sequence[int], device: str = "cpu") -> pl.DataFrame:
    """Train some seeds of a use; rows of one number each: task · kind · strength · seed · quantity · at · value.

    | quantity           | what it is, on held-out samples                                   | `at`   |
    |--------------------|-------------------------------------------------------------------|--------|
    | `loss`, `accuracy` | with all in place                                                 |        |
    | `noise`            | accuracy with noise on the embedding                              |        |
    | `heads`            | accuracy without some heads                                       | draw   |
    | `layers`           | accuracy without a layer                                          | layer  |
    | `length out`       | accuracy without the paths of a length                            | length |
    | `one length`       | accuracy of the paths of a length alone                           | length |
    | `share`            | of the output, by length                                          | length |
    | `residual`         | relative residual of tokens after the last layer, mean of samples |        |
    """
    training, rows = training_of(task, use, sizes, seeds, device), []
    try:
        finish_training(training, use)
        batch = training.task.held_out(sizes.evaluation_samples).to(device)
        for seed, model in zip(seeds, training.models, strict=True):
            for row in evaluation_rows(model, training.task, batch, sizes.probe_samples):
                rows.append((task, use.kind, use.strength, seed, *row))
    finally:
        del training
        free_memory(device)
    return pl.DataFrame(rows, schema=ROWS, orient="row")


# ---- The answer, from tables alone


class Readings:
    """The numbers of a table by task, use and quantity: one for each seed, in their order.

    Of heads, layers and lengths it is the mean over what was taken away; `long share` is the share of the output that
    long paths are together.
    """

    def __init__(self, table: pl.DataFrame, sizes: UseSizes) -> None:
        long = table.filter(pl.col("at") >= sizes.long, quantity="share")
        sums = (
            long.with_columns(pl.lit("long share").alias("quantity")).group_by(*ROWS_OF_SEED).agg(pl.col("value").sum())
        )
        means = table.group_by(*ROWS_OF_SEED).agg(pl.col("value").mean())
        self.sizes, self.values = sizes, dict[tuple[str, Use, str], list[float]]()
        rows = pl.concat([means, sums]).filter(pl.col("value").is_finite()).sort(*ROWS_OF_SEED)
        for task, kind, strength, quantity, _, value in rows.iter_rows():
            self.values.setdefault((task, Use(kind, strength), quantity), []).append(value)

    def of(self, task: str, use: Use, quantity: str) -> list[float]:
        """The numbers of all seeds; none where the table has none."""
        return self.values.get((task, use, quantity), [])

    def tell(self, task: str) -> bool:
        """True if attention adds enough to the accuracy of the plain network, with every seed."""
        whole, alone = (self.of(task, use, "accuracy") for use in (Use(), Use(ALONE)))
        same = len(whole) == len(alone) > 0
        return same and min(best - without for best, without in zip(whole, alone, strict=True)) >= TOLD


@dataclass(frozen=True)
class Gain:
    """A use of paths beside the best control, at one measure of one task."""

    task: str
    measure: str
    use: Use
    mine: list[float]
    control: Use
    theirs: list[float]  # Of the control with the largest median
    beyond: bool  # Every seed is above every seed of every control, and the medians are at least `WORTH` apart

    @property
    def size(self) -> float:
        """The median of the use less that of the best control."""
        return statistics.median(self.mine) - statistics.median(self.theirs)

    @property
    def text(self) -> str:
        """Both numbers with their spread."""
        return f"{spread(self.mine, '.2f')} against {spread(self.theirs, '.2f')}"

    @property
    def medians(self) -> str:
        """Both numbers without their spread."""
        return f"{statistics.median(self.mine):.2f} against {statistics.median(self.theirs):.2f}"


def gain(readings: Readings, task: str, use: Use, measure: str) -> Gain | None:
    """What a use of paths gives over the best of the controls; None where a number is missing."""
    mine = readings.of(task, use, measure)
    controls = {control: readings.of(task, control, measure) for control in readings.sizes.controls}
    if not mine or not all(controls.values()):
        return None
    best = max(controls, key=lambda control: statistics.median(controls[control]))
    apart = statistics.median(mine) - statistics.median(controls[best])
    beyond = min(mine) > max(map(max, controls.values())) and apart >= WORTH
    return Gain(task, measure, use, mine, best, controls[best], beyond)


def gains(readings: Readings, measures: Iterable[str]) -> list[Gain]:
    """What every use of paths gives at these measures, on tasks that tell anything; the largest gain first."""
    tasks, uses = filter(readings.tell, readings.sizes.tasks), readings.sizes.uses
    found = [gain(readings, *case) for case in itertools.product(tasks, uses, measures)]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: (-entry.beyond, -entry.size))


def by_chance(sizes: UseSizes) -> float:
    """The expected number of gains in all comparisons of the tables if every network were drawn alike, at most.

    That n networks are all above m others has then a chance of 1 / C(n + m, n).
    """
    controls = len(sizes.controls) * sizes.seeds
    comparisons = len(sizes.tasks) * len(MEASURES) * len(sizes.uses)
    return comparisons / math.comb(controls + sizes.seeds, sizes.seeds)


def answer(tables: Tables, sizes: UseSizes) -> StudyAnswer:
    """The answer that the tables give."""
    readings, strong, dear = Readings(tables["uses"], sizes), max(sizes.chances), max(sizes.prices)
    short, long = Use(SHORT_PRICE, dear), Use(LONG_PRICE, dear)
    verdicts = [
        _none_verdict(readings, "accuracy"),
        _gain_verdict(readings, [Use(kind, strong) for kind in NOISES], "one length"),
        _gain_verdict(readings, [Use(PATH_DROPOUT, strong)], "layers"),
        _none_verdict(readings, "noise"),
        _moved_verdict(readings, {short: True, long: False}, "long share"),
        _moved_verdict(readings, {short: False}, "residual"),
    ]
    notes = [
        f"Seeds 0 to {sizes.seeds - 1}. No strength is chosen by results: every use counts at each of its strengths. "
        f"Were all networks drawn alike, at most {by_chance(sizes):.2g} gains would be expected by chance in all "
        f"comparisons together; a run where these are more than {CHANCE} names none.",
        CHANGED,
    ]
    evidence = [_table(readings, task) for task in sizes.tasks]
    return StudyAnswer(_sentence(readings), verdicts, evidence, notes)


def _sentence(readings: Readings) -> str:
    """The answer: whether a use of paths gives accuracy, robustness to what it was not trained with, or neither."""
    seeds, chance = readings.sizes.seeds, by_chance(readings.sizes) > CHANCE
    found = [gains(readings, measures) for measures in (["accuracy"], UNTRAINED, ["one length"])]
    if not all(found):
        return "It cannot be told: the plain network learnt no more than one that reads each token alone."
    accurate, robust, apart = (entries[0].beyond for entries in found)
    if (accurate or robust or apart) and chance:
        largest = next(entries[0] for entries in found if entries[0].beyond)
        return f"It cannot be told with {seeds} seeds: {_described(largest)}, which may be chance."
    lead = {(True, True): "Yes", (True, False): "For accuracy", (False, True): "For robustness"}
    first = lead.get((accurate, robust), "Not beyond the lengths themselves" if apart else "No")
    deciding = found[:2] if accurate or robust else found[2:]
    tasks, told = ({entry.task for entry in itertools.chain(*deciding) if entry.beyond or every} for every in (0, 1))
    first += f", on {' and '.join(sorted(tasks))}" if tasks and tasks != told else ""
    pairs = ", ".join(f"{best.medians if robust else best.text} on {best.task}" for best in _best(found[0]))
    none = f"no use of paths is more accurate than plain training or dropout (at best {pairs})"
    clauses = [
        _described(found[0][0]) if accurate else none,
        _described(found[1][0]) if robust else "none is more robust to noise, removed heads or layers",
        _described(found[2][0]) if apart else "none makes single lengths more accurate",
    ]
    return f"{first}: {'; '.join(clauses)}."


def _best(entries: Sequence[Gain]) -> list[Gain]:
    """The largest of every task."""
    return sorted({entry.task: entry for entry in reversed(entries)}.values(), key=lambda entry: entry.task)


def _described(entry: Gain) -> str:
    return f"with {MEASURES[entry.measure]}, {entry.use.label} has {entry.text} on {entry.task}"


def _none_verdict(readings: Readings, measure: str) -> HypothesisVerdict:
    """Whether no use of paths gives more than all controls; it cannot be told where a gain may be chance."""
    found = gains(readings, [measure])
    if not found:
        return HypothesisVerdict("cannot be told", None)
    texts = [f"{best.task}: at best {best.use.label}, {best.text} of {best.control.label}" for best in _best(found)]
    chance = by_chance(readings.sizes) > CHANCE
    holds = (None if chance else False) if any(entry.beyond for entry in found) else True
    return HypothesisVerdict("; ".join(texts), holds)


def _gain_verdict(readings: Readings, uses: Sequence[Use], measure: str) -> HypothesisVerdict:
    """Whether these uses give more than all controls on every task; it cannot be told where ranges overlap."""
    cases: dict[str, list[bool]] = {}
    texts = []
    for task in filter(readings.tell, readings.sizes.tasks):
        for use in uses:
            entry = gain(readings, task, use, measure)
            if entry is not None:
                below = max(entry.mine) <= min(entry.theirs)
                cases.setdefault(task, []).extend([entry.beyond] if entry.beyond or below else [True, False])
                texts.append(f"{task}: {use.label} {entry.text} of {entry.control.label}")
    return HypothesisVerdict("; ".join(texts) or "cannot be told", judged(cases))


def _moved_verdict(readings: Readings, uses: Mapping[Use, bool], quantity: str) -> HypothesisVerdict:
    """Whether these uses move a quantity from that of plain training on every task, up where True is said."""
    cases: dict[str, list[bool]] = {}
    texts = []
    for task, (use, up) in itertools.product(readings.sizes.tasks, uses.items()):
        mine, plain = (readings.of(task, one, quantity) for one in (use, Use()))
        if mine and plain:
            high, low = (mine, plain) if up else (plain, mine)
            apart = min(high) > max(low) or max(high) <= min(low)
            cases.setdefault(task, []).extend([min(high) > max(low)] if apart else [True, False])
            texts.append(f"{task}: {use.label} {spread(mine, '.2f')}, plain {spread(plain, '.2f')}")
    return HypothesisVerdict("; ".join(texts) or "cannot be told", judged(cases))


def _table(readings: Readings, task: str) -> PageTable:
    sizes, rows = readings.sizes, []
    place = sizes.tasks.index(task)
    for use in (Use(ALONE), *sizes.controls, *sizes.uses):
        cells = []
        for quantity in ("accuracy", "loss", *[*MEASURES][1:], "long share", "residual"):
            compared = gain(readings, task, use, quantity) if use in sizes.uses and quantity in MEASURES else None
            mark = "**" if compared is not None and compared.beyond else ""
            cells.append(f"{mark}{spread(readings.of(task, use, quantity), '.2f')}{mark}")
        rows.append([use.label, *cells])
    return PageTable(
        f"{task}: {sizes.layers} layers, width {sizes.widths[place]}, {sizes.heads[place]} heads, {sizes.steps[place]} "
        f"steps; held-out accuracy, median (range) of {sizes.seeds} seeds",
        ["trained with", "accuracy", "loss", *[*MEASURES.values()][1:], f"share of lengths ≥ {sizes.long}", "residual"],
        rows,
        f"**Bold**: every seed above every seed of plain training and of ordinary dropout, and {WORTH} more. *Noise*: "
        f"normal, {NOISE} of the tokens' root mean square. *Heads*: mean of {DRAWS} draws of {HEADS_OUT:.0%} of all "
        "heads. *Layers*, *lengths*: mean over each. *Share*: of the output. *Residual*: relative, of tokens after the "
        "last layer." if place == 0 else "",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: UseSizes) -> "dict[str, Figure]":
    """The accuracy of every way to train less that of plain training, by what is taken away; a panel for each task."""
    from rankscope.figures.matplotlib import Line2D, palette, panels

    readings, shown = Readings(tables["uses"], sizes), [*sizes.controls[1:], *sizes.uses]
    kinds = [*dict.fromkeys(use.kind for use in shown)]
    figure, axes = panels(1, width=8.6, height=3.2, rows=len(sizes.tasks))
    step = 0.8 / len(shown)
    for panel, task in zip(axes, sizes.tasks, strict=True):
        for number, use in enumerate(shown):
            colour = palette()[kinds.index(use.kind)]
            weak = use.strength == min(sizes.prices if use.kind in PRICES else sizes.chances)
            for place, measure in enumerate(MEASURES):
                pair = [readings.of(task, one, measure) for one in (use, Use())]
                if not all(pair) or len(pair[0]) != len(pair[1]):
                    continue
                found = [mine - plain for mine, plain in zip(*pair, strict=True)]
                x, middle = place + (number - (len(shown) - 1) / 2) * step, statistics.median(found)
                panel.plot([x, x], [min(found), max(found)], color=colour, linewidth=1.2)
                face = "white" if weak else colour
                panel.plot([x], [middle], marker="o", markersize=4.5, color=colour, markerfacecolor=face, zorder=3)
        panel.grid(False, axis="x")
        panel.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        for edge in range(1, len(MEASURES)):
            panel.axvline(edge - 0.5, color="0.9", linewidth=0.8, zorder=0)
        panel.set_xticks(range(len(MEASURES)), [*MEASURES.values()], fontsize=8)
        panel.set_xlim(-0.5, len(MEASURES) - 0.5)
        panel.set_ylabel("accuracy less plain")
        panel.set_title(TITLES[task], loc="left", fontsize=9)
    handles = [Line2D([], [], color=palette()[n], marker="o", linewidth=1.2, label=k) for n, k in enumerate(kinds)]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return {QUESTION.name: figure}


QUESTION = Question(
    name="using-paths",
    title="Can paths be used?",
    why=(
        "A network is a sum over paths, of which the short ones carry nearly all after training (Dong et al. 2021), "
        "although long ones can learn by themselves. The paper's readers asked whether a training could make use of "
        "paths, as dropout makes use of units: for accuracy, for robustness, or against collapse."
    ),
    hypotheses=(
        "No use of paths is more accurate than plain training and ordinary dropout, by more than seeds differ.",
        "Networks withstand what they were trained with: at the largest strength, path dropout and diverse lengths "
        "leave each length alone more accurate than all controls do.",
        "That carries over to layers: with one layer removed, path dropout at the largest strength is more accurate "
        "than all controls.",
        "It does not carry over to noise: with noise on embeddings no use of paths is more accurate than all controls.",
        "Prices do what they say: the larger price on short paths makes long paths a larger share of the output than "
        "in plain networks, that on long paths a smaller one, by more than seeds differ.",
        "Long paths make tokens alike: the larger price on short paths lowers the relative residual after the last "
        "layer, by more than seeds differ.",
    ),
    method=(
        "Networks of attention, skips and norms as in figure 4 of Dong et al. (sort: post-norm, at the paper's width "
        "and heads; text: a causal pre-norm decoder without MLPs on Moby Dick; no bias adds to tokens). The head reads "
        "the normalised sum of paths by length, with autograd through the exact path algebra (`PathModel`). *Path "
        "dropout* p: the sum of each length is dropped with chance p, for each sample and step. *Diverse lengths* p: "
        "weights of lengths are Gamma-distributed, of mean 1 and the same variance p / (1 - p). *Price*: the loss has "
        "strength times the norms of short (less than half of the layers) or long paths, as a share of the norms of "
        "all lengths. *Dropout* p: of embedding, attention pattern and outputs, as BERT has it. All start from the "
        "same weights and have the same samples, steps and rate (AdamW, warm-up and cosine); at test time all lengths "
        "have weight 1, and the head is the network's own. A *gain* is one over plain training and ordinary dropout at "
        f"every strength: all seeds above all of theirs, and {WORTH} more in the median. Tasks on which attention adds "
        f"less than {TOLD} to a network that reads each token alone tell nothing."
    ),
    refuted_by=(
        "A rate and a length of training tuned for each way to train, as noise may want more steps; data so few that "
        "regularisation pays more; training with removed heads or layers (LayerDrop) as a further control where a "
        "gain is in robustness to these; networks with MLPs, larger ones, and paths weighted one by one in place of "
        "by length."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=120.0,
    caption=(
        "Held-out accuracy less that of plain training of the same seed, by what is taken away at test time: median "
        "and range over seeds. Hollow: the smaller strength; filled: the larger. The rule for a gain is stricter: it "
        "compares all seeds with all seeds of the controls."
    ),
)  # fmt: skip
