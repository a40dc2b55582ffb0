"""How much noise networks with and without skips tolerate on digits, at their own rates and at equal ones."""

import csv
import math
import statistics

import pytest
import torch

from study_tests.rederived import noise_at_equal_rates as own
from study_tests.rederived.kept_data import near, rows, spread

NETWORKS = rows("what-skips-pay", "networks").filter(share=1.0, part="network", task="digits")
SIZES = (1, 2, 4, 8, 16)
Pair = tuple[int, float, int]  # Multiple, rate, seed


def kept(skip: float, multiple: int, quantity: str = "tolerance embedding", series: str = "size") -> dict[int, float]:
    table = NETWORKS.filter(series=series, skip=skip, multiple=multiple, quantity=quantity)
    return dict(zip(table["seed"], table["value"], strict=True))


def halfway(accuracies: list[float]) -> float:
    """The noise at which half of what accuracy is above a guess is lost; NaN of a network that did not learn."""
    target = (accuracies[0] + 0.1) / 2
    below = [k for k, accuracy in enumerate(accuracies) if accuracy <= target]
    if accuracies[0] < 0.5 or not below or below[0] < 2:
        return math.nan
    k = below[0]
    share = (accuracies[k - 1] - target) / (accuracies[k - 1] - accuracies[k])
    return own.NOISE[k - 1] ** (1 - share) * own.NOISE[k] ** share


def trained_again() -> dict[tuple[float, Pair], float]:
    """The noise that each network of `noise_at_equal_rates.csv` tolerates."""
    with own.CSV.open() as file:
        return {
            (float(row["skip"]), (int(row["multiple"]), float(row["rate"]), int(row["seed"]))): halfway(
                [float(row[f"noise_{size:g}"]) for size in own.NOISE]
            )
            for row in csv.DictReader(file)
        }


def ratios() -> dict[Pair, float]:
    """With skips over without, of pairs of one size, rate and seed that both learnt."""
    found = trained_again()
    pairs = {pair: number / found[0.0, pair] for (skip, pair), number in found.items() if skip == 1.0}
    return {pair: ratio for pair, ratio in pairs.items() if not math.isnan(ratio)}


def test_the_ratios_of_the_page_come_out_of_its_rows_but_each_side_has_a_rate_of_its_own() -> None:
    medians = []
    for multiple in SIZES:
        with_skips, without = kept(1.0, multiple), kept(0.0, multiple)
        medians.append(statistics.median(with_skips[seed] / without[seed] for seed in with_skips))
    assert near([min(medians), max(medians)], [1.82, 2.55], 0.01)
    rates = {skip: {*NETWORKS.filter(series="size", skip=skip)["rate"]} for skip in (0.0, 1.0)}
    assert rates == {0.0: {0.001, 0.0003}, 1.0: {0.003}}


def test_at_equal_rates_skips_tolerate_less_than_the_page_said() -> None:
    found = ratios()
    assert (
        len(found) == 71
    )  # of 100 pairs: without skips nothing learns at 0.01, and hardly at 0.003 where MLPs are large
    assert near([min(found.values()), max(found.values())], [1.08, 1.80], 0.01)
    medians = {
        (multiple, rate): statistics.median(of_pair)
        for multiple in SIZES for rate in own.RATES
        if len(of_pair := [found[multiple, rate, seed] for seed in own.SEEDS if (multiple, rate, seed) in found]) == 5
    }  # fmt: skip
    assert len(medians) == 14 and near([min(medians.values()), max(medians.values())], [1.13, 1.57], 0.01)
    assert near([statistics.median(found.values())], [1.29], 0.01)


def test_the_rate_alone_moves_a_network_as_much_as_skips_do() -> None:
    found = trained_again()
    moved = {
        skip: [
            statistics.median(found[skip, (multiple, 0.003, seed)] / found[skip, (multiple, 0.0003, seed)]
                              for seed in own.SEEDS)
            for multiple in SIZES
        ]
        for skip in (0.0, 1.0)
    }  # fmt: skip
    assert near([min(moved[1.0]), max(moved[1.0])], [1.99, 2.54], 0.01)
    assert all(ratio > 1.9 for ratio in moved[0.0] if not math.isnan(ratio))


def test_a_large_mlp_tolerates_more_at_equal_width_and_less_at_equal_parameters() -> None:
    for series, said in (("size", (1.16, 1.09, 1.20)), ("parameters", (0.72, 0.66, 0.75))):
        large, small = kept(1.0, 16, series=series), kept(1.0, 1, series=series)
        assert near(spread(large[seed] / small[seed] for seed in small), said, 0.01)
    widths = NETWORKS.filter(series="parameters", skip=1.0, quantity="parameters")
    assert sorted({*widths["width"]}) == [36, 92]  # equal parameters are narrower networks: two things change


@pytest.mark.slow
def test_a_small_training_of_the_script_learns_and_tells_networks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 30, "RATES": (3e-3,), "SEEDS": range(1), "LAYERS": 2}.items():
        monkeypatch.setattr(own, name, value)
    networks, (tokens, labels) = own.Networks(1, "cpu"), own.images()
    networks.train(tokens, labels)
    accuracies = networks.accuracies(tokens, labels)
    assert torch.tensor(accuracies).shape == (2, len(own.NOISE)) and accuracies[1][0] > 0.5
