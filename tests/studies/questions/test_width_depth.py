"""Width against depth: shapes, what is measured, and that the answer follows the tables."""

import math
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.studies.questions import width_depth as study
from rankscope.studies.questions.width_depth import FRESH, FULL, LENGTH, PLACE, QUESTION, QUICK, ROWS, ShapeSizes
from rankscope.studies.study import Setup

TINY = ShapeSizes((1, 2, 3), 2, 8, context=8, batch=2, steps=2, seeds=2, widths=(8, 16), pure_depth=5, pure_tokens=6,
                  pure_seeds=2)  # fmt: skip


@pytest.mark.parametrize("sizes", [QUICK, FULL])
def test_shapes_of_a_family_cost_the_same(sizes: ShapeSizes) -> None:
    found = study.shapes(sizes)
    assert len(found) >= 12
    for family in study.FAMILIES:
        mine = [(layers, width) for name, layers, width in found if name == family]
        n = sizes.context if family == "compute" else 0
        costs = [layers * (24 * width**2 + 4 * n * width) for layers, width in mine]
        middle = costs[sizes.depths.index(sizes.middle_depth)]
        assert all(0.75 < cost / middle < 1.3 for cost in costs)  # widths are whole heads
        assert dict(mine)[sizes.middle_depth] == sizes.middle_width


@pytest.mark.slow  # trains, forecasts, and draws
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    again, elsewhere = (
        QUESTION.run(Setup(tmp_path, say=said.append), TINY),
        QUESTION.gather(Setup(tmp_path / "b"), TINY),
    )
    assert len(said) == 2 * 3 + 2 * 2
    for name, table in first.tables.items():
        assert table.equals(again.tables[name]) and table.equals(elsewhere[name])
    assert {*first.tables["shapes"]["quantity"]} == {*study.QUANTITIES} and first.figures[QUESTION.name].axes
    assert first.tables["pure"]["log10"].is_finite().all()


def test_the_constant_of_a_layer_is_that_of_plain_float64() -> None:
    """Two layers of heads, where float64 still holds what tokens differ by."""
    sizes = ShapeSizes((1,), 1, 8, 8, 2, 2, 1, (16,), 2, 6, 1)
    X, padding = word_tokens(bundled_excerpts(6)[:1], 16, 6)
    net = Transformer.random(Architecture(layers=2, width=16, heads=study.HEADS), seed=3, init="xavier").variant("san")
    states = net.run(X, padding).states[1:]
    first, second = (float(torch.linalg.norm(state[0] - state[0].mean(0))) for state in states)
    assert study.pure_constant(16, 3, sizes)["log10"][0] == pytest.approx(math.log10(second / first**3), rel=1e-6)


def tables(loss: dict[int, float], slope: float = -0.5, rise: float = -0.1) -> dict[str, pl.DataFrame]:
    """Made-up tables: losses by depth, the slope of c, and what depth adds to log10 of the fresh residual."""
    rows = []
    for family in study.FAMILIES:
        for layers, value in loss.items():
            for seed in (0, 1):
                known = {"loss": value + 0.001 * seed, FRESH: rise * layers, LENGTH: layers**0.5, PLACE: value,
                         "parameters": 100.0}  # fmt: skip
                rows += [(family, layers, 64 // layers, seed, name, number) for name, number in known.items()]
    pure = [{"width": width, "seed": seed, "log10": slope * math.log10(width) + seed}
            for width in QUICK.widths for seed in (0, 1)]  # fmt: skip
    return {"shapes": pl.DataFrame(rows, schema=ROWS, orient="row"), "pure": pl.DataFrame(pure)}


def test_the_sentence_turns_with_the_numbers() -> None:
    inner = QUESTION.answer(tables({1: 2.0, 2: 1.5, 4: 1.8}), QUICK)
    deep = QUESTION.answer(tables({1: 2.0, 2: 1.8, 4: 1.5}, slope=0.3, rise=0.1), QUICK)
    assert "2 layers of width 32 learn best" in inner.sentence and "4 layers of width 16 learn best" in deep.sentence
    assert "width slows pure attention's collapse, as the bound says" in inner.sentence
    assert "width does not slow pure attention's collapse, not as the bound says" in deep.sentence
    assert [verdict.holds for verdict in inner.verdicts] == [True, True, True, True, True, True]
    assert [verdict.holds for verdict in deep.verdicts[:4]] == [False, False, False, False]


def test_the_forecast_is_judged_by_its_order() -> None:
    made = tables({1: 2.0, 2: 1.5, 4: 1.8})
    turned = made["shapes"].with_columns(
        value=pl.when(pl.col("quantity") == PLACE).then(-pl.col("value")).otherwise(pl.col("value"))
    )
    assert QUESTION.answer(made | {"shapes": turned}, QUICK).verdicts[4].holds is False


def test_lengths_of_paths_are_averaged_by_their_shares() -> None:
    rows = pl.DataFrame({"quantity": ["path_share_0", "path_share_2", "loss"], "value": [0.75, -0.25, 9.0]})
    assert study._mean_length(rows) == pytest.approx(0.5)
    assert math.isnan(study._mean_length(rows.head(0)))
