"""Which networks are said to learn."""

import math

import polars as pl
import pytest

from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import DepthReached


def test_networks_learn_that_are_better_than_frequencies_with_every_seed_at_every_lesser_depth() -> None:
    assert results.blind("images") == pytest.approx(math.log(10), abs=0.01)  # digits are as frequent
    assert 2.8 < results.blind("pre") < 3.2  # the entropy of English letters, spaces and signs, in nats
    good, bad = results.blind("pre") - 0.6, results.blind("pre") - 0.4

    def learns(losses: dict[int, tuple[float, ...]], other: int | None = None) -> DepthReached | None:
        rows: list[dict[str, object]] = [
            {"remedy": "gate", "setting": "pre", "quantity": "loss", "depth": depth, "seed": seed,
             "value": loss}
            for depth, by_seed in losses.items()
            for seed, loss in enumerate(by_seed)
        ]  # fmt: skip
        more: dict[str, object] = {
            "remedy": "none",
            "setting": "pre",
            "quantity": "loss",
            "depth": other,
            "seed": 0,
            "value": good,
        }
        rows += [] if other is None else [more]
        return results.learns(results.completed(pl.DataFrame(rows)), "gate", "pre")

    assert learns({6: (good, good), 12: (good, good)}) == DepthReached(12, True)
    assert learns({6: (good, good), 12: (good, bad), 24: (good, good)}) == DepthReached(6, False)
    assert learns({6: (bad, bad)}) == DepthReached(0, False)
    assert results.learns(results.completed(None), "gate", "pre") is None
    assert learns({6: (), 12: (good, good)}, other=6) is None
    assert learns({6: (good, good), 12: ()}, other=12) == DepthReached(6, True)
