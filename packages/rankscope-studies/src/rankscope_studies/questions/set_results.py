"""What the tables of the question `number-or-length` say of each network: accuracies by length and number, which of the
two goes with accuracy, and what context adds.

`SetEvidence` reads the tables that `gather` of `number_or_length.py` makes, which makes its answer of what is found
here.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rankscope_studies.questions.path_networks import PathSizes
from rankscope_studies.questions.path_sets import OWN, SHARED, SHARES, share_number
from rankscope_studies.questions.question import Tables
from rankscope_studies.questions.summaries import rank_correlation

READERS = {"head": "trained head", "refit": "refitted readout"}
BESIDE = "beside"  # A readout fitted to the sum of all paths of a length beside the token alone
EQUAL = 5  # The number at which lengths are compared, one of figure 4's two
NEAR_GUESS = 0.05  # How far above the best constant guess still is a guess; figure 4's own margin
TOLD = 2  # Lengths must be above a guess for shares of variance to be judged: the variance of guesses is noise
ORDERED = 3  # Lengths must be above a guess for their order to be judged: of two, either order passes `RELATED`
OVERFITS = 0.02  # A readout that loses this much accuracy when features are added is fitted to too few tokens
LEARNT = 0.1  # By how much the whole network must be more accurate than a token alone


@dataclass(frozen=True)
class SetSizes(PathSizes):
    """How large the experiment is."""

    sort_width: int
    sort_epochs: int
    hull_width: int
    hull_epochs: int
    text_steps: int
    text_width: int
    text_context: int
    numbers: tuple[int, ...]  # Of paths in a set, beside those of equal share and all
    repeats: int  # Sets of each length and number
    fit_tokens: int  # Tokens that readouts are fitted to, which the network has not learnt from
    test_tokens: int  # Other tokens, on which sets are evaluated


@dataclass(frozen=True)
class SetEvidence:
    """The tables of networks that have learnt, and what is read off them for each network."""

    tables: Tables
    sizes: SetSizes
    _read: dict[tuple[Any, ...], dict[int, float]] = field(default_factory=dict, repr=False, compare=False)
    """Curves that were read already: verdicts ask thousands of times."""

    @property
    def tasks(self) -> list[str]:
        """The tasks of which every network learnt to use context."""
        gains = self.tables["networks"].select("task", gain=pl.col("head") - pl.col("alone"))
        least = dict(gains.group_by("task").agg(pl.col("gain").min()).iter_rows())
        return [task for task in self.sizes.tasks if least.get(task, -math.inf) > LEARNT]

    def seeds(self, task: str) -> list[int]:
        """The seeds of a task's networks."""
        return sorted(self.tables["networks"].filter(task=task)["seed"].to_list())

    def share(self, task: str, kind: str, factor: str, measure: str = "grid", reader: str = "head") -> list[float]:
        """What a factor explains, for each network of a task."""
        rows = self.tables["explained"].filter(task=task, kind=kind, measure=measure, factor=factor, reader=reader)
        return rows.sort("seed")["value"].to_list()

    def by_length(self, task: str, seed: int, kind: str, choice: str, reader: str = "head") -> dict[int, float]:
        """Accuracy by length of sets of an equal number, 'number 10', of an equal share, 'share', or of 'all'."""
        key = task, seed, kind, choice, reader
        if key not in self._read:
            self._read[key] = self._by_length(*key)
        return self._read[key]

    def _by_length(self, task: str, seed: int, kind: str, choice: str, reader: str) -> dict[int, float]:
        rows = self.tables["curves"].filter(task=task, seed=seed, kind=kind).sort("length")
        accuracies = {}
        for length, rows_of_length in rows.group_by("length", maintain_order=True):
            total = round(rows_of_length["number"][0] / rows_of_length["share"][0])
            count = {"all": total, "share": share_number(SHARES[0], total)}.get(choice)
            count = int(choice.removeprefix("number ")) if count is None else count
            rows_of_count = rows_of_length.filter(pl.col("number") == count)
            if len(rows_of_count):
                accuracies[int(length[0])] = float(rows_of_count[reader][0])
        return accuracies

    def guess(self, task: str, seed: int) -> float:
        """The largest accuracy that is still called a guess."""
        return float(self.tables["networks"].filter(task=task, seed=seed)["guess"][0]) + NEAR_GUESS

    def falls(self, task: str, kind: str, choice: str, reader: str = "head") -> list[float]:
        """For each network, the rank correlation of length, from 1 on, with accuracy at an equal number or share.

        Guesses count as ties; NaN where fewer than `ORDERED` lengths are above a guess.
        """
        ranks = []
        for seed, above in zip(self.seeds(task), self.lengths_above(task, kind, choice, reader), strict=True):
            least, curve = self.guess(task, seed), self.by_length(task, seed, kind, choice, reader)
            curve = {length: max(accuracy, least) for length, accuracy in curve.items() if length}
            ranks.append(rank_correlation([*curve], [*curve.values()]) if above >= ORDERED else math.nan)
        return ranks

    def lengths_above(self, task: str, kind: str, choice: str, reader: str = "head") -> list[int]:
        """For each network, how many lengths from 1 on are above a guess."""
        curves = {seed: self.by_length(task, seed, kind, choice, reader) for seed in self.seeds(task)}
        return [
            sum(accuracy > self.guess(task, seed) for length, accuracy in curve.items() if length)
            for seed, curve in curves.items()
        ]

    def rises(self, task: str, kind: str, reader: str = "head") -> list[float]:
        """For each network, the rank correlation of number with accuracy at equal length; the median over lengths at
        which some number is above a guess."""
        values = []
        for seed in self.seeds(task):
            least = self.guess(task, seed)
            rows = self.tables["curves"].filter(pl.col("length") >= 1).filter(task=task, seed=seed, kind=kind)
            ranks = [
                rank_correlation(rows_of_length["number"].to_list(), rows_of_length[reader].to_list())
                for _, rows_of_length in rows.group_by("length")
                if rows_of_length[reader].max() > least  # type: ignore[operator]
            ]
            known = [rank for rank in ranks if not math.isnan(rank)]
            values.append(statistics.median(known) if known else math.nan)
        return values

    def told(self, task: str, kind: str, reader: str = "head") -> list[bool]:
        """For each network, whether a reader does more than guess: at 5 paths, two lengths or more are above a guess.
        The variance of guesses says nothing of what decides accuracy."""
        return [above >= TOLD for above in self.lengths_above(task, kind, f"number {EQUAL}", reader)]

    def overfits(self, task: str) -> dict[int, float]:
        """By length, the median over networks of what the token's readout loses when all paths of that length, with
        their own or shared attention, stand beside the token; of lengths where `OVERFITS` or more is lost.

        A readout that could use more tokens would lose nothing: at worst it leaves the added features alone.
        """
        losses: dict[int, float] = {}
        tokens = [self.by_length(task, seed, SHARED, "all", "refit").get(0, math.nan) for seed in self.seeds(task)]
        for kind in (OWN, SHARED):
            curves = [self.by_length(task, seed, kind, "all", BESIDE) for seed in self.seeds(task)]
            for length in set.intersection(*map(set, curves)) if curves else ():
                loss = statistics.median(token - curve[length] for token, curve in zip(tokens, curves, strict=True))
                if loss >= OVERFITS:
                    losses[length] = max(loss, losses.get(length, loss))
        return dict(sorted(losses.items()))

    def fresh(self, task: str, reader: str = BESIDE) -> dict[int, list[float]]:
        """Accuracies of readouts of all paths of each length of networks before training, with shared attention."""
        rows = self.tables["fresh"].filter(task=task).sort("length", "seed")
        return {length: rows.filter(length=length)[reader].to_list() for length in sorted({*rows["length"].to_list()})}

    def fresh_recovered(self, task: str) -> list[float]:
        """What `recovered` is beside the token, of networks before training: of what context adds to the accuracy of
        the trained network of the same seed."""
        rows = self.tables["fresh"].filter(pl.col("length") >= self.sizes.long, task=task)
        means = rows.group_by("seed").agg(pl.col(BESIDE).mean())
        joined = means.join(self.tables["networks"].filter(task=task), on="seed").sort("seed")
        return (
            joined.select((pl.col(BESIDE) - pl.col("alone")) / (pl.col("head") - pl.col("alone"))).to_series().to_list()
        )

    def leader(self, task: str, reader: str) -> str | None:
        """The factor that explains more with shared attention in every network, 'neither' where networks differ; None
        where some network's reader guesses, or the grid is not whole."""
        pair = [self.share(task, SHARED, factor, reader=reader) for factor in ("length", "number")]
        if not all(pair) or not all(self.told(task, SHARED, reader)):
            return None
        ahead = {length > count for length, count in zip(*pair, strict=True)}
        return "neither" if len(ahead) != 1 else "length" if ahead.pop() else "number"

    def numbers(self, task: str) -> list[int]:
        """The numbers of paths on a task's grid: those below all paths of length 1 that sets are drawn of."""
        curves = self.tables["curves"].filter(task=task, kind=SHARED, length=1)
        drawn = curves.filter(pl.col("share") < 1)["number"].unique().to_list()
        return sorted(count for count in self.sizes.numbers if count in drawn)

    def accuracy(self, task: str, length: int, choice: str, reader: str = "head") -> list[float]:
        """The accuracy of sets with shared attention, for each network that has such sets."""
        curves = [self.by_length(task, seed, SHARED, choice, reader) for seed in self.seeds(task)]
        return [curve[length] for curve in curves if length in curve]

    def recovered(self, task: str, kind: str, reader: str) -> list[float]:
        """For each network, of what context adds to accuracy, the share that all paths of one long length have: the
        mean over long lengths."""
        values = []
        for seed in self.seeds(task):
            full, alone = self.tables["networks"].filter(task=task, seed=seed).select("head", "alone").row(0)
            accuracies = self.by_length(task, seed, kind, "all", reader)
            long = [(p - alone) / (full - alone) for k, p in accuracies.items() if k >= self.sizes.long]
            values.append(statistics.mean(long) if long else math.nan)
        return values
