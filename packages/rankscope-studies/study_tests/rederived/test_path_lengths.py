"""Whether long paths learn, what decides how accurate a set of paths is, and what path dropout is good for."""

import math
import statistics

import numpy as np
import polars as pl
import pytest

from study_tests.rederived.kept_data import near, rows, spread

PATHS = rows("long-paths", "paths")
CURVES = rows("number-or-length", "curves")
USES = rows("using-paths", "uses")


def arm(task: str, kind: str, length: int | None, quantity: str = "accuracy", at: int | None = None,
        condition: str = "plain") -> list[float]:  # fmt: skip
    table = PATHS.filter(task=task, kind=kind, condition=condition, quantity=quantity)
    table = table.filter(pl.col("length").eq_missing(length), pl.col("at").eq_missing(at))
    return [float(value) for value in table.sort("seed")["value"]]


def recovered(task: str, accuracies: list[float], alone: list[float]) -> list[float]:
    """The share of what attention adds, seed by seed."""
    whole = arm(task, "all", None)
    return [(a - b) / (c - b) for a, b, c in zip(accuracies, alone, whole, strict=True)]


@pytest.mark.parametrize(
    ("task", "trained_on", "longest", "three"),
    [("sort", (1.00, 0.94, 1.01), 0.11, 0.50), ("hull", (0.99, 0.99, 1.00), 0.93, 0.97),
     ("text", (0.82, 0.81, 0.86), -0.25, 0.52)],
)  # fmt: skip
def test_networks_trained_on_the_longest_paths_alone_learn_and_new_heads_read_little_of_whole_ones(
    task: str, trained_on: tuple[float, float, float], longest: float, three: float
) -> None:
    alone = arm(task, "exact", 0)
    assert near(spread(recovered(task, arm(task, "exact", 6), alone)), trained_on, 0.01) and len(alone) == 5
    token = arm(task, "all", None, "new head", 0)
    for length, said in ((6, longest), (3, three)):
        found = recovered(task, arm(task, "all", None, "new head", length), token)
        assert abs(statistics.median(found) - said) < 0.011


def test_on_text_the_longest_paths_are_worse_than_the_token_itself_to_a_new_head() -> None:
    """A readout that overfits gives less than nothing: -25% is a failure of reading as much as of what is there."""
    found = recovered("text", arm("text", "all", None, "new head", 6), arm("text", "all", None, "new head", 0))
    assert max(found) < -0.1


@pytest.mark.parametrize(("length", "said"), [(1, 0.75), (2, 0.18), (3, 0.10), (6, 0.10)])
def test_five_paths_read_by_the_trained_head_of_sorting(length: int, said: float) -> None:
    table = CURVES.filter(task="sort", kind="shared", number=5, length=length)
    assert table.height == 5 and abs(statistics.median(table["head"]) - said) < 0.02


def between(task: str, reader: str, least: float = 0.0) -> list[tuple[float, float]]:
    """(number's, length's) shares of the variance of logit accuracies between sets, by network: of means of draws."""
    found = []
    for seed in sorted({*CURVES["seed"]}):
        table = CURVES.filter(task=task, kind="shared", seed=seed).filter(pl.col("length") > 0)
        lengths = sorted({*table["length"]})
        numbers = [n for n in sorted({*table["number"]}) if table.filter(number=n).height == len(lengths)]
        cells = np.array([
            [float(table.filter(number=n, length=k)[reader][0]) for k in lengths] for n in numbers
        ]).clip(1e-3, 1 - 1e-3)  # fmt: skip
        logit = np.log(cells / (1 - cells))
        logit -= logit.mean()
        total = float(np.square(logit).mean())
        found.append((float(np.square(logit.mean(1)).mean()) / total, float(np.square(logit.mean(0)).mean()) / total))
    return found


def test_length_decides_for_the_trained_head_of_sorting_and_number_for_a_new_one_on_the_hull() -> None:
    assert min(length / number for number, length in between("sort", "head")) > 2
    hull = between("hull", "refit")
    assert min(number / length for number, length in hull) > 1.5
    assert abs(statistics.median(number for number, _ in hull) - 0.61) < 0.1  # the page's has draws beside them


def test_the_order_of_lengths_rests_on_two_that_are_above_a_guess() -> None:
    """With two lengths above a guess either order has a large rank correlation: why the page judges none."""
    guess = rows("number-or-length", "networks").filter(task="sort")["guess"].max()
    table = CURVES.filter(task="sort", kind="shared", number=5).filter(pl.col("length") > 0)
    above = [
        sum(float(value) > float(guess) + 0.05 for value in table.filter(seed=seed)["head"])  # type: ignore[arg-type]
        for seed in sorted({*table["seed"]})
    ]
    assert above == [2] * 5


def use(task: str, kind: str, strength: float, quantity: str, at: int | None = None) -> list[float]:
    """A measure by seed: means over draws, lengths or layers where it has several."""
    table = USES.filter(task=task, kind=kind, strength=strength, quantity=quantity)
    table = table if at is None else table.filter(at=at)
    return [float(v) for v in table.group_by("seed").agg(pl.col("value").mean()).sort("seed")["value"]]


def test_path_dropout_keeps_single_lengths_accurate() -> None:
    assert near(spread(use("sort", "path dropout", 0.4, "one length")), (0.82, 0.81, 0.85), 0.01)
    assert near([statistics.median(use("sort", "plain", 0.0, "one length"))], [0.25], 0.01)
    assert near([statistics.median(use("sort", "dropout", 0.4, "one length"))], [0.34], 0.01)
    assert near([statistics.median(use("sort", "path dropout", 0.4, "length out", 1))], [0.98], 0.01)
    assert near(spread(use("sort", "plain", 0.0, "length out", 1)), (0.39, 0.33, 0.56), 0.01)


def test_what_it_does_not_protect_is_shown_of_layers_heads_and_noise_and_cannot_be_of_accuracy_on_sorting() -> None:
    for task in ("sort", "text"):
        for lost in ("layers", "heads", "noise"):
            with_it, best = use(task, "path dropout", 0.4, lost), use(task, "dropout", 0.1, lost)
            assert max(a - b for a, b in zip(with_it, best, strict=True)) < 0
    highest = max(statistics.median(use("sort", "dropout", strength, "accuracy")) for strength in (0.02, 0.1, 0.4))
    assert highest > 0.98  # at the ceiling: no gain could show
    costs = [a - b for a, b in zip(use("text", "plain", 0.0, "accuracy"), use("text", "path dropout", 0.4, "accuracy"),
                                   strict=True)]  # fmt: skip
    assert near(spread(costs), (0.037, 0.030, 0.040), 0.001)


def test_a_paired_t_of_one_gain_passes_the_level_divided_by_all_comparisons() -> None:
    gains = [a - b for a, b in zip(use("sort", "path dropout", 0.4, "one length"),
                                   use("sort", "dropout", 0.4, "one length"), strict=True)]  # fmt: skip
    t = statistics.mean(gains) / (statistics.stdev(gains) / math.sqrt(len(gains)))
    assert t > 8.5  # 0.05 / 96, one-sided, four degrees of freedom
