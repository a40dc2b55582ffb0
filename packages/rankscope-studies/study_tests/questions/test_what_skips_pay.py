"""What skips and MLPs pay: the kinds of networks, and that the answer follows the tables."""

import math
import os
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.errors import SourceError
from rankscope_studies.questions import skip_networks as networks
from rankscope_studies.questions import what_skips_pay as study
from rankscope_studies.questions.branch_gains import branch_numbers
from rankscope_studies.questions.question import StudyAnswer
from rankscope_studies.questions.skip_networks import LAYERS, NETWORKS, NetworkKind, PriceSizes
from rankscope_studies.questions.skip_results import MODELS
from rankscope_studies.questions.what_skips_pay import FULL, QUESTION
from rankscope_studies.study import Setup

pytest.importorskip("sklearn")
WEIGHTS = Path(os.environ.get("RANKSCOPE_WEIGHTS", Path(__file__).parents[4] / ".weights"))
TINY = PriceSizes(
    ("digits", "text"), multiples=(1, 4), gains=(), half_skips=(4,), layers=1, width=8, heads=2, context=8, seeds=2,
    steps=2, batch=4, rates=(1e-3,), shares=(0.0, 1.0), samples=1, evaluated=8, draws=1, texts=1, tokens=16,
)  # fmt: skip
MADE_UP = replace(TINY, multiples=(1, 4, 16), half_skips=(), tasks=("digits",))
TUG, BOUND, MITIGATES, COSTS, SKIPS, TRAINING, STEPS = range(7)


@pytest.mark.slow
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MODELS", ("antiberty",))  # which is not on the path of tests
    if find_spec("antiberty") is not None:
        pytest.skip("antiberty is installed")
    said: list[str] = []
    sizes = replace(TINY, tasks=("digits",), seeds=1, half_skips=())
    first = QUESTION.run(Setup(tmp_path, say=said.append), sizes)
    kinds = networks.kinds(sizes)
    assert len(kinds) == 2 * 2 + 2 * 2 and len({*kinds}) == len(kinds)
    assert len(said) == len(kinds) + 2 and "is left out: the package antiberty must be installed" in said[1]
    again = QUESTION.run(Setup(tmp_path, say=said.append), sizes)
    assert len(said) == len(kinds) + 4  # the model is looked for again: nothing was cached for it
    for name, table in first.tables.items():
        assert table.equals(again.tables[name])
    assert first.comparisons[TUG].agrees is None and any("not at hand" in note for note in first.notes)
    table = first.tables["networks"]
    assert {*table["share"]} == {0.0, 1.0} and {*table["seed"]} == {0}
    assert not table.filter(quantity="residual")["value"].is_nan().any()
    assert first.figures[QUESTION.name].axes


@pytest.mark.slow
def test_the_rate_with_the_lowest_loss_is_measured() -> None:
    kind = NetworkKind("size", 1.0, 4, 1.0, 8)
    sizes = replace(TINY, steps=20, seeds=1, batch=16)
    tables = {rate: networks.trained_kind("text", kind, replace(sizes, rates=(rate,))) for rate in (1e-9, 1e-2)}
    assert not {*networks.TUNING_SEEDS} & {*range(FULL.seeds)}
    best = networks.trained_kind("text", kind, replace(sizes, rates=(1e-9, 1e-2)))
    assert best.equals(tables[1e-2]) and not best.equals(tables[1e-9])
    assert {"tolerance embedding", "tolerance gradient", "jacobian common", "accuracy"} <= {*best["quantity"]}
    assert "tolerance inputs" not in {*best["quantity"]}  # characters are no numbers


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.is_dir(), reason="trained weights are not here: make weights")
@pytest.mark.parametrize(("name", "layers"), [("rxnmapper", 12), ("antiberty", 8)])
def test_trained_models_are_measured_by_layer(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEIGHTS))
    table = networks.model_layers(name, TINY)
    assert sorted({*table["layer"]}) == [*range(layers + 1)]
    mlp = table.filter(part="mlp").pivot("quantity", index="layer", values="value")
    assert (mlp["bound"] > mlp["steepest"]).all()


def test_a_model_that_is_not_at_hand_is_refused() -> None:
    if find_spec("antiberty") is not None:
        pytest.skip("antiberty is installed")
    with pytest.raises(SourceError, match="the package antiberty must be installed"):
        networks.model_layers("antiberty", TINY)


@pytest.mark.parametrize("multiple", FULL.multiples)
def test_at_equal_parameters_layers_have_about_as_many(multiple: int) -> None:
    def parameters(kind: NetworkKind) -> int:
        net = networks.kind_training("digits", kind, 1e-3, replace(FULL, layers=1), [0]).models[0].net
        return sum(weight.numel() for weight in net.layers.parameters())

    width = networks.equal_width(multiple, FULL)
    usual = parameters(NetworkKind("size", 1.0, networks.USUAL, 1.0, FULL.width))
    assert parameters(NetworkKind("parameters", 1.0, multiple, 1.0, width)) == pytest.approx(usual, rel=0.1)
    assert width % FULL.heads == 0


def test_mlps_of_every_size_start_equally_strong_and_a_gain_multiplies_them() -> None:
    def strength(kind: NetworkKind, quantity: str) -> float:
        training = networks.kind_training("digits", kind, 1e-3, replace(FULL, layers=1), [0])
        X = torch.randn(4, 16, FULL.width, generator=torch.Generator().manual_seed(0))
        numbers = [n.value for n in branch_numbers(training.networks()[0], X)
                   if (n.part, n.quantity) == ("mlp", quantity)]  # fmt: skip
        return sum(numbers) / len(numbers)

    kinds = {m: NetworkKind("size", 1.0, m, 1.0, FULL.width) for m in FULL.multiples}
    found = [strength(kind, "differences") for kind in kinds.values()]
    assert max(found) - min(found) < math.log10(1.25)
    for quantity in ("differences", "bound", "steepest"):
        louder = strength(kinds[4]._replace(gain=4.0), quantity)
        assert louder == pytest.approx(strength(kinds[4], quantity) + math.log10(4), abs=1e-6)


# ---- The answer from made-up tables


def tables(models: bool = True, sizes: PriceSizes = MADE_UP, **changes: Any) -> dict[str, pl.DataFrame]:
    """Networks that have all learnt and do not differ, but for what is given: numbers by (skip, multiple), such as
    `residual={(0.0, 16): -1.0}`, or of a part by (part, share)."""
    usual = {"accuracy": 0.8, "chance": 0.1, "residual": -2.0, "tolerance embedding": 1.0, "tolerance inputs": 1.0,
             "tolerance gradient": 0.2,
             "growth": 0.1, "jacobian differences": 0.0, "jacobian common": 0.0, "parameters": 1000.0}  # fmt: skip
    inner = {"differences": -0.5, "common": 0.0, "stream": -0.5, "bound": 1.0, "steepest": 0.5}
    rows = []
    for kind in networks.kinds(sizes):
        for seed in range(MADE_UP.seeds):
            for share in MADE_UP.shares:
                label = ("digits", *kind, 1e-3, seed, share)
                for quantity, value in usual.items():
                    given = changes.get(quantity.replace(" ", "_"), {}).get((kind.skip, kind.multiple), value)
                    rows.append((*label, "network", quantity, given + 1e-6 * seed))
                for part in ("attention", "mlp"):
                    for quantity, value in inner.items():
                        rows.append((*label, part, quantity, changes.get(quantity, {}).get((part, share), value)))
    layers = []
    for name in MODELS if models else ():
        for layer in range(1, 5):
            for part, sign in (("attention", -1), ("mlp", 1)):
                numbers = {"differences": 0.3, "common": 0.0, "stream": sign * 0.3,
                           "bound": changes.get("model_bound", 2.0), "steepest": 1.0}  # fmt: skip
                if layer in changes.get("against", ()):
                    numbers["stream"] *= -1
                layers += [(name, "texts", 0, layer, part, quantity, value) for quantity, value in numbers.items()]
            for part, value in changes.get("others", {"norms": -0.1, "layer": -0.1}).items():
                layers.append((name, "texts", 0, layer, part, "stream", value))
        layers += [(name, "texts", 0, 0, "network", f"jacobian {part}", 0.0) for part in ("differences", "common")]
    return {
        "networks": pl.DataFrame(rows, schema=NETWORKS, orient="row"),
        "models": pl.DataFrame(layers, schema=LAYERS, orient="row"),
    }


def verdicts(made: dict[str, pl.DataFrame]) -> list[bool | None]:
    return [verdict.holds for verdict in QUESTION.answer(made, MADE_UP).verdicts]


def test_networks_that_do_not_differ_pay_nothing() -> None:
    found = QUESTION.answer(tables(), MADE_UP)
    assert [verdict.holds for verdict in found.verdicts] == [True, True, False, False, False, False, False]
    assert found.sentence.startswith(
        "Skips cost no robustness on digits (1.00 times the embedding noise over MLP sizes, 1.00 on pixels). "
    )
    assert "without skips it does not mitigate collapse reliably" in found.sentence
    assert len(found.sentence.split()) <= 60


def test_a_price_between_networks_of_different_rates_says_so() -> None:
    made = tables()
    halved = pl.when(pl.col("skip") == 0).then(pl.col("rate") / 2).otherwise("rate")
    made["networks"] = made["networks"].with_columns(rate=halved)
    sentence = QUESTION.answer(made, MADE_UP).sentence
    assert sentence.startswith(
        "Skips cost no robustness on digits (1.00 times the embedding noise, at other rates, 1.00 "
    )
    assert len(sentence.split()) <= 60


def test_trained_models_are_judged_by_most_layers_and_by_their_bounds() -> None:
    assert verdicts(tables(against=(1,)))[TUG] is True  # three of four layers
    assert verdicts(tables(against=(1, 2)))[TUG] is False
    assert verdicts(tables(model_bound=1.2))[BOUND] is False  # 10^1.2 over 10^0.3
    absent = QUESTION.answer(tables(models=False), MADE_UP)
    assert [verdict.holds for verdict in absent.verdicts][:2] == [None, None]
    assert "trained models" not in absent.sentence and "minilm" in absent.notes[1]


def test_norms_and_whole_layers_are_said_beside_the_two_sides() -> None:
    """Attention and MLPs cancel, norms make tokens alike: whoever reads of both sides alone would not know."""
    found = QUESTION.answer(tables(others={"norms": -0.6, "layer": -0.6}), MADE_UP)
    models = "4 models' median layer: differences/common part"
    assert f"{models} ×0.25, attention ×0.50, MLP ×2.00, norms ×0.25." in found.sentence
    assert found.verdicts[TUG].holds is True and "(norms × 0.25, layers in all × 0.25)" in found.verdicts[TUG].ours
    table = found.evidence[0]
    by_heading = dict(zip(table.headings, table.rows[0], strict=True))
    assert (by_heading["both norms: stream"], by_heading["layer: stream"]) == ("0.25", "0.25")
    absent = QUESTION.answer(tables(others={}), MADE_UP)  # not measured is not a factor of one
    assert f"{models} ×–, attention ×0.50, MLP ×2.00, norms ×–." in absent.sentence


def test_tasks_and_series_are_told_apart() -> None:
    """Medians of opposite results would hide both."""
    both = replace(MADE_UP, tasks=("digits", "text"))
    made = tables()
    dear = (pl.col("skip") == 1) & (pl.col("multiple") == 16) & (pl.col("series") == "parameters")
    noise = pl.col("quantity") == "tolerance embedding"
    digits = made["networks"].with_columns(value=pl.when(dear & noise).then(0.5).otherwise("value"))
    frail = (pl.col("skip") == 1) & (pl.col("multiple") == 4) & noise
    text = made["networks"].with_columns(task=pl.lit("text"), value=pl.when(frail).then(0.6).otherwise("value"))
    sentence = QUESTION.answer(made | {"networks": pl.concat([digits, text])}, both).sentence
    assert sentence.startswith("Skips cost no robustness on digits (1.00 times the embedding noise over MLP sizes, ")
    assert "), sometimes much on text (0.60–1.00, " in sentence
    assert "16-fold MLPs tolerate ×1.00 (digits), ×1.00 (text) at equal width, ×0.50, ×1.00 at equal param" in sentence


def test_rates_are_shown_and_those_at_an_end_are_counted() -> None:
    assert len(FULL.rates) > 2
    made, sizes = tables(), replace(MADE_UP, rates=(1e-3, 3e-3, 1e-2))
    kinds = networks.kinds(sizes)
    inner = pl.when(pl.col("multiple") == 16).then(3e-3).otherwise(pl.col("rate"))
    found = QUESTION.answer(made | {"networks": made["networks"].with_columns(rate=inner)}, sizes)
    ends = sum(kind.multiple != 16 for kind in kinds)
    assert f"{ends} of {len(kinds)} kinds of networks chose an end of the grid" in found.notes[-1]
    assert (
        "digits with no skips 3 of 5 (0.001, the least); digits with skips 3 of 5 (0.001, the least)."
        in found.notes[-1]
    )
    skipless = pl.when(pl.col("skip") == 0).then(1e-2).otherwise(3e-3)
    apart = QUESTION.answer(made | {"networks": made["networks"].with_columns(rate=skipless)}, sizes)
    assert "compared at different rates" in apart.notes[-1] and "compared at" not in found.notes[-1]
    assert "0.003 with skips, 0.01 with no skips" in apart.notes[-1]
    column = apart.evidence[1].headings.index("rate")
    assert {(row[0], row[column]) for row in apart.evidence[1].rows} == {("0", "0.01 (end)"), ("1", "0.003")}
    table = found.evidence[1]
    rates = {
        row[table.headings.index("rate")] for row in table.rows if row[table.headings.index("MLP in widths")] == "16"
    }
    assert rates == {"0.003"} and "at one rate, 0.001" in QUESTION.answer(made, MADE_UP).notes[-1]


def test_a_larger_mlp_mitigates_where_it_keeps_twice_as_much_with_every_seed() -> None:
    made = tables(residual={(0.0, 16): -1.6})
    assert verdicts(made)[MITIGATES] is True and "mitigates collapse" in QUESTION.answer(made, MADE_UP).sentence
    assert verdicts(tables(residual={(0.0, 16): -1.75}))[MITIGATES] is False
    other_seed = (pl.col("seed") == 1) & (pl.col("quantity") == "residual") & (pl.col("multiple") == 16)
    mixed = made["networks"].with_columns(value=pl.when(other_seed).then(-2.0).otherwise("value"))
    assert verdicts(made | {"networks": mixed})[MITIGATES] is False


def test_prices_are_judged_by_noise() -> None:
    dear = tables(tolerance_embedding={(1.0, 16): 0.6})
    assert verdicts(dear)[COSTS] is True and verdicts(dear)[STEPS] is False
    told = "16-fold MLPs tolerate ×0.60 (digits) at equal width, ×0.60 at equal parameters;"
    assert told in QUESTION.answer(dear, MADE_UP).sentence
    assert verdicts(tables(tolerance_gradient={(1.0, 16): 0.1}))[STEPS] is True
    skips = tables(tolerance_embedding={(0.0, 4): 2.0}, growth={(1.0, 4): 0.5})
    assert verdicts(skips)[SKIPS] is True
    sentence = QUESTION.answer(skips, MADE_UP).sentence
    assert sentence.startswith("Skips cost sometimes much robustness on digits (0.50–1.00 times")
    everywhere = {(0.0, multiple): 2.0 for multiple in MADE_UP.multiples}
    much = QUESTION.answer(tables(tolerance_embedding=everywhere, tolerance_inputs=everywhere), MADE_UP).sentence
    assert much.startswith(
        "Skips cost much robustness on digits (0.50 times the embedding noise over MLP sizes, 0.50 on"
    )
    little = tables(tolerance_inputs={(0.0, 4): 1.2})  # at one size, and on pixels alone
    sentence = QUESTION.answer(little, MADE_UP).sentence
    assert (
        sentence.startswith("Skips cost little robustness on digits (1.00 times") and "0.83–1.00 on pixels" in sentence
    )
    short = tables(tolerance_embedding={(0.0, 4): 2.0})
    assert verdicts(short)[SKIPS] is False  # tokens do not grow


def test_training_pulls_harder_where_constants_grow_and_attention_falls() -> None:
    harder = {"bound": {("mlp", 1.0): 1.3}, "stream": {("attention", 1.0): -0.7}}
    assert verdicts(tables(**harder))[TRAINING] is True  # type: ignore[arg-type]
    softer = harder | {"stream": {("attention", 1.0): -0.3}}
    assert verdicts(tables(**softer))[TRAINING] is False  # type: ignore[arg-type]


def test_networks_that_did_not_learn_are_not_judged() -> None:
    poor = {(0.0, multiple): 0.15 for multiple in MADE_UP.multiples}
    nothing = dict.fromkeys(poor, math.nan)
    found = QUESTION.answer(tables(accuracy=poor, tolerance_embedding=nothing), MADE_UP)
    assert [found.verdicts[k].holds for k in (MITIGATES, COSTS, SKIPS)] == [None, False, None]
    assert found.sentence.startswith("What skips pay cannot be told") and "cannot be judged" in found.sentence
    assert "nan" not in found.verdicts[SKIPS].ours and "not learnt" in found.verdicts[MITIGATES].ours


def test_the_answer_says_which_networks_did_not_learn() -> None:
    for skip, said in ((1.0, "not learnt with skips"), (0.0, "not learnt without skips")):
        none = {(skip, multiple): 0.15 for multiple in MADE_UP.multiples}
        found = QUESTION.answer(tables(accuracy=none, growth={(1.0, 4): 0.5}), MADE_UP)
        assert found.verdicts[SKIPS].holds is None and said in found.sentence and said in found.verdicts[SKIPS].ours
        usual = QUESTION.answer(tables(accuracy={(skip, 4): 0.15}, tolerance_embedding={(skip, 4): 9.0}), MADE_UP)
        assert usual.verdicts[SKIPS].holds is None and said in usual.verdicts[SKIPS].ours
        assert "(1.00 times the embedding noise over MLP sizes" in usual.sentence  # of sizes that were learnt


def test_half_skips_stand_in_where_no_network_without_skips_has_learnt() -> None:
    sizes = replace(MADE_UP, half_skips=(1, 4))
    poor = {(0.0, multiple): 0.15 for multiple in sizes.multiples}
    numbers = {(0.5, 1): 1.25, (0.5, 4): 1.0, (0.0, 4): 9.0}
    found = QUESTION.answer(tables(sizes=sizes, accuracy=poor, tolerance_embedding=numbers), sizes)
    assert found.sentence.startswith(
        "Skips cost little robustness on digits (0.80–1.00 against skips of weight 0.5 over MLP sizes, 1.00 on pixels)"
    )
    verdict = found.verdicts[SKIPS]
    assert verdict.holds is None and "not learnt without skips" in verdict.ours
    assert "against skips of weight 0.5: 0.80–1.00 at the embedding, 1.00 on pixels" in verdict.ours
    assert "against no skips" in QUESTION.answer(tables(sizes=sizes), sizes).verdicts[SKIPS].ours


def test_residuals_that_float32_cannot_see_are_not_judged() -> None:
    def found(small: float, large: float) -> StudyAnswer:
        made = tables(residual={(0.0, 1): small, (0.0, 4): min(small, large), (0.0, 16): large})
        return QUESTION.answer(made, MADE_UP)

    below = found(-40.0, -20.0)  # though it is much more, nobody could see it
    assert below.verdicts[MITIGATES].holds is None and "without skips all sizes collapse (digits)." in below.sentence
    assert "2 of 2 pairs not judged" in below.verdicts[MITIGATES].ours
    assert found(-40.0, -6.0).verdicts[MITIGATES].holds is True
    assert found(-6.0, -40.0).verdicts[MITIGATES].holds is False
    assert found(-6.8, -6.7).verdicts[MITIGATES].holds is False and found(-7.0, -6.93).verdicts[MITIGATES].holds is None
    assert "collapse" not in found(-40.0, -6.0).sentence.replace("mitigates collapse", "")


def test_one_seed_that_fails_refutes_what_is_said_of_every_seed() -> None:
    made = tables(residual={(0.0, 16): -40.0, (0.0, 1): -40.0})
    seen = (pl.col("seed") == 1) & (pl.col("quantity") == "residual") & (pl.col("skip") == 0)
    one = made["networks"].with_columns(value=pl.when(seen).then(-2.0).otherwise("value"))
    assert verdicts(made)[MITIGATES] is None and verdicts(made | {"networks": one})[MITIGATES] is False
    kept = seen & (pl.col("multiple") == 16)  # one seed for it, the other cannot be seen
    some = one.with_columns(value=pl.when(kept).then(-1.0).otherwise("value"))
    assert verdicts(made | {"networks": some})[MITIGATES] is None


def test_networks_that_did_not_learn_are_drawn_pale_or_not_at_all() -> None:
    poor = {(0.0, multiple): 0.15 for multiple in MADE_UP.multiples}
    for accuracy, count in (({}, 0), (poor, 3)):
        *_, residuals, noise = QUESTION.draw(tables(accuracy=accuracy), MADE_UP)[QUESTION.name].axes
        pale = [line for line in residuals.lines if line.get_alpha() is not None and len(line.get_xdata())]  # type: ignore[arg-type]
        assert max((len(line.get_xdata()) for line in pale), default=0) == count  # type: ignore[arg-type]
        drawn = {line.get_color() for line in noise.lines if len(line.get_xdata())}  # type: ignore[arg-type]
        assert len(drawn) == (1 if count else 2) and "linear to ±1" in residuals.get_ylabel()


def test_numbers_that_could_not_be_measured_leave_a_hypothesis_open() -> None:
    gone = {(1.0, 16): math.nan}
    for place, index in (("embedding", COSTS), ("gradient", STEPS)):
        verdict = QUESTION.answer(tables(**{f"tolerance_{place}": gone}), MADE_UP).verdicts[index]  # type: ignore[arg-type]
        assert verdict.holds is None and "nan" not in verdict.ours and "2 not measured" in verdict.ours
    made = tables(residual={(0.0, 16): math.nan})
    assert verdicts(made)[MITIGATES] is None and QUESTION.draw(made, MADE_UP)[QUESTION.name].axes
    skips = QUESTION.answer(tables(tolerance_embedding={(0.0, 4): math.nan}, growth={(1.0, 4): 0.5}), MADE_UP)
    assert skips.verdicts[SKIPS].holds is None and skips.sentence.startswith("What skips pay cannot be told")


def test_steps_along_the_gradient_have_a_grid_of_their_own() -> None:
    grid = networks.GRADIENT
    assert grid[0] == 0 and grid[1] < 0.004 and grid[-1] == 1.6
    assert [b / a for a, b in pairwise(grid[1:])] == pytest.approx([2.0] * (len(grid) - 2))
