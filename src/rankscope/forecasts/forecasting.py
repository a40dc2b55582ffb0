"""`forecast`: what will become of a network, before it is trained.

The subject becomes a `Plan`, of which readings are taken and predictions are made, in the order that the room's
`__init__.py` tells; `Forecast.mends` asks the same of changed networks (`changes` in `plan.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import polars as pl
import torch

from rankscope.errors import ArchitectureError, LabError, RankscopeError, require
from rankscope.forecasts.layers import SCHEMA, by_layer, filled_table, layers_chart, layers_table
from rankscope.forecasts.live_module import read_module
from rankscope.forecasts.live_passes import ModuleInputs
from rankscope.forecasts.plan import GIVEN, PARTS, DescribedPlan, Design, Plan, changes, planned, point_of
from rankscope.forecasts.predictor import LEARNT, NEAREST_SCHEMA, Prediction, Predictor
from rankscope.forecasts.verdict import place_of_100, sentences
from rankscope.lab import Recipe
from rankscope.nets import CPU, usual_modes
from rankscope.results import Plot, Result, Section, Table
from rankscope.runs import Manifest, Network, begun

ENOUGH = 0.7  # The probability of learning that the least skip weight must give
HALVINGS = 4  # How often the interval of the least skip weight is halved
OPTIMISER = "AdamW, its rate rising over 5% of the steps and then falling to zero as a cosine"  # Of `Recipe`
DEEPEST = 256  # The largest depth that is asked about


@dataclass(frozen=True, repr=False, eq=False)
class Forecast(Result):
    """What is expected of a network, and what it is expected from.

    Args:
        plan: The network, what it is to learn and how: a `DescribedPlan` of a module of a person's own, or
            where it was read from a folder.
        table: By layer, layer 0 the input; NaN where rounding decided. As log10: residual (relative, of tokens) ·
            residual_theory (mean-field) · separation (one minus the mean cosine) · gradient (at tokens) · query · key ·
            value · output · mlp (gradients at these weights). As they are: layer · entropy (in nats, the mean over
            heads) · phase · boundary (the natural log of beta / beta_c).
        readings: Every reading that is known, by name (`readings.py`).
        prediction: What trained networks say of it.
        exponents: `angle` and `gradient`: the mean natural log of what a layer multiplies angles between tokens and
            the mean square of gradients by, measured; `angle_theory` and `gradient_theory`, in closed form, where there
            is one.
        notes: Conditions that the numbers stand under, each a sentence.
        doubts: The notes that make the probability and the place guesses: each names a way in which no trained
            network was like this one.
        manifest: What was forecast with what.
    """

    kind = "forecast"
    schemas: ClassVar = {"forecast": SCHEMA, "forecast_nearest": NEAREST_SCHEMA}
    plan: Plan | DescribedPlan
    table: pl.DataFrame
    readings: dict[str, float]
    prediction: Prediction
    exponents: dict[str, float]
    notes: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    manifest: Manifest = field(default_factory=Manifest)

    @property
    def design(self) -> Plan:
        """The plan, in which parts of the network can be changed.

        Raises:
            ArchitectureError: The forecast is of a module whose architecture is not known.
        """
        if isinstance(self.plan, Plan):
            return self.plan
        message = "a network; this forecast was read from a folder: forecast anew"
        if not self.plan.verdict:
            named = self.plan.description["module"]
            message = f"an Architecture; {named} was forecast as a module, of which none is known"
            message += ": forecast an Architecture like it"
        raise ArchitectureError(f"changes, depths and maps need {message}", subject="subject")

    @property
    def probability(self) -> float:
        """The chance that the network learns anything of its inputs in this training."""
        return self.prediction.probability

    @property
    def place(self) -> float:
        """Where its final loss is expected among designs of the lab: 0 the lowest, 1 the highest."""
        return self.prediction.place

    @property
    def steps(self) -> int:
        """Steps of the training that is forecast."""
        return self.plan.recipe.steps

    @cached_property
    def learnt_below(self) -> float:
        """The final loss below which the network has learnt something of its inputs: that of guessing labels by their
        frequencies, less `LEARNT` nats. NaN for a task of which no design was trained, and for a module's own loss."""
        if isinstance(self.plan, DescribedPlan):
            return self.plan.learnt_below
        task = self.plan.task
        with usual_modes():  # whoever asks may have another default device
            return task.blind - LEARNT[task.name] if task.name in LEARNT else math.nan

    @cached_property
    def verdict(self) -> list[str]:
        """What is expected, in sentences: will it learn, where do tokens and gradients go, what is to blame."""
        if isinstance(self.plan, DescribedPlan) and self.plan.verdict:
            return list(self.plan.verdict)
        return sentences(self)

    def mends(
        self,
        parts: tuple[str, ...] = PARTS,
        most: int = 8,
        progress: Callable[[int, int, str], None] = lambda done, total, change: None,
    ) -> "list[Mend]":
        """Changes of the network that make it no less probable to learn, each with its own forecast: the most probable
        first, then by their place. Weights are drawn anew for each; of a network whose weights were given, the first
        change is that alone.

        Args:
            parts: What may be changed, of `changes.PARTS`.
            most: How many are returned.
            progress: Called with how many changes were forecast, of how many, and the next one.
        """
        plan = self.design
        mends, candidates = [], list(changes(plan, parts))
        if plan.net is not None:
            candidates.insert(0, ("weights drawn anew, nothing else changed", plan.changed))
        for done, (change, make) in enumerate(candidates):
            progress(done, len(candidates), change)
            try:
                mends.append(Mend(change, forecast_of(make(), layers=False)))
            except RankscopeError:  # a change that does not go onto this network
                continue
        if "skips" in parts and plan.arch.attention_skip < 1 and (least := self.least_skip()) is not None:
            mends.append(least)
        mends = [mend for mend in mends if mend.forecast.probability >= self.probability]
        mends.sort(key=lambda mend: (-round(mend.forecast.probability, 2), mend.forecast.place))
        return mends[:most]

    def least_skip(self) -> "Mend | None":
        """The least weight of skips at which the network is expected to learn, by halving; None if none below 1 is."""
        plan = self.design
        arch = plan.arch

        def asked(weight: float) -> Forecast:
            skips: dict[str, Any] = {"attention_skip": weight}
            if not arch.parallel:
                skips["mlp_skip"] = max(weight, arch.mlp_skip)
            return forecast_of(plan.changed(**skips), layers=False)

        low, high, best = arch.attention_skip, 1.0, asked(1.0)
        if best.probability < ENOUGH:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            at_middle = asked(middle)
            if at_middle.probability >= ENOUGH:
                high, best = middle, at_middle
            else:
                low = middle
        return None if high == 1.0 else Mend(f"skips of weight {high:.2g}, the least that do", best)

    def deepest(self, most: int = DEEPEST) -> int:
        """The largest depth at which the network is expected to learn, to an eighth; 0 if none is.

        Args:
            most: The largest depth that is asked about.
        """

        plan = self.design

        def learns(layers: int) -> bool:
            return forecast_of(plan.changed(layers=layers), layers=False).probability >= 0.5

        if not learns(1):
            return 0
        low = 1
        while low < most and learns(min(2 * low, most)):
            low = min(2 * low, most)
        high = min(2 * low, most)
        while high - low > max(1, low // 8):
            middle = round(math.sqrt(low * high))
            low, high = (middle, high) if learns(middle) else (low, middle)
        return low

    @property
    def title(self) -> str:
        """What is forecast to learn what."""
        chance = f"probability {self.probability:.2f}{', as a guess' if self.doubts else ''}"
        return f"Forecast: {self.plan.task_name}, {self.steps:,} steps, {chance}"

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Tokens and gradients by layer, and the trained networks that are most similar."""
        return {"forecast": self.table, "forecast_nearest": self.prediction.nearest}

    def sections(self) -> list[Section]:
        """What is expected: the sentences, tokens and gradients by layer, and the nearest trained networks."""
        drawn = [] if self.table.is_empty() else [Plot("forecast", [("", layers_chart(self.table, self.verdict[0]))])]
        rows = [
            [str(design), f"{similarity:.3g}", task, f"{loss:.3g}", "yes" if learns else "no"]
            for design, similarity, task, loss, learns in self.prediction.nearest.iter_rows()
        ]
        nearest = Table("Trained networks that read most alike", list(NEAREST_SCHEMA), rows)
        first, *further = self.verdict
        return [Section("What is expected of a training", first, drawn, [layers_table(self.table), nearest], further)]

    def overview(self) -> Section:
        """The sentences, and the figure."""
        return replace(self.sections()[0], tables=[])

    def details(self) -> dict[str, Any]:
        """Numbers and sentences of the forecast, and what it is of; no weights."""
        prediction = {name: value for name, value in vars(self.prediction).items() if name != "nearest"}
        return {
            "prediction": prediction, "exponents": self.exponents, "doubts": list(self.doubts),
            "readings": self.readings, "verdict": self.verdict, "learnt_below": self.learnt_below,
            "architecture": self.plan.description, "task": self.plan.task_name, "seed": self.plan.recipe.seed,
            "recipe": asdict(self.plan.recipe),
        }  # fmt: skip

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> Self:
        """The forecast of these tables, without its network."""
        told = dict(details["prediction"])
        unfamiliar = tuple(told.pop("unfamiliar"))
        numbers: dict[str, Any] = {
            name: value if name in ("known", "entries") else float(value) for name, value in told.items()
        }
        prediction = Prediction(nearest=tables["forecast_nearest"], unfamiliar=unfamiliar, **numbers)
        renamed = {"batch_size" if name == "batch" else name: value for name, value in details["recipe"].items()}
        recipe = Recipe(**{**renamed, "frozen": tuple(renamed["frozen"]), "seed": details["seed"]})
        plan = DescribedPlan(details["architecture"], recipe, details["task"], tuple(details["verdict"]),
                             float(details["learnt_below"]))  # fmt: skip
        readings, exponents = (
            {name: float(x) for name, x in details[part].items()} for part in ("readings", "exponents")
        )
        notes, doubts = tuple(details["notes"]), tuple(details["doubts"])
        return cls(plan, tables["forecast"], readings, prediction, exponents, notes, doubts, manifest)


@dataclass(frozen=True)
class Mend:
    """One change of a network, and what is expected with it."""

    change: str  # What is changed, in words
    forecast: Forecast  # The forecast of the changed network, without its table of layers

    def __repr__(self) -> str:
        mended = self.forecast
        guess = ", as a guess" if mended.doubts else ""
        return f"{self.change}: probability {mended.probability:.2f}, place {place_of_100(mended.place)} of 100{guess}"


def forecast(
    subject: Any, *, design: Design | None = None, recipe: Recipe | None = None, module: ModuleInputs | None = None
) -> Forecast:
    """What will become of a network: where its tokens and gradients go, and whether it will train.

    Nothing is trained.

    Args:
        subject: An `Architecture`, whose weights are drawn; a `Transformer` with weights; a Hugging Face config, or a
            model of a family that `load` reads, at its own initialisation; or, with `module`, any torch module.
        design: What the network is to learn (the next character of a text if left out), and what is changed of it
            before: its depth, remedies, how its weights are drawn. Not of a module.
        recipe: The training that is asked about: steps, the largest learning rate, samples of a step, seed.
        module: Two batches and the loss of a module's own training. The module is then forecast as it is, without its
            architecture: what cannot be read of it is not known, and a note says how well trained designs are predicted
            without that. It is left as it was, bit for bit.

    Returns:
        The forecast; printing it says what is expected.

    Raises:
        ArchitectureError: The subject is no network that this can be asked of.
        LabError: A task that is not known, batches that the module cannot be called with, a design of a module.
        MonitorError: The loss gives no number with a gradient.
        WatchError: The module's blocks are not found.

    >>> from rankscope.nets import Architecture
    >>> short = Recipe(steps=100)
    >>> result = forecast(Architecture(layers=2, width=16, heads=2), design=Design(tokens=16), recipe=short)
    >>> 0 <= result.probability <= 1, result.table.height
    (True, 3)
    """
    given: tuple[tuple[str, Any, type], ...]
    given = ("design", design, Design), ("recipe", recipe, Recipe), ("module", module, ModuleInputs)
    for name, value, kind in given:
        fits = value is None or isinstance(value, kind)
        require(fits, f"{name} must be a {kind.__name__}; got a {type(value).__name__}", LabError, name)
    recipe = Recipe() if recipe is None else recipe
    if module is None:
        with usual_modes(), torch.enable_grad():
            return forecast_of(*planned(subject, Design() if design is None else design, recipe))
    sentence = "a design is of networks that are drawn; this module is forecast as it is: leave design out"
    require(design is None, sentence, LabError, "design")
    device = torch.get_default_device()
    with usual_modes(CPU if device.type == "meta" else device), torch.enable_grad():
        plan, point, table, notes = read_module(subject, module, recipe)
    return _predicted(plan, point, table, {}, [GIVEN, *notes])


@usual_modes()
@torch.enable_grad()
def forecast_of(plan: Plan, notes: Sequence[str] = (), *, layers: bool = True) -> Forecast:
    """The forecast of a plan.

    Args:
        plan: The network, what it learns and how.
        notes: Conditions that are known already.
        layers: Whether tokens and gradients are followed layer by layer; without, the table is empty.
    """
    model = plan.model()
    point = point_of(model, plan.task, plan.recipe)
    table, exponents, layer_notes = by_layer(model, plan) if layers else (filled_table({"layer": []}), {}, [])
    return _predicted(plan, point, table, exponents, [*notes, *layer_notes])


def _predicted(
    plan: Plan | DescribedPlan,
    point: dict[str, float],
    table: pl.DataFrame,
    exponents: dict[str, float],
    notes: Sequence[str],
) -> Forecast:
    """The forecast of these readings, with a note on those that are not known and the reasons why it is a guess."""
    prediction = Predictor.shipped().predict(point)
    unknown = [
        f"of {prediction.entries} readings {prediction.known} were known; with these alone "
        f"{prediction.share_right:.0%} of our trained designs are told right, each by the others (with none, by "
        f"saying the more frequent outcome, {prediction.share_frequent:.0%})"
    ] * (prediction.known < prediction.entries)
    doubts, usual = [], Recipe()
    outside = Predictor.shipped().outside(plan.settings)
    for name in ("warmup", "weight_decay", "max_norm", "frozen"):
        value, trained = getattr(plan.recipe, name), getattr(usual, name)
        outside += [f"{name} {value} (trained: {trained})"] if value != trained else []
    if outside:
        doubts.append(f"no trained design had {', '.join(outside)}")
    if plan.task_name not in LEARNT:
        doubts.append(f"trained designs were of {' and '.join(LEARNT)}; of {plan.task_name} none was trained")
    if isinstance(plan, DescribedPlan):
        doubts.append(
            f"trained designs were networks of the lab under {OPTIMISER}: its blocks and its optimiser may be others"
        )
    if prediction.unfamiliar:
        doubts.append(f"no trained design reads like it, by {', '.join(prediction.unfamiliar)}")
    described = plan.description
    network = Network(model=described) if isinstance(plan, DescribedPlan) else Network(architecture=described)
    manifest = begun("cpu").adding(networks=(network,), seed=plan.recipe.seed)
    notes = (*notes, *unknown, *doubts)
    return Forecast(plan, table, point, prediction, exponents, notes, tuple(doubts), manifest)
