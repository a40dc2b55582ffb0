"""Width against depth: shapes, what is measured, and that the answer follows the tables."""

import math
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.sources import bundled_excerpts, word_tokens
from rankscope_studies.questions import shape_trainings as study
from rankscope_studies.questions.shape_trainings import (
    BLIND,
    CONSTANTS,
    FAMILIES,
    FRESH,
    HEADS,
    LENGTH,
    PLACE,
    PURE,
    QUANTITIES,
    RATE,
    ROWS,
    TUNED,
    ShapeSizes,
)
from rankscope_studies.questions.width_depth import FULL, QUESTION, QUICK
from rankscope_studies.study import Setup
from rankscope_studies.trial import NONE, Trial, TrialSizes

TINY = ShapeSizes((1, 2, 3), 2, 8, context=8, batch=2, steps=2, rates=(1e-3, 1e-2), tuning_seeds=1, seeds=2,
                  widths=(8, 16), pure_depth=5, pure_tokens=6, pure_seeds=2)  # fmt: skip

PARTS = ("query", "key", "value", "output")


@pytest.mark.parametrize("sizes", [QUICK, FULL])
def test_shapes_of_a_family_cost_the_same(sizes: ShapeSizes) -> None:
    found = study.shapes(sizes)
    assert len({*study.shapes(FULL)}) >= 12 and len(FULL.rates) >= 3 and len(QUICK.rates) >= 3
    for family in FAMILIES:
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
    distinct = {shape[1:] for shape in study.shapes(TINY)}
    assert len(said) == len(distinct) * (2 + 2) + 2 * 2  # Two rates, before and after; widths and seeds
    again = QUESTION.gather(Setup(tmp_path, say=said.append), TINY)
    elsewhere = QUESTION.gather(Setup(tmp_path / "b"), TINY)
    assert len(said) == len(distinct) * 4 + 4
    for name, table in first.tables.items():
        assert table.equals(again[name]) and table.equals(elsewhere[name])
    shapes = first.tables["shapes"]
    assert {*shapes["quantity"]} == {*QUANTITIES} and first.figures[QUESTION.name].axes
    assert {*shapes.select("family", "layers", "width").iter_rows()} == {*study.shapes(TINY)}
    assert first.tables["pure"]["log10"].is_finite().all()
    tuned = first.tables["tuning"]
    assert not {*tuned["seed"]} & {*shapes["seed"]}  # Reported seeds are others than those that chose
    for layers, width in distinct:
        losses = {rate: tuned.filter(layers=layers, width=width, rate=rate)["loss"].median() for rate in TINY.rates}
        chosen = shapes.filter(layers=layers, width=width, quantity=RATE)["value"][0]
        assert losses[chosen] == min(losses.values())  # type: ignore[type-var]


def test_the_loss_of_a_rate_is_that_of_its_training() -> None:
    (row,) = study.tuned(1, 8, 1e-2, TINY).to_dicts()
    sizes = TrialSizes(width=8, context=8, batch=2, steps=2, lr=1e-2)
    expected = Trial(NONE, "pre", 1, (study.TUNING,), sizes).training().finish().evaluate(sizes.evaluation_samples)
    assert row["loss"] == pytest.approx(expected[0].loss, rel=1e-6)


def test_a_rate_that_diverges_is_not_chosen() -> None:
    rows = [(1, 8, 0.1, 100, math.inf), (1, 8, 0.1, 101, 1.0), (1, 8, 0.01, 100, 2.0), (1, 8, 0.01, 101, 2.2),
            (1, 8, 0.001, 100, 2.2), (1, 8, 0.001, 101, 2.0)]  # fmt: skip
    assert study.best_rate(pl.DataFrame(rows, schema=TUNED, orient="row"), 1, 8) == 0.001  # The smaller of two equal


@pytest.mark.slow  # forecasts
def test_fresh_residuals_are_those_of_the_networks_that_are_trained() -> None:
    rows = study.before_rows(2, 8, TINY)
    training = Trial(NONE, "pre", 2, (0, 1), TrialSizes(width=8, context=8, batch=2, steps=2)).training()
    X = training.tokens()[0][1].double()
    Y = training.networks()[1].to(torch.float64).run(X).states[-1]
    left = [
        torch.linalg.norm(y - y.mean(0), 1) * torch.linalg.norm(y - y.mean(0), math.inf)
        / (torch.linalg.norm(y, 1) * torch.linalg.norm(y, math.inf))
        for y in Y
    ]  # fmt: skip
    expected = sum(0.5 * math.log10(float(share)) for share in left) / len(left)
    assert rows.filter(quantity=FRESH, seed=1)["value"][0] == pytest.approx(expected, abs=1e-9)


def test_the_constant_of_a_layer_is_that_of_plain_float64() -> None:
    """Two layers of heads, where float64 still holds what tokens differ by; norms by enumeration of entries."""
    sizes = ShapeSizes((1,), 1, 8, 8, 2, 2, (1e-3,), 1, 1, (16,), 2, 6, 1)
    X, padding = word_tokens(bundled_excerpts(6)[:1], 16, 6)
    net = Transformer.random(Architecture(layers=2, width=16, heads=HEADS), seed=3, init="xavier").variant("san")
    R = [state[0] - state[0].mean(0) for state in net.run(X, padding).states[1:]]
    first, second = (math.sqrt(float(r.abs().sum(0).max() * r.abs().sum(1).max())) for r in R)
    found = dict(study.pure_constants(16, 3, sizes).select("quantity", "log10").iter_rows())
    assert found["c"] == pytest.approx(math.log10(second / first**3), rel=1e-6)
    whole = [state[0] for state in net.run(X, padding).states[1:]]
    sizes_of_tokens = [math.sqrt(float(x.abs().sum(0).max() * x.abs().sum(1).max())) for x in whole]
    shares = [first / sizes_of_tokens[0], second / sizes_of_tokens[1]]
    assert found["left"] == pytest.approx(math.log10(shares[1]), rel=1e-6)
    assert found["relative"] == pytest.approx(math.log10(shares[1] / shares[0] ** 3), rel=1e-6)
    weights, d = net.state_dict(), 16 // HEADS
    query, key, value, output = (weights[f"layers.1.attention.{name}.weight"] for name in PARTS)
    products = [[query[:, h] @ key[:, h].T for h in range(HEADS)], [value[:, h] @ output[h] for h in range(HEADS)]]
    scores = [float(W.abs().sum(0).max()) for W in products[0]]
    columns, rows = ([float(W.abs().sum(axis).max()) for W in products[1]] for axis in (0, 1))
    beta = math.sqrt(max(s * c for s, c in zip(scores, columns, strict=True)) * max(
        s * r for s, r in zip(scores, rows, strict=True)))  # fmt: skip
    E = [R[0] @ W @ R[0].T / math.sqrt(d) for W in products[0]]
    o = max(float((e.amax(1) - e.amin(1)).max()) for e in E)
    gamma = max(1.0, (math.exp(o) - 1) / (2 * o))
    bound = 4 * 2 * (1 - 1 / 6) * gamma * beta * HEADS / math.sqrt(d)
    assert found["scores"] == pytest.approx(math.log10(o / first**2), abs=1e-6)
    assert found["bound"] == pytest.approx(math.log10(bound), abs=1e-6) and found["c"] < found["bound"]
    assert found["bound_scores"] == pytest.approx(math.log10(max(scores) / math.sqrt(d)), abs=1e-9)
    assert found["values"] + found["scores"] == pytest.approx(found["c"])
    assert found["bound_values"] + found["bound_scores"] == pytest.approx(found["bound"])


def tables(
    loss: dict[int, float], slope: float = -0.5, rise: float = -0.1, blind: float = 3.0, whole: float = -0.5
) -> dict[str, pl.DataFrame]:
    """Made-up tables: losses by depth, the slopes of c and of the bound, and what depth adds to log10 of the fresh
    residual."""
    rows = []
    for family in FAMILIES:
        for layers, value in loss.items():
            for seed in (0, 1):
                known = {"loss": value + 0.001 * seed, FRESH: rise * layers, LENGTH: layers**0.5, PLACE: value,
                         "parameters": 100.0, BLIND: blind, RATE: 1e-2}  # fmt: skip
                rows += [(family, layers, 64 // layers, seed, name, number) for name, number in known.items()]
    steep = {name: whole if name.startswith("bound") else slope for name in CONSTANTS}
    pure = [(width, seed, name, steep[name] * math.log10(width) + seed)
            for width in QUICK.widths for seed in (0, 1) for name in CONSTANTS]  # fmt: skip
    return {
        "shapes": pl.DataFrame(rows, schema=ROWS, orient="row"), "pure": pl.DataFrame(pure, schema=PURE, orient="row"),
        "tuning": pl.DataFrame(schema=TUNED),
    }  # fmt: skip


def test_the_sentence_turns_with_the_numbers() -> None:
    inner = QUESTION.answer(tables({1: 2.0, 2: 1.5, 4: 1.8}), QUICK)
    deep = QUESTION.answer(tables({1: 2.0, 2: 1.8, 4: 1.5}, slope=0.3, rise=0.1), QUICK)
    shallow = QUESTION.answer(tables({1: 1.5, 2: 1.8, 4: 1.9}, slope=-1.0), QUICK)
    assert "2 layers learn best" in inner.sentence and "4 layers learn best" in deep.sentence
    assert "1 layer learns best" in shallow.sentence and "c falls as width^-1.00" in shallow.sentence
    assert "width does not slow" in inner.sentence and "width slows the collapse" in deep.sentence  # less, more is left
    assert [verdict.holds for verdict in inner.verdicts] == [True] * 7
    assert [verdict.holds for verdict in deep.verdicts[:4]] == [False] * 4 and deep.verdicts[6].holds is False
    assert all(len(found.sentence.split()) <= 60 for found in (inner, deep, shallow))


def test_no_shape_is_named_where_none_beats_guessing() -> None:
    none = QUESTION.answer(tables({1: 2.9995, 2: 2.9996, 4: 2.9999}), QUICK)
    assert "learn best" not in none.sentence and none.sentence.count("no shape beats guessing") == 2
    assert [none.verdicts[k].holds for k in (2, 3, 4)] == [None] * 3
    single = tables({1: 2.0, 2: 1.5, 4: 1.8})
    single["shapes"] = single["shapes"].filter(seed=0)  # One seed has no spread
    assert "no shape beats guessing" in QUESTION.answer(single, QUICK).sentence


def test_shapes_that_seeds_do_not_tell_apart_are_named_together() -> None:
    tied = QUESTION.answer(tables({1: 1.5005, 2: 1.5, 4: 1.8}), QUICK)
    assert "1 or 2 layers learn best" in tied.sentence
    assert tied.verdicts[2].holds is None


def test_a_bound_that_some_seeds_meet_is_not_judged() -> None:
    made = tables({1: 2.0, 2: 1.5, 4: 1.8})
    near = pl.when((pl.col("seed") == 1) & (pl.col("quantity") == "c")).then(-pl.col("width").log10())
    answer = QUESTION.answer(made | {"pure": made["pure"].with_columns(log10=near.otherwise(pl.col("log10")))}, QUICK)
    assert answer.verdicts[1].holds is None and answer.verdicts[6].holds is None
    unread = QUESTION.answer(made | {"pure": made["pure"].with_columns(log10=pl.lit(math.nan))}, QUICK)
    assert unread.verdicts[1].holds is None and "not measured" in unread.sentence


def test_the_forecast_is_judged_by_its_order() -> None:
    made = tables({1: 2.0, 2: 1.5, 4: 1.8})
    turned = made["shapes"].with_columns(
        value=pl.when(pl.col("quantity") == PLACE).then(-pl.col("value")).otherwise(pl.col("value"))
    )
    assert QUESTION.answer(made | {"shapes": turned}, QUICK).verdicts[4].holds is False
    shapes = made["shapes"].filter(quantity=PLACE).select("layers", "width", loss=-pl.col("value")).unique()
    tuning = shapes.with_columns(rate=pl.lit(1e-3), seed=pl.lit(100)).select([*TUNED])
    judged = QUESTION.answer(made | {"tuning": tuning}, QUICK).verdicts[4]
    assert judged.holds and "1.00 over" in judged.ours and "-1.00 with losses at the rate" in judged.ours


def test_lengths_of_paths_are_averaged_by_their_shares() -> None:
    rows = pl.DataFrame({"quantity": ["path_share_0", "path_share_2", "loss"], "value": [0.75, -0.25, 9.0]})
    assert study._mean_length(rows) == pytest.approx(0.5)
    assert math.isnan(study._mean_length(rows.head(0)))
