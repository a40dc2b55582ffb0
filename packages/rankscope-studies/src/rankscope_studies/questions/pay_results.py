"""What the tables of the question `does-it-pay` say of each network: who learns, who beats whom, and whether residual
and loss go together.

`PayResults` reads the rows of `pay_trainings.py`; `does_it_pay.py` makes its answer of what is found here.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations
from typing import Any

import numpy as np
from scipy.stats import rankdata

from rankscope.errors import StudyError
from rankscope_studies.questions.pay_trainings import LONGER, REPORTED, SETTINGS, PayCell, PaySizes, best_tuned
from rankscope_studies.questions.question import Tables
from rankscope_studies.questions.summaries import rank_correlation
from rankscope_studies.trial import NONE

LEARNS = 0.1  # Nats below a guess by frequency, and more than seeds differ: from there on a network learns
MATTERS = 0.01  # Nats: a smaller gain is none, though seeds should agree on it
RELATED, CHANCE = 0.7, 0.05  # Rank correlation, and its p, from which on residual and loss are said to go together
DRAWS = 1000  # Of seeds, for the interval of a rank correlation
LEAST_ORDERED = 5  # Networks: of fewer, even a perfect order comes by chance with a p above `CHANCE`
MOST_EXACT = 8  # Conditions whose orders are all enumerated


@dataclass(frozen=True)
class CellResult:
    """What came of the networks of a cell at their rate, seed by seed; nothing where they were not trained."""

    losses: tuple[float, ...] = ()  # Infinite where a training diverged
    residuals: tuple[float | None, ...] = ()  # log10, after training
    rate: float = math.nan
    steps: int = 0

    @property
    def loss(self) -> float:
        """The median of the held-out losses of all seeds."""
        return statistics.median(self.losses)

    @property
    def range(self) -> float:
        """The largest difference between losses of seeds that did not diverge; 0 if there are none."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return max(finite) - min(finite) if finite else 0.0

    @property
    def residual(self) -> float:
        """log10 of the residual after training, the median over seeds that have one; NaN where none has."""
        known = [value for value in self.residuals if value is not None]
        return statistics.median(known) if known else math.nan

    def learns(self, blind: float) -> bool:
        """True if the worst seed beats a guess, of loss `blind`, by `LEARNS` nats and by more than seeds differ."""
        return len(self.losses) > 1 and blind - max(self.losses) > max(self.range, LEARNS)

    def learns_nothing(self, blind: float) -> bool:
        """True if not even the best seed beats a guess, of loss `blind`, by more than `LEARNS` nats. Networks of which
        some seeds learn neither learn nor learn nothing."""
        return bool(self.losses) and blind - min(self.losses) <= LEARNS

    def beats(self, rival: "CellResult", blind: float) -> bool:
        """True if these networks learn, their worst seed is better than the rival's best, and their median is lower by
        `MATTERS` nats and by more than the seeds of either differ."""
        if not (self.learns(blind) and rival.losses and max(self.losses) < min(rival.losses)):
            return False
        return rival.loss - self.loss > max(self.range, rival.range, MATTERS)


@dataclass(frozen=True)
class PayResults:
    """The tables of a run, by setting, width, remedy and arm."""

    tables: Tables
    sizes: PaySizes

    @property
    def blind(self) -> float:
        """The held-out loss of a guess by frequency."""
        return float(self.tables["costs"]["blind"][0])

    def cell(self, setting: str, width: int, remedy: str, arm: str = REPORTED) -> CellResult:
        """What came of the networks of a cell; without losses where the tables do not have them."""
        return self._cells.get((setting, width, remedy, arm), CellResult())

    @cached_property
    def _cells(self) -> dict[tuple[Any, ...], CellResult]:
        """What came of every cell of the tables; verdicts ask thousands of times."""
        cells = self.tables["runs"].sort("seed").group_by("setting", "width", "remedy", "arm", maintain_order=True)
        return {
            cell: CellResult(
                tuple(rows["loss"]), tuple(rows["residual"]), float(rows["rate"][0]), int(rows["steps"][0])
            )
            for cell, rows in cells
        }

    def widths(self, arm: str) -> tuple[int, ...]:
        """Widths at which an arm was trained."""
        return self.sizes.widths[:1] if arm == LONGER else self.sizes.widths

    def complete(self, setting: str, arm: str = REPORTED) -> bool:
        """True if every network of a setting was trained."""
        conditions = self.sizes.conditions(setting)
        return all(self.cell(setting, width, remedy, arm).losses for width in self.widths(arm) for remedy in conditions)

    def any_learns(self, settings: Sequence[str] = SETTINGS) -> bool:
        """True if some reported network of these settings learns."""
        return any(self.cell(*cell).learns(self.blind) for cell in self.sizes.cells if cell.setting in settings)

    def winners(self, setting: str, width: int, arm: str = REPORTED, against: str = "") -> list[str]:
        """Remedies that beat the tuned baseline of a setting, of the same arm or another one."""
        baseline = self.cell(setting, width, NONE, against or arm)
        return [
            remedy for remedy in self.sizes.remedies
            if self.cell(setting, width, remedy, arm).beats(baseline, self.blind)
        ]  # fmt: skip

    def winners_everywhere(self, setting: str, arm: str = REPORTED, against: str = "") -> list[str]:
        """Remedies that beat the tuned baseline of a setting at every width of an arm."""
        by_width = [self.winners(setting, width, arm, against) for width in self.widths(arm)]
        return [remedy for remedy in self.sizes.remedies if all(remedy in winners for winners in by_width)]

    def gains(self, setting: str, width: int, remedy: str, arm: str = REPORTED) -> list[float]:
        """Nats that a remedy gains over the baseline, seed by seed; none where one of the two was not trained."""
        pairs = zip(*(self.cell(setting, width, name, arm).losses for name in (NONE, remedy)), strict=False)
        return [baseline - loss for baseline, loss in pairs if math.isfinite(baseline) and math.isfinite(loss)]

    def gains_by_seed(self, setting: str, remedy: str) -> bool:
        """True if a remedy gains more than `MATTERS` nats with every seed at every width, whether or not seeds differ
        by more than that."""
        gains = [gain for width in self.sizes.widths for gain in self.gains(setting, width, remedy)]
        return len(gains) == self.sizes.seeds * len(self.sizes.widths) and min(gains) > MATTERS

    def best(self, setting: str) -> str:
        """The remedy of the lowest loss on tuning seeds, the mean over widths: what reported seeds then show of it is
        not better for having been chosen."""

        def loss(remedy: str) -> float:
            cells = [PayCell(setting, width, remedy) for width in self.sizes.widths]
            return sum(best_tuned(self.tables["tuning"], cell)[1] for cell in cells)

        return min(self.sizes.conditions(setting)[1:], key=loss)

    def less_collapsed(self, setting: str, remedy: str) -> bool:
        """True if a remedy's median residual after training exceeds the baseline's at every width."""
        return all(
            self.cell(setting, width, remedy).residual > self.cell(setting, width, NONE).residual
            for width in self.sizes.widths
        )

    def relation(self, setting: str, width: int, when: str, arm: str = REPORTED, learning: bool = False) -> "Relation":
        """How a number of networks and their loss go together across the baseline and remedies of a setting.

        Args:
            setting: The setting of the networks.
            width: Their width.
            when: `trained` for the residual after training, `fresh` for that before, `gradient` for the first layer's
                gradient before training.
            arm: Which training.
            learning: Without networks that learn nothing: two groups of networks, those that collapse and learn nothing
                and those that do neither, make a correlation by themselves.

        Returns:
            `UNTOLD` where nothing learns, or too few networks have both numbers for any order to be improbable; `TIED`
            where too few of their losses differ.
        """
        pairs, learnt = [], False
        for remedy in self.sizes.conditions(setting):
            result = self.cell(setting, width, remedy, arm)
            if not result.losses or (learning and result.learns_nothing(self.blind)):
                continue
            learnt |= result.learns(self.blind)
            fresh = PayCell(setting, width, remedy).rows(self.tables["fresh"]).sort("seed")
            before = fresh["gradient" if when == "gradient" else "residual"]
            values = result.residuals if when == "trained" else tuple(before)
            both = [(value, loss) for value, loss in zip(values, result.losses, strict=True) if value is not None]
            pairs += [both] if both else []
        return relation(pairs) if learnt and len(pairs) >= LEAST_ORDERED else UNTOLD


@dataclass(frozen=True)
class Relation:
    """A rank correlation of residual and loss, of medians over seeds; NaN where it cannot be told."""

    rank: float = math.nan
    p: float = math.nan  # The share of all orders of the networks that have as large a rank correlation, of either sign
    low: float = math.nan
    high: float = math.nan  # 90% of the draws of seeds lie between
    missing: str = "not told"  # In place of numbers, where there are none

    @property
    def pays(self) -> bool | None:
        """True if a larger residual goes with a lower loss. None if there is no correlation, or it is large enough but
        its p-value is not small."""
        if math.isnan(self.rank):
            return None
        return False if self.rank > -RELATED else True if self.p <= CHANCE else None

    @property
    def text(self) -> str:
        """The correlation, its interval and its p."""
        if math.isnan(self.rank):
            return self.missing
        return f"{self.rank:.2f} [{self.low:.2f}, {self.high:.2f}], p = {self.p:.2g}"


UNTOLD = Relation()
TIED = Relation(missing="not told, too few different losses")


@cache
def _orders(count: int) -> np.ndarray:
    """All orders of so many networks, `[order, place]`."""
    return np.array([*permutations(range(count))])


def relation(pairs: Sequence[Sequence[tuple[float, float]]]) -> Relation:
    """The relation of residual and loss across networks; `UNTOLD` where residuals do not vary. Losses are rounded to
    `MATTERS`, since what differs by less is equal. Where all are equal, the correlation is 0: whatever residuals do,
    losses do not follow. Where some are, the relation is `TIED` if even the best order would come by chance with a p
    above `CHANCE`, as where one network learns and all others learn nothing.

    Args:
        pairs: For each network, residual and loss of every seed.

    Raises:
        StudyError: There are more networks than all orders of which can be enumerated.

    >>> falling = relation([[(float(k), -float(k))] for k in range(5)])
    >>> falling.rank, round(falling.p * 120)
    (-1.0, 2)
    >>> relation([[(float(k), 1.0 if k == 4 else 3.0)] for k in range(5)]).text
    'not told, too few different losses'
    """
    if len(pairs) > MOST_EXACT:
        raise StudyError(f"networks must be at most {MOST_EXACT}; got {len(pairs)}", subject="remedies")
    medians = _rounded(np.array([np.median(np.array(seeds, dtype=float), axis=0) for seeds in pairs]))
    if len({*medians[:, 0].tolist()}) < 2:
        return UNTOLD
    rank = rank_correlation(medians[:, 0].tolist(), medians[:, 1].tolist())
    rank = 0.0 if math.isnan(rank) else rank
    orders = _orders(len(pairs))
    a, b = (rankdata(medians[:, k]) for k in (0, 1))
    chance = _pearson(np.broadcast_to(a, orders.shape), b[orders])
    strongest = np.abs(chance).max()
    if strongest > 0 and (np.abs(chance) >= strongest - 1e-9).mean() > CHANCE:
        return TIED
    p = float((np.abs(chance) >= abs(rank) - 1e-9).mean())
    generator = np.random.default_rng(0)
    drawn = _rounded(np.stack([
        np.median(np.array(seeds, dtype=float)[generator.integers(len(seeds), size=(DRAWS, len(seeds)))], axis=1)
        for seeds in pairs
    ], axis=1))  # fmt: skip
    ranks = _pearson(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.quantile(ranks, [0.05, 0.95])
    return Relation(rank, p, float(low), float(high))


def _rounded(pairs: Any) -> Any:
    """Residuals as they are, and losses in whole multiples of `MATTERS`."""
    return np.stack([pairs[..., 0], np.round(pairs[..., 1] / MATTERS)], axis=-1)


def _pearson(a: Any, b: Any) -> Any:
    """Pearson's correlation of rows; 0 where one does not vary."""
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    sizes = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return (a * b).sum(1) / np.where(sizes > 0, sizes, 1.0)
