"""What the tables of the question `what-skips-pay` say: numbers of networks by kind and seed, of trained models by
layer, and how much noise networks with skips tolerate beside others.

`PriceResults` reads the rows of `skip_networks.py`; `what_skips_pay.py` makes its answer of what is found here.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from rankscope_studies.questions.question import Tables
from rankscope_studies.questions.skip_networks import USUAL, NetworkKind, PriceSizes, equal_width

MODELS = ("minilm", "rxnfp", "rxnmapper", "antiberty")
TASKS = {"digits": "digits", "text": "next characters"}
PRICE = 1.5  # By how much less noise must be tolerated to be called a price
LEARNT = 0.1  # By how much a network must be more accurate than guessing
SKIPS = {1.0: "skips", 0.5: "skips of weight 0.5", 0.0: "no skips"}
SIDES = {"embedding": "at the embedding", "inputs": "on pixels"}  # Places of random noise


@dataclass(frozen=True)
class PriceResults:
    """The tables of a run: numbers of networks of our own by seed, of trained models by layer."""

    tables: Tables
    sizes: PriceSizes

    def kind(self, skip: float, multiple: int = USUAL, series: str = "size") -> NetworkKind:
        """A kind of network by what tells it from the usual one."""
        width = equal_width(multiple, self.sizes) if series == "parameters" else self.sizes.width
        return NetworkKind(series, skip, multiple, 1.0, width)

    def of(self, task: str, kind: NetworkKind, quantity: str, part: str = "network", share: float = 1.0) -> list[float]:
        """A number of networks of one kind, by seed."""
        rows = self.tables["networks"].filter(task=task, part=part, quantity=quantity, share=share, **kind._asdict())
        return rows.sort("seed")["value"].to_list()

    def against(self, task: str, kind: NetworkKind, rival: NetworkKind, quantity: str) -> list[float]:
        """By seed, a number of one kind over that of another; of logs, less that of another."""
        pairs = zip(self.of(task, kind, quantity), self.of(task, rival, quantity), strict=True)
        ratios = quantity.startswith(("tolerance", "accuracy"))
        return [value / base if ratios else value - base for value, base in pairs]

    def learnt(self, task: str, *chosen: NetworkKind) -> bool:
        """True if every network of these kinds is more accurate than guessing."""
        pairs = [
            (accuracy, chance) for kind in chosen
            for accuracy, chance in zip(self.of(task, kind, "accuracy"), self.of(task, kind, "chance"), strict=True)
        ]  # fmt: skip
        return bool(pairs) and all(accuracy > chance + LEARNT for accuracy, chance in pairs)

    def rates(self, task: str, kind: NetworkKind) -> list[float]:
        """The learning rate of networks of one kind; empty where none was trained."""
        return self.tables["networks"].filter(task=task, **kind._asdict())["rate"].unique().to_list()

    @property
    def models(self) -> list[str]:
        """The trained models that were at hand."""
        return [name for name in MODELS if name in {*self.tables["models"]["model"]}]

    def by_layer(self, model: str, part: str, quantity: str) -> list[float]:
        """A number of a trained model for each layer, the mean over samples."""
        rows = self.tables["models"].filter(model=model, part=part, quantity=quantity)
        return rows.group_by("layer").agg(pl.col("value").mean()).sort("layer")["value"].to_list()

    def middle(self, model: str, part: str) -> float:
        """The factor of a part of a trained model on differences over the common part, the median over layers; NaN
        where that was not measured, or no norm stands on a sum."""
        return statistics.median([10**log for log in self.by_layer(model, part, "stream")] or [math.nan])

    def looseness(self, model: str) -> float:
        """log10 of the bound of MLPs over what they do to differences, the median over layers."""
        pairs = zip(self.by_layer(model, "mlp", "bound"), self.by_layer(model, "mlp", "differences"), strict=True)
        return statistics.median(bound - measured for bound, measured in pairs)


def known_numbers(values: Sequence[float]) -> list[float]:
    """Numbers that could be measured: not NaN."""
    return [value for value in values if not math.isnan(value)]


@dataclass(frozen=True)
class SkipPrice:
    """What networks with skips tolerate on a task, over what others do: by place of noise and MLP size, by seed."""

    task: str
    rival: float  # The weight of the others' skips
    failed: list[str]  # Which of the usual size have not learnt, where there is nothing to compare
    ratios: dict[str, dict[int, list[float]]]
    unequal: bool = False  # Some pair had different learning rates, which move what is tolerated as well

    @property
    def word(self) -> str:
        """How much robustness skips cost, by every seed and size; empty where that cannot be told."""
        ratios = [ratio for by_size in self.ratios.values() for of_size in by_size.values() for ratio in of_size]
        if not ratios or any(map(math.isnan, ratios)):
            return ""
        if all(ratio >= 1 for ratio in ratios):
            return "no"
        if all(ratio <= 1 / PRICE for ratio in ratios):
            return "much"
        return "little" if min(ratios) > 1 / PRICE else "sometimes much"

    def ranges(self, places: Mapping[str, str]) -> list[str]:
        """The least and the largest median over MLP sizes for each place of noise, such as '1.82–2.55 at the
        embedding'."""
        texts = []
        for place, name in places.items():
            medians = [
                statistics.median(known) for by_seed in self.ratios[place].values() if (known := known_numbers(by_seed))
            ]
            ends_shown = list(dict.fromkeys(f"{end:.2f}" for end in (min(medians), max(medians)))) if medians else []
            texts += [f"{'–'.join(ends_shown)} {name}".strip()] if ends_shown else []
        return texts

    def in_short(self, later: bool) -> str:
        """What the answer says of the task.

        Args:
            later: Whether the answer has said of another task what is compared.
        """
        if not self.word:
            return f"{TASKS[self.task]}: {self.reason}"
        lead = f"{self.word}{'' if later else ' robustness'} on {self.task}"
        first, *on_other_places = self.ranges({"embedding": "", "inputs": SIDES["inputs"]})
        against = f" against {SKIPS[self.rival]}" if self.rival else "" if later else " times the embedding noise"
        by_size = " over MLP sizes" if not later and len(self.ratios["embedding"]) > 1 else ""
        by_size = ", at other rates" if not later and self.unequal else by_size
        return f"{lead} ({', '.join([first + against + by_size, *on_other_places])})"

    @property
    def reason(self) -> str:
        """Why nothing can be told."""
        return f"not learnt {' nor '.join(self.failed)} skips" if self.failed else "noise not measured"


def skip_price(results: PriceResults, task: str) -> SkipPrice:
    """What skips pay on a task at every MLP size of equal width: against no skips, or, where none without skips of
    these sizes has learnt, against skips of weight 0.5 if there are such networks."""
    pair = {"with": results.kind(1.0), "without": results.kind(0.0)}.items()
    failed = [name for name, kind in pair if not results.learnt(task, kind)]
    for rival in (0.0, 0.5):
        compared = [
            (m, results.kind(1.0, m), results.kind(rival, m)) for m in results.sizes.multiples
            if results.learnt(task, results.kind(1.0, m), results.kind(rival, m))
            and results.of(task, results.kind(rival, m), "accuracy")
        ]  # fmt: skip
        if compared:
            ratios = dict[str, dict[int, list[float]]]()
            for place in SIDES:
                numbers = {m: results.against(task, a, b, f"tolerance {place}") for m, a, b in compared}
                ratios[place] = {m: by_seed for m, by_seed in numbers.items() if by_seed}
            unequal = any(results.rates(task, a) != results.rates(task, b) for _, a, b in compared)
            return SkipPrice(task, rival, failed, ratios, unequal)
    return SkipPrice(task, 0.0, failed, {place: {} for place in SIDES})
