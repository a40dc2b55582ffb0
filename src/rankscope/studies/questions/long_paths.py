"""Are long paths useless by nature, or by training? Networks are trained on paths of chosen lengths alone.

Figure 4 of Dong et al. (2021) keeps a few paths of one length of a trained network: from length 3 on, what they say
is a guess. Such paths were never asked to say anything: the network was trained as a whole, in which short paths
suffice. Here networks learn sorting, convex hulls and text through the exact sum of all paths of length k and no
other (`lab/path_model.py`), with autograd through the path algebra.

What else could be why a length fails, and how it is held apart: the head (a new linear head is fitted to the sums of
the network that was trained whole, and to those of a fresh one), the number of paths (`C(L, k) H^k` grows with k; `≤
k` and `≥ k` are trained beside `= k`), attention that short paths decide (networks without skips have long paths
alone, attention included), gradients through attention (`detached`), the learning rate, and collapse (remedies).
"""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import polars as pl
import torch

from rankscope.errors import StudyError, one_of
from rankscope.lab import Initialisation, Recipe, Training
from rankscope.lab.path_model import PathModel
from rankscope.lab.trial import free_memory
from rankscope.paths import path_counts
from rankscope.studies.questions.path_networks import (
    SCHEMES,
    TASKS,
    TITLES,
    attention_network,
    fitted_head,
    path_task,
    residuals,
    self_attention,
    shares,
    with_ones,
)  # fmt: skip
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import spread, spread_of_logs
from rankscope.studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR_GUESS = 0.05  # How far above a network that reads each token alone still is a guess; figure 4's own margin
LEARNT = 0.5  # Paths of a length have learnt where they recover this share of what attention adds
TOLD = 0.05  # Accuracy that attention must add for a task to tell anything
SMALL = 0.1  # Long paths carry little of an output of which they are less than this share
SHAPED, CONTRAST = "shaped", "contranorm"
MARKS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # Shares of a training's steps after which shares of lengths are read
ROWS = {
    "task": pl.String, "kind": pl.String, "length": pl.Int64, "condition": pl.String, "seed": pl.Int64,
    "quantity": pl.String, "at": pl.Int64, "value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class LengthSizes:
    """How large the experiment is. What is a tuple has one number for each task."""

    tasks: tuple[str, ...]
    layers: int
    seeds: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]
    steps: tuple[int, ...]
    batches: tuple[int, ...]
    context: int  # Characters of a sample of text
    samples: int  # Samples of hulls to learn from
    remedies: tuple[str, ...]
    rates: tuple[float, ...]
    factors: tuple[float, ...]  # Times the learning rate, of whole networks and the longest paths of the first task
    evaluation_samples: int
    head_samples: int  # Samples that a new head is fitted to
    probe_samples: int  # Samples that shares and residuals are read on

    @property
    def long(self) -> int:
        """The length from which on paths count as long: 3 of 6, as in figure 4."""
        return math.ceil(self.layers / 2)


QUICK = LengthSizes(
    ("sort",), layers=3, seeds=2, widths=(48,), heads=(2,), steps=(200,), batches=(32,), rates=(1e-3,), context=32,
    samples=2000, remedies=(SHAPED,), factors=(), evaluation_samples=200, head_samples=256, probe_samples=8,
)  # fmt: skip
FULL = LengthSizes(
    TASKS, layers=6, seeds=5, widths=(48, 84, 96), heads=(2, 3, 4), steps=(1200, 1200, 2000), batches=(50, 100, 32),
    rates=(1e-3, 1e-3, 3e-3), context=64, samples=10000, remedies=(SHAPED, CONTRAST), factors=(0.3, 3.0),
    evaluation_samples=300, head_samples=1000, probe_samples=16,
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One way to restrict and to change a network of a task."""

    kind: str = "all"  # "all" lengths, "exact"ly one, at "most", or at "least" that many heads
    length: int | None = None
    remedy: str = ""
    skips: bool = True  # False: the network itself has no skips, so that all its paths have the full length
    detached: bool = False  # No gradient goes through attention and the scales of norms
    factor: float = 1.0  # Times the task's learning rate

    @property
    def condition(self) -> str:
        """What is changed beside the lengths."""
        changes = ["" if self.skips else "no skips", self.remedy, "detached" * self.detached]
        changes.append("" if self.factor == 1 else f"rate x {self.factor:g}")
        return " ".join(filter(None, changes)) or "plain"

    def weights(self, layers: int) -> tuple[float, ...]:
        """The weight of each length from 0 on, 1 or 0."""
        k = self.length
        taken = {
            "all": range(layers + 1),
            "exact": [k],
            "most": range((k or 0) + 1),
            "least": range(k or 0, layers + 1),
        }
        if self.kind not in taken:
            raise StudyError(one_of("kind", self.kind, taken), subject="kind")
        return tuple(float(length in taken[self.kind]) for length in range(layers + 1))


def arms(task: str, sizes: LengthSizes) -> list[Arm]:
    """Every way in which networks of a task are trained."""
    last, inner = sizes.layers, range(1, sizes.layers)
    found = [Arm(), *(Arm("exact", k) for k in range(last + 1))]
    found += [Arm(kind, k) for kind in ("most", "least") for k in inner]
    found += [Arm(kind, k, remedy) for remedy in sizes.remedies for kind, k in (("all", None), ("exact", last))]
    found += [Arm("exact", last, remedy, skips=False) for remedy in ("", *sizes.remedies)]
    found += [Arm("exact", k, detached=True) for k in dict.fromkeys((1, last))]
    factors = sizes.factors if task == sizes.tasks[0] else ()
    return [*found, *(Arm(kind, k, factor=by) for by in factors for kind, k in (("all", None), ("exact", last)))]


def training_of(name: str, arm: Arm, sizes: LengthSizes, device: str = "cpu") -> Training:
    """The training of all seeds of an arm, not begun yet: figure 4's recipe without dropout."""
    place, task = sizes.tasks.index(name), path_task(name, sizes.context, sizes.samples)
    fields = {} if arm.skips else {"attention_skip": 0.0}
    arch = attention_network(name, task, sizes.layers, sizes.widths[place], sizes.heads[place], **fields)
    recipe = Recipe(
        steps=sizes.steps[place], batch=sizes.batches[place], lr=arm.factor * sizes.rates[place], weight_decay=0.0,
        frozen=("gain",),
    )  # fmt: skip
    return Training(
        task, arch, recipe, seeds=range(sizes.seeds), remedies=[arm.remedy] if arm.remedy else [], device=device,
        initialisation=Initialisation(SCHEMES[name], 1.0), capture=True,
        model=partial(PathModel, lengths=arm.weights(sizes.layers), detached=arm.detached),
    )  # fmt: skip


# ---- What is run


def gather(setup: Setup, sizes: LengthSizes) -> dict[str, pl.DataFrame]:
    """Train every arm of every task and read what came of it: one cached piece for each, all seeds in it."""
    parts: dict[str, Callable[[], pl.DataFrame]] = {}
    for task in sizes.tasks:
        for arm in arms(task, sizes):
            name = f"{task} {arm.kind} {'' if arm.length is None else arm.length} {arm.condition}"
            parts[" ".join(name.split())] = partial(trained, task, arm, sizes, setup.device)
    return {"paths": setup.cached_parts(parts, **asdict(sizes))}


def trained(task: str, arm: Arm, sizes: LengthSizes, device: str = "cpu") -> pl.DataFrame:
    """Train one arm; rows of one number each: task · kind · length · condition · seed · quantity · at · value.

    | quantity           | what it is                                                                 | `at`   |
    |--------------------|----------------------------------------------------------------------------|--------|
    | `loss`, `accuracy` | held out, of the lengths that were trained                                 |        |
    | `own head`         | accuracy of each length alone with the network's own head                  | length |
    | `new head`         | the same with a linear head fitted to that length; of whole networks       | length |
    | `fresh`            | the same before training                                                   | length |
    | `share MARK`       | of the output of whole networks, after that share of the steps             | length |
    | `residual`         | log10 of the relative residual of each length's sum, trained               | length |
    | `self-attention`   | what tokens give themselves, mean of layers, heads and tokens, trained     |        |
    """
    training = training_of(task, arm, sizes, device)
    try:
        rows = [*_rows(training, arm, sizes)]
    finally:
        del training
        free_memory(device)
    labels = (task, arm.kind, arm.length, arm.condition)
    return pl.DataFrame([(*labels, *row) for row in rows], schema=ROWS, orient="row")


def _rows(training: Training, arm: Arm, sizes: LengthSizes) -> Iterator[tuple[int, str, int | None, float]]:
    whole = arm.kind == "all" and arm.factor == 1
    marks = {f"share {mark:g}": round(mark * training.recipe.steps) for mark in MARKS} if whole else {}
    if whole:
        yield from _head_rows(training, sizes, "fresh")
    yield from _share_rows(training, sizes, [name for name, mark in marks.items() if mark == 0])
    for step in training:
        yield from _share_rows(training, sizes, [name for name, mark in marks.items() if mark == step])
    for seed, score in zip(training.seeds, training.evaluate(sizes.evaluation_samples), strict=True):
        yield seed, "loss", None, score.loss
        yield seed, "accuracy", None, score.accuracy
    yield from _head_rows(training, sizes, "own head")
    if whole:
        yield from _head_rows(training, sizes, "new head")
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens(sizes.probe_samples)[0], strict=True):
        for length, residual in enumerate(residuals(net, X)):
            yield seed, "residual", length, residual
        yield seed, "self-attention", None, self_attention(net, X)


def _head_rows(training: Training, sizes: LengthSizes, quantity: str) -> Iterator[tuple[int, str, int, float]]:
    """Accuracy of each length alone, by the network's own head or by one fitted to samples that are learnt from."""
    task, device = training.task, training.device
    test = task.held_out(sizes.evaluation_samples).to(device)
    for seed, model in zip(training.seeds, training.models, strict=True):
        precise = copy.deepcopy(model).double().eval()
        assert isinstance(precise, PathModel)
        learnt = task.batch(sizes.head_samples, seed, 0).to(device)
        with torch.no_grad():
            terms, known = precise.terms(test.inputs), precise.terms(learnt.inputs)
        for length, one in enumerate(torch.eye(sizes.layers + 1, dtype=torch.float64, device=device)):
            if quantity == "own head":
                logits = precise.read(terms, one)
            else:
                W = fitted_head(precise.readout(known, one), learnt, task.interface.classes)
                logits = with_ones(precise.readout(terms, one)) @ W
            yield seed, quantity, length, float(task.accuracy(logits, test))


def _share_rows(
    training: Training, sizes: LengthSizes, quantities: Sequence[str]
) -> Iterator[tuple[int, str, int, float]]:
    """The shares of the output by length as they are now, under each of these names."""
    if not quantities:
        return
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens(sizes.probe_samples)[0], strict=True):
        for length, value in enumerate(shares(net, X)):
            for quantity in quantities:
                yield seed, quantity, length, value


# ---- The answer, from tables alone


def seen(table: pl.DataFrame, task: str, arm: Arm, quantity: str = "accuracy", at: int | None = None) -> list[float]:
    """A number of every seed of an arm, in the order of seeds; none where the table has no such arm."""
    mine = table.filter(task=task, kind=arm.kind, condition=arm.condition, quantity=quantity)
    mine = mine.filter(pl.col("length").eq_missing(arm.length), pl.col("at").eq_missing(at))
    return [value for value in mine.sort("seed")["value"].to_list() if value is not None and math.isfinite(value)]


def recovered(table: pl.DataFrame, task: str, accuracies: Sequence[float]) -> list[float]:
    """Of what attention adds to the accuracy of a task, the share that is in these accuracies, seed by seed.

    Attention adds what the whole network has over the network that is trained on paths past all heads.
    """
    whole, alone = seen(table, task, Arm()), seen(table, task, Arm("exact", 0))
    if len(accuracies) != len(whole) or not _tells(table, task):
        return []
    pairs = zip(accuracies, whole, alone, strict=True)
    return [(mine - without) / (best - without) for mine, best, without in pairs]


def _tells(table: pl.DataFrame, task: str) -> bool:
    """True if attention adds enough to the accuracy, with every seed."""
    whole, alone = seen(table, task, Arm()), seen(table, task, Arm("exact", 0))
    same = len(whole) == len(alone) > 0
    return same and min(best - without for best, without in zip(whole, alone, strict=True)) >= TOLD


def judged(cases: dict[str, list[bool]]) -> bool | None:
    """True if every case of every task holds; False if on some task all fail; None otherwise, or without cases."""
    if any(found and not any(found) for found in cases.values()):
        return False
    return True if cases and all(found and all(found) for found in cases.values()) else None


def answer(tables: Tables, sizes: LengthSizes) -> StudyAnswer:
    """The answer that the tables give."""
    table, last = tables["paths"], sizes.layers
    alone = {task: recovered(table, task, seen(table, task, Arm("exact", last))) for task in sizes.tasks}
    headed = {task: recovered(table, task, seen(table, task, Arm(), "new head", last)) for task in sizes.tasks}
    verdicts = [
        _guess_verdict(table, sizes),
        _verdict(headed, lambda share: share < LEARNT),
        _verdict(alone, lambda share: share >= LEARNT),
        _compared(table, sizes, Arm("exact", last), Arm("exact", last, SHAPED)),
        _share_verdict(table, sizes),
        _compared(table, sizes, Arm("exact", last, skips=False), Arm("exact", last)),
        _remedy_verdict(table, sizes),
    ]
    evidence = [*(_length_table(table, task, sizes) for task in sizes.tasks), _control_table(table, sizes)]
    counts = ", ".join(map(str, path_counts(last, sizes.heads[0])))
    notes = [
        f"The number of paths differs with their length: {last} layers of {sizes.heads[0]} heads have {counts} paths "
        f"of lengths 0 to {last}. This study trains on all of a length; which of number and length decides is a "
        "question of its own.",
        f"Seeds 0 to {sizes.seeds - 1}. What is trained on long paths is still told by the whole network whom to "
        "attend to, as in the theorem's terms; in networks without skips all paths have the full length, and decide "
        "that too.",
        "Seen before the expectations were written: trials of 150 to 300 steps on sorting with one or two seeds "
        "(whole, lengths 3 and 6, no skips) and of 120 steps of three arms on hull and text, in which the whole "
        "network had not learnt. The expectations on heads and shares are Dong et al.'s, and were not adjusted.",
    ]
    return StudyAnswer(_sentence(table, sizes, alone, headed), verdicts, evidence, notes)


def _sentence(
    table: pl.DataFrame, sizes: LengthSizes, alone: dict[str, list[float]], headed: dict[str, list[float]]
) -> str:
    """The answer: by nature where trained paths do not recover half, by training where these do and a head does not."""
    last = sizes.layers
    known = [task for task in sizes.tasks if alone[task] and headed[task]]
    if not known:
        return "It cannot be told: the whole network learnt no more than one that reads each token alone."
    causes = set()
    for task in known:
        reads = [statistics.median(shares) >= LEARNT for shares in (alone[task], headed[task])]
        causes.add("By nature" if not reads[0] else "By neither" if reads[1] else "By training")
    lead = causes.pop() if len(causes) == 1 else "It depends on the task"
    trained_on = ", ".join(f"{spread(alone[task], '.0%')} on {task}" for task in known)
    read = ", ".join(f"{statistics.median(headed[task]):.0%}" for task in known)
    bare = [_middles(table, known, Arm("exact", last, remedy, skips=False)) for remedy in ("", SHAPED)]
    clause = f"; without skips they recover {bare[0]}" if bare[0] else ""
    clause += f", with {SHAPED} attention {bare[1]}" if clause and bare[1] else ""
    return (
        f"{lead}: networks trained on paths of length {last} alone recover {trained_on} of the accuracy that "
        f"attention adds, where a new head on those paths of networks trained whole recovers {read}{clause}."
    )


def _middles(table: pl.DataFrame, tasks: Sequence[str], arm: Arm) -> str:
    """The medians over seeds of what an arm recovers on each task; empty where one is missing."""
    found = [recovered(table, task, seen(table, task, arm)) for task in tasks]
    return ", ".join(f"{statistics.median(shares):.0%}" for shares in found) if all(found) else ""


def _guess_verdict(table: pl.DataFrame, sizes: LengthSizes) -> HypothesisVerdict:
    """Whether long lengths of whole networks, read by their own head, are no better than reading each token alone."""
    cases, texts = {}, []
    for task in sizes.tasks:
        alone = seen(table, task, Arm("exact", 0))
        by_length = [seen(table, task, Arm(), "own head", k) for k in range(sizes.long, sizes.layers + 1)]
        if not alone or not all(len(found) == len(alone) for found in by_length):
            continue
        best = [max(found) for found in zip(*by_length, strict=True)]
        near = [mine <= guess + NEAR_GUESS for mine, guess in zip(best, alone, strict=True)]
        cases[task] = near if _tells(table, task) else []
        texts.append(f"{task} {spread(best, '.2f')}, token by token {spread(alone, '.2f')}")
    return HypothesisVerdict("best of long lengths: " + "; ".join(texts) if texts else "not measured", judged(cases))


def _verdict(shares: dict[str, list[float]], holds: Callable[[float], bool]) -> HypothesisVerdict:
    """A verdict on the share of what attention adds, of every task."""
    texts = [f"{task} {spread(found, '.0%') if found else 'cannot be told'}" for task, found in shares.items()]
    return HypothesisVerdict("; ".join(texts), judged({task: [*map(holds, found)] for task, found in shares.items()}))


def _compared(table: pl.DataFrame, sizes: LengthSizes, lower: Arm, higher: Arm) -> HypothesisVerdict:
    """Whether one arm is more accurate than another on every task, by more than seeds differ."""
    cases, texts = {}, []
    for task in sizes.tasks:
        low, high = seen(table, task, lower), seen(table, task, higher)
        if not low or not high:
            continue
        apart = min(high) > max(low) or max(high) <= min(low)
        cases[task] = [min(high) > max(low)] if apart else [True, False]
        names = (f"{arm.condition} {spread(found, '.2f')}" for arm, found in ((higher, high), (lower, low)))
        texts.append(f"{task}: {', '.join(names)}")
    return HypothesisVerdict("; ".join(texts) or "not measured", judged(cases))


def _remedy_verdict(table: pl.DataFrame, sizes: LengthSizes) -> HypothesisVerdict:
    """Whether shaped attention helps networks without skips. The quick run cannot tell: it is made on its data."""
    found = _compared(
        table, sizes, Arm("exact", sizes.layers, skips=False), Arm("exact", sizes.layers, SHAPED, skips=False)
    )
    return HypothesisVerdict(f"{found.ours}; made on these data", None) if sizes == QUICK else found


def _share_verdict(table: pl.DataFrame, sizes: LengthSizes) -> HypothesisVerdict:
    """Whether long lengths are a small share of the output of whole networks after training."""
    ends = {}
    for task in sizes.tasks:
        ends[task] = _long_share(table, task, MARKS[-1], sizes)
    texts = [f"{task} {spread(found, '.2f')}" for task, found in ends.items() if found]
    cases = {task: [share < SMALL for share in found] for task, found in ends.items()}
    return HypothesisVerdict("; ".join(texts) or "not measured", judged(cases))


def _long_share(table: pl.DataFrame, task: str, mark: float, sizes: LengthSizes) -> list[float]:
    """The share of all long lengths together, of every seed."""
    lengths = range(sizes.long, sizes.layers + 1)
    by_length = [seen(table, task, Arm(), f"share {mark:g}", length) for length in lengths]
    return [sum(found) for found in zip(*by_length, strict=True)]


def _length_table(table: pl.DataFrame, task: str, sizes: LengthSizes) -> PageTable:
    place = sizes.tasks.index(task)
    counts = path_counts(sizes.layers, sizes.heads[place])
    rows = []
    for k in range(sizes.layers + 1):
        trained_on = [Arm("exact", k), *(_ended(Arm(kind, k), sizes) for kind in ("most", "least"))]
        read = [spread(seen(table, task, Arm(), quantity, k), ".2f") for quantity in ("own head", "new head", "fresh")]
        start, end = (spread(seen(table, task, Arm(), f"share {m:g}", k), ".2f") for m in (MARKS[0], MARKS[-1]))
        left = [spread_of_logs(seen(table, task, arm, "residual", k)) for arm in (Arm(), Arm("exact", k))]
        own = spread(seen(table, task, Arm("exact", k), "self-attention"), ".2f")
        cells = [spread(seen(table, task, arm), ".2f") for arm in trained_on]
        rows.append([str(k), f"{counts[k]:,}", *cells, *read, start, end, *left, own])
    whole = spread(seen(table, task, Arm()), ".3f")
    return PageTable(
        f"{task}: {sizes.layers} layers, width {sizes.widths[place]}, {sizes.heads[place]} heads, {sizes.steps[place]} "
        f"steps; held-out accuracy by length, median (range) of {sizes.seeds} seeds; the whole network has {whole}",
        ["length", "paths", "trained on it alone", "on ≤", "on ≥", "trained whole, own head", "new head",
         "fresh, new head", "share at the start", "share at the end", "residual, trained whole", "trained on it",
         "self-attention, trained on it"], rows,
        "*New head*: a linear head fitted to the sum of that length. *Share*: of the output of the whole network. "
        "*Residual*: relative, of the sum of that length. *Self-attention*: what tokens give themselves; even "
        "attention gives 0.12 on sort, 0.10 on hull." if place == 0 else "",
    )  # fmt: skip


def _control_table(table: pl.DataFrame, sizes: LengthSizes) -> PageTable:
    last, rows = sizes.layers, []
    for task in sizes.tasks:
        mine = table.filter(task=task)
        for condition in mine["condition"].unique(maintain_order=True).to_list():
            for kind, length in (("all", None), ("exact", 1), ("exact", last)):
                found = mine.filter(pl.col("length").eq_missing(length), kind=kind, condition=condition)
                if found.is_empty():
                    continue
                numbers = {name: found.filter(quantity=name)["value"].to_list() for name in ("accuracy", "loss")}
                left = found.filter(pl.col("at") == (last if length is None else length), quantity="residual")
                shown = "all" if length is None else f"= {length}"
                rows.append([task, condition, shown, spread(numbers["accuracy"], ".2f"), spread(numbers["loss"], ".2f"),
                             spread_of_logs(left["value"].drop_nans().to_list())])  # fmt: skip
    return PageTable(
        "Controls: other conditions, median (range) over seeds",
        ["task", "condition", "trained on", "held-out accuracy", "held-out loss", f"residual (all: of length {last})"],
        rows,
        "*Detached*: no gradient through attention and scales of norms. *No skips*: every path of the network has the "
        f"full length. *Rate x*: times the learning rate. *{SHAPED}*, *{CONTRAST}*: remedies.",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: LengthSizes) -> "dict[str, Figure]":
    """Accuracy by length for each task, and shares of lengths along the training of whole networks."""
    from rankscope.figures.matplotlib import palette, panels

    table, lengths = tables["paths"], range(sizes.layers + 1)
    rows = 2 if len(sizes.tasks) > 1 else 1
    figure, axes = panels(math.ceil((len(sizes.tasks) + 1) / rows), width=4.6, height=3.4, rows=rows)
    curves: dict[str, Callable[[str, int], list[float]]] = {
        "trained on length k alone": lambda task, k: seen(table, task, Arm("exact", k)),
        "trained on ≤ k": lambda task, k: seen(table, task, _ended(Arm("most", k), sizes)),
        "trained on ≥ k": lambda task, k: seen(table, task, _ended(Arm("least", k), sizes)),
        "trained whole, read at k": lambda task, k: seen(table, task, Arm(), "own head", k),
        "trained whole, new head at k": lambda task, k: seen(table, task, Arm(), "new head", k),
        "fresh, new head at k": lambda task, k: seen(table, task, Arm(), "fresh", k),
    }
    for panel, task in zip(axes, sizes.tasks, strict=False):
        for number, (label, found) in enumerate(curves.items()):
            points = {k: found(task, k) for k in lengths}
            dash = "-" if number == 0 or number > 2 else "--"
            _band(panel, points, label, palette()[number], dash)
        panel.set_title(TITLES[task], loc="left", fontsize=9)
        panel.set_xlabel("length k")
        panel.set_xticks(list(lengths))
    for panel in axes[:: math.ceil((len(sizes.tasks) + 1) / rows)]:
        panel.set_ylabel("held-out accuracy")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    last = axes[len(sizes.tasks)]
    marks = range(len(MARKS))
    for k in lengths:
        points = {mark: seen(table, sizes.tasks[0], Arm(), f"share {MARKS[mark]:g}", k) for mark in marks}
        _band(last, points, f"length {k}", palette()[k % len(palette())], "-")
    last.set_xticks(list(marks), [f"{mark:.0%}" for mark in MARKS])
    last.set_xlabel("steps of the training")
    last.set_ylabel("share of the output")
    last.set_title(f"Trained whole on {sizes.tasks[0]}: shares by length", loc="left", fontsize=9)
    last.legend(fontsize=7, frameon=False, ncols=2)
    for panel in axes[len(sizes.tasks) + 1 :]:
        panel.set_visible(False)
    return {QUESTION.name: figure}


def _ended(arm: Arm, sizes: LengthSizes) -> Arm:
    """The arm that is trained in place of one that is the same: at most 0 is exactly 0, at least 0 is all."""
    if arm.length == 0:
        return Arm("exact", 0) if arm.kind == "most" else Arm()
    if arm.length == sizes.layers:
        return Arm() if arm.kind == "most" else Arm("exact", arm.length)
    return arm


def _band(axes: "Axes", points: dict[int, list[float]], label: str, colour: str, dash: str) -> None:
    known = sorted(place for place, values in points.items() if values)
    low, middle, high = ([pick(points[place]) for place in known] for pick in (min, statistics.median, max))
    axes.fill_between(known, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(known, middle, color=colour, marker="o", markersize=3.5, linewidth=1.4, linestyle=dash, label=label)


QUESTION = Question(
    name="long-paths",
    title="Are long paths useless by nature, or by training?",
    why=(
        "Dong et al. (2021) show in figure 4 that paths of length 3 and more of trained networks guess, and that pure "
        "attention collapses. Those paths were never trained by themselves. Whether long paths cannot carry what a "
        "task needs, or never had to, is the question."
    ),
    hypotheses=(
        "In networks trained whole, long paths (at least half of the layers) with the network's own head are at most "
        f"{NEAR_GUESS} more accurate than a network that reads each token alone.",
        "It is not the head: a new linear head on the longest paths of a network trained whole recovers less than half "
        "of the accuracy that attention adds.",
        "Long paths can learn: trained on the longest paths alone, networks recover at least half of that.",
        "They learn better where collapse is held off: shaped attention makes the longest paths alone more accurate, "
        "by more than seeds differ.",
        f"In networks trained whole, long paths are less than {SMALL} of the output at the end of training.",
        "They need short paths to decide attention: without skips the longest paths are less accurate than with skips, "
        "by more than seeds differ.",
        "Written after the quick run, for the full one: without skips, shaped attention makes the longest paths more "
        "accurate, by more than seeds differ.",
    ),
    method=(
        "Networks of attention, skips and norms as in figure 4 (sort and hull: post-norm, at the paper's width and "
        "heads; text: a causal pre-norm decoder without MLPs on Moby Dick; no bias adds to tokens). The head reads "
        "the normalised sum of all paths of the chosen lengths (`PathModel`); attention and the scales of norms are "
        "those of the whole network in the same pass, and gradients are exact, through these too. Every restriction "
        "is trained from the same weights with the same samples and recipe (AdamW, warm-up and cosine, no dropout). "
        "*What attention adds* is the accuracy of the whole network less that of the network trained on length 0, "
        "which reads each token alone; shares of it are taken seed by seed, on tasks where it is at least 0.05. "
        "Shares of the output and residuals are those of `decompose`."
    ),
    refuted_by=(
        "A rate and a length of training tuned for every restriction (on sorting the rate is varied); tasks that need "
        "several steps of composition, where short paths cannot suffice; attention that does not give tokens to "
        "themselves, by which a long path can be a short one in disguise (the tables have how much it does); deeper "
        "networks, where the longest paths are longer."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=200.0,
    caption=(
        "Median and range over seeds. Reading each token alone is length 0; *≤* the largest length, and *≥ 0*, is the "
        "whole network."
    ),
)  # fmt: skip
