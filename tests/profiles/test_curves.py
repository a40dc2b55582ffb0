"""Profiles that differ in seeds or sizes, joined: their factors stay with them."""

from pathlib import Path
from typing import Any

import polars as pl
import torch

from rankscope.errors import MetricError
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, measure
from tests.raising import raises

ARCH = Architecture(layers=3, width=8, heads=2)
X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
RUNS = [
    measure(Transformer.random(ARCH, seed=seed).variant(layers=depth), X, variant="whole", metrics=["mu", "entropy"])
    for depth in (2, 3)
    for seed in (0, 1)
]
JOINED = Profile.join(RUNS, depth=[2, 2, 3, 3], seed=[0, 1, 0, 1])


def test_factors_are_columns_and_choose_a_curve() -> None:
    assert JOINED.factors == {"depth": [2, 3], "seed": [0, 1]}
    chosen = JOINED.table.filter(depth=3, seed=1).drop("depth", "seed")
    assert chosen.equals(RUNS[3].table)
    for run, (depth, seed) in zip(RUNS, [(2, 0), (2, 1), (3, 0), (3, 1)], strict=True):
        assert torch.equal(JOINED.curve("mu", depth=depth, seed=seed), run.curve("mu"))
    over_seeds = JOINED.table.filter(metric="mu").group_by("depth", "layer").agg(pl.col("seed").n_unique())
    assert over_seeds["seed"].to_list() == [2] * 7


def test_lines_are_named_by_what_differs() -> None:
    assert [view.label for view in JOINED.views("mu")] == [
        "depth 2, seed 0", "depth 2, seed 1", "depth 3, seed 0", "depth 3, seed 1"
    ]  # fmt: skip
    seeds = Profile.join(RUNS[:2], seed=[0, 1])
    (axes,) = seeds.plot("mu").axes
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()][:2] == ["seed 0", "seed 1"]
    assert "seed 1" in repr(seeds)
    same = Profile.join([RUNS[0], measure(Transformer.random(ARCH), X, variant="other")], width=[8, 8])
    assert [view.label for view in same.views("mu")] == ["whole", "other"]


def test_factors_are_kept_in_a_file_and_by_another_join(tmp_path: Path) -> None:
    again = Profile.read(JOINED.save(tmp_path / "joined.parquet"))
    assert again.factors == JOINED.factors and again.table.equals(JOINED.table)
    halves = [Profile.join(RUNS[:2], seed=[0, 1]), Profile.join(RUNS[2:], seed=[0, 1])]
    assert Profile.join(halves, depth=[2, 3]).table.equals(JOINED.table)


def test_what_cannot_be_joined_is_a_sentence() -> None:
    wrong: dict[str, list[Any]] = {"seed": [[0, 1, 2], "none", [0, 1, "two", 3]], "layer": [[0, 1, 2, 3]]}
    for name, values in wrong.items():
        for value in values:
            with raises(MetricError, subject=name):
                Profile.join(RUNS, **{name: value})
    with raises(MetricError, subject="profiles"):
        Profile.join(RUNS)
    with raises(MetricError, subject="factors"):
        Profile.join([RUNS[2], Profile.join(RUNS[:2], seed=[0, 1])])
    with raises(MetricError, subject="depth"):
        JOINED.curve("mu", seed=0)
    with raises(MetricError, subject="sed"):
        JOINED.curve("mu", depth=2, sed=0)
