"""Why LayerNorm does not stop collapse: what is measured against slow references, the answer from made-up tables."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.lab import NextCharacter, with_gains
from rankscope.metrics import relative_mu
from rankscope.nets import Dropout, Transformer
from rankscope.theory import transverse_exponent, transverse_modes
from rankscope_studies.dong2021.tasks import Sort
from rankscope_studies.questions import layernorm as study
from rankscope_studies.questions import norm_experiments as experiments
from rankscope_studies.questions.layernorm import FULL, QUESTION, QUICK
from rankscope_studies.questions.norm_experiments import (
    CASE,
    CHAOTIC,
    FAMILIES,
    NO_SKIP,
    NormSizes,
    bare,
    random_tokens,
)
from rankscope_studies.questions.question import LATER
from rankscope_studies.study import Setup
from rankscope_studies.wu2024.networks import DROPOUT, MASKS

TINY = replace(
    QUICK, depth=6, width=8, tokens=4, heads=2, seeds=2, gains=(1.0, 8.0), far_depth=6, draws=2,
    cases=((3, 8, 2, 1.0, "complete", "xavier"), (4, 8, 2, 1.0, "complete", "xavier"),
           (4, 8, 2, 1.0, "causal", "xavier")),
    stable_depth=6, stable_seeds=1, stable_width=8, stable_tokens=4, values=(-0.5,), mlps=(2.0,), constructed=(2,),
    constructed_starts=4, trainings=(("sort", 1),), train_width=8, context=4, batch=2, steps=2, train_seeds=2,
)  # fmt: skip


@pytest.mark.slow  # every experiment at its smallest, twice
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    count = len(said)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == count == 4 * 3 + 3 + 5 * 3 + 1 + 3
    assert all(table.equals(again.tables[name]) for name, table in first.tables.items())
    assert first.figures[QUESTION.name].axes and len(first.comparisons) == len(QUESTION.hypotheses)


def test_a_full_run_is_cut_into_many_parts_of_all_masks_and_tasks() -> None:
    assert len({case[4] for case in FULL.cases}) > 1 and {task for task, _ in FULL.trainings} == {*experiments.TASKS}
    assert FULL.depth == 128 and len({case[0] for case in FULL.cases}) > 3 and len({*FULL.cases}) == len(FULL.cases)


def test_without_skips_the_derivative_of_a_layer_is_nu_times_that_of_one_token() -> None:
    """By autograd on the network itself: a layer at equal tokens maps `v r^T` to `nu v (r J)`."""
    net = Transformer.random(bare(1, 6, 2, mask="causal"), 0, "xavier")
    x = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    differentiate: Any = torch.autograd.functional.jacobian

    def layer(X: torch.Tensor) -> torch.Tensor:
        return net.run(X[None]).output[0]

    whole = differentiate(layer, x.expand(4, 6).clone())  # [token, width, token, width]
    alone = differentiate(layer, x[None].clone())[0, :, 0]
    average = torch.tril(torch.ones(4, 4, dtype=torch.float64)) / torch.arange(1, 5)[:, None]
    assert transverse_modes(net.arch, 4).real.tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 4])
    eigenvalues, vectors = torch.linalg.eig(average)
    for nu, v in zip(eigenvalues.real, vectors.real.T, strict=True):
        moved = torch.einsum("tasb,s->tab", whole, v)
        assert torch.allclose(moved, nu * v[:, None, None] * alone, atol=1e-10)


@pytest.mark.slow
def test_near_the_collapsed_state_rates_are_as_in_theory() -> None:
    sizes = replace(TINY, depth=24, width=32, seeds=1)
    causal = experiments.near_rows("causal", "post", sizes)
    assert causal["predicted"][0] == pytest.approx(math.log(0.5))
    assert causal.filter(~pl.col("dropout"))["rate"][0] == pytest.approx(math.log(0.5), abs=0.12)
    complete = experiments.near_rows("complete", "pre", replace(sizes, depth=5))
    assert complete["predicted"][0] == -math.inf
    assert complete.filter(~pl.col("dropout"))["order"][0] == pytest.approx(3, abs=0.2)
    off, on = (complete.filter(dropout=flag, layer=5)["log10"][0] for flag in (False, True))
    assert off < -10 and on > -2
    first, last = (complete.filter(dropout=True, layer=layer)["common"][0] for layer in (0, 5))
    assert first > 0.6 and abs(last) < 0.5  # of the tokens' own differences; of the masks' noise
    assert complete.filter(dropout=False)["common"].unique().to_list() == [1.0]


def test_fresh_masks_give_equal_tokens_the_root_of_p() -> None:
    """Entries are kept with chance 1 - p and divided by it: variance x^2 p/(1-p), mean square x^2/(1-p)."""
    X = torch.randn(1, 1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(1, 50, 4000)
    one, other = (Dropout.seeded(DROPOUT, k, "cpu")(X) for k in experiments.DROPOUT_SEEDS)
    assert float(relative_mu(one)) == pytest.approx(math.sqrt(DROPOUT * 49 / 50), rel=0.03)
    assert experiments.common_share(one, other) == pytest.approx(0.0, abs=0.01)


def test_half_of_two_sums_is_common() -> None:
    generator = torch.Generator().manual_seed(0)
    own, *noise = torch.randn(3, 1, 50, 4000, generator=generator, dtype=torch.float64)
    assert experiments.common_share(own + noise[0], own + noise[1]) == pytest.approx(0.5, abs=0.01)


def test_scores_spread_by_the_gain() -> None:
    net = Transformer.random(bare(1, 64, 4), 0, "xavier")
    sharp = with_gains(net, [("attention.query.weight", 3.0)])
    X = random_tokens(32, 64, 0)
    X = torch.nn.functional.layer_norm(X, (64,))
    (one,), (three,) = experiments.score_spread(net, X), experiments.score_spread(sharp, X)
    assert three == pytest.approx(3 * one)
    assert one * math.sqrt(2 * math.log(32)) == pytest.approx(1.0, rel=0.15)
    query, key = (getattr(net.weights.layers[0].attention, name).weight for name in ("query", "key"))
    scores = torch.einsum("btd,dhe,bsc,che->bhts", X, query, X, key) / math.sqrt(16)
    assert one == pytest.approx(float(scores.std(-1, correction=0).mean()) / math.sqrt(2 * math.log(32)))


def test_scores_of_a_causal_mask_are_those_that_are_seen() -> None:
    net = Transformer.random(bare(1, 8, 1, mask="causal"), 0, "xavier")
    X = random_tokens(3, 8, 0)
    P = next(iter([step.attention for step in net.steps(X) if step.attention is not None]))[0, 0]
    rows = [P[k, : k + 1].log().std(correction=0) / math.sqrt(2 * math.log(k + 1)) for k in (1, 2)]
    assert experiments.score_spread(net, X) == pytest.approx([float(sum(rows)) / 2])


def test_cosines_only_rise() -> None:
    """The formula of the docstring, for patterns at random: p' > p."""
    generator = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 3.0, 30.0):
        P = (sharpness * torch.randn(50, 9, 9, generator=generator, dtype=torch.float64)).softmax(-1)
        Y = float(P.square().sum(-1).mean())
        overlaps = P @ P.mT
        S = float((overlaps.sum((-2, -1)) - overlaps.diagonal(dim1=-2, dim2=-1).sum(-1)).mean()) / 72
        assert 0 < S <= Y <= 1
        for p in (0.0, 0.5, 0.99):
            assert (S + (1 - S) * p) / (Y + (1 - Y) * p) > p


def test_tokens_begin_as_near_as_is_asked_for() -> None:
    X = random_tokens(400, 256, 0, 0.25)[0]
    directions = X / X.norm(dim=-1, keepdim=True)
    cosines = directions @ directions.T
    off = (cosines.sum() - 400) / (400 * 399)
    assert float(off) == pytest.approx(0.75, abs=0.05)


def test_lifetimes_are_those_of_a_plain_pass() -> None:
    sizes = replace(TINY, far_depth=12)
    case = (4, 8, 2, 1.0, "complete", "xavier")
    rows = experiments.far_rows(case, sizes)
    assert len(rows.filter(what="predicted")) == len(sizes.gains) and len(rows.filter(what="life")) == 2 * len(
        sizes.gains
    )
    net = Transformer.random(bare(12, 8, 2), 1, "xavier")
    residuals = [float(relative_mu(state)) for state in net.run(random_tokens(4, 8, 1)).states]
    expected = next(layer for layer, residual in enumerate(residuals) if residual < 0.01)
    assert rows.filter(what="life", seed=1, gain=1.0)["layer"].to_list() == [expected]


@pytest.mark.parametrize(("skip", "a", "rate"), [(1.0, -0.5, math.log(2)), (1.0, 0.5, -math.log(1.5))])
def test_with_a_skip_values_that_oppose_the_common_token_make_it_unstable(skip: float, a: float, rate: float) -> None:
    """Complete mask, no noise, a norm that only scales: differences keep their size, the common part is multiplied by
    |1 + a|, so relative to it they grow by 1 / |1 + a|."""
    arch = bare(12, 6, 1, attention_skip=skip, norm="scale")
    tensors = Transformer.random(arch, 0, "xavier").state_dict()
    eye = torch.eye(6, dtype=torch.float64)
    for name, tensor in tensors.items():
        if "value" in name or "output" in name:
            tensors[name] = (eye if "value" in name else a * eye).reshape(tensor.shape)
    found = transverse_exponent(Transformer.from_weights(arch, tensors), torch.ones(6), 5, relative=True)
    assert found.rate == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_families_are_networks_of_their_strength(family: str) -> None:
    sizes = replace(TINY, stable_width=64)
    net = experiments.family_network(family, "causal", 3.0, 0, sizes)
    layer = net.weights.layers[0]
    if family == CHAOTIC:
        plain = Transformer.random(net.arch, 0, "xavier").weights.layers[0]
        assert torch.equal(layer.mlp.up.weight, 3 * plain.mlp.up.weight)  # type: ignore[union-attr]
        return
    W = torch.einsum("dhe,hec->dc", layer.attention.value.weight, layer.attention.output.weight)
    assert float(W.diagonal().mean()) == pytest.approx(3.0, abs=0.1)
    assert float((W - 3 * torch.eye(64)).norm()) / 8 == pytest.approx(experiments.NOISE, rel=0.1)
    assert net.arch.attention_skip == (0.0 if family == NO_SKIP else 1.0)


def test_equal_tokens_can_know_which_labels_there_are() -> None:
    labels = Sort().held_out(256).labels
    entropies = []
    for row in labels.tolist():
        shares = [row.count(symbol) / len(row) for symbol in {*row}]
        entropies.append(-sum(share * math.log(share) for share in shares))
    assert experiments.equal_tokens_loss(Sort()) == pytest.approx(sum(entropies) / len(entropies))
    task = NextCharacter(8)
    assert experiments.equal_tokens_loss(task) == task.blind


# ---- The answer, from made-up tables


def tables(
    order: float = 3.0, rate: float = math.log(0.5), apart_by: float = 0.0, common: float = 0.9,
    life: int = 9, right: bool = True, learnt: bool = False, apart: float = -0.5, sizes: NormSizes = QUICK,
) -> dict[str, pl.DataFrame]:  # fmt: skip
    near = [
        {"mask": mask, "norm": norm, "dropout": dropout, "seed": seed, "layer": layer,
         "log10": -0.5 if dropout else -50.0, "common": common if dropout else 1.0,
         "rate": rate + seed * apart_by, "order": order, "predicted": math.log(0.5)}
        for mask in MASKS for norm in experiments.NORMS for dropout in (False, True) for seed in (0, 1)
        for layer in (0, sizes.depth)
    ]  # fmt: skip
    far = [
        dict(zip(CASE, case, strict=True)) | {"gain": gain, "seed": seed, "what": what, "layer": layer}
        for case in sizes.cases for gain in sizes.gains for seed in (0, 1)
        for what, layer in (("life", life), ("predicted", 10))[: 2 - seed]
    ]  # fmt: skip
    stable = [
        {"family": family, "mask": mask, "a": a, "seed": 0, "predicted": rate_predicted,
         "log10": -1.0 if (rate_predicted > 0) == right else -9.0}
        for family in FAMILIES for mask in ("complete", *study.SLOW)
        for a, rate_predicted in ((0.5, -1.0), *(() if "no skip" in family else ((-0.5, 1.0),)))
    ]  # fmt: skip
    trained = [
        {"task": task, "layers": 4, "dropout": 0.0, "skip": skip, "seed": seed, "loss": 1.0 if learns else 2.0,
         "equal": 2.0, "log10_start": -8.0, "noisy_start": -1.0, "scores_start": 0.3,
         "log10_end": apart if learns else -8.0, "noisy_end": -1.0, "scores_end": 0.9}
        for task in experiments.TASKS for skip in (0.0, 1.0) for seed, learns in ((0, learnt), (1, learnt), (2, False))
    ]  # fmt: skip
    built = [{"tokens": 2, "share": 0.1, "error": 0.01, "starts": 100}]
    return {"near": pl.DataFrame(near), "far": pl.DataFrame(far), "stable": pl.DataFrame(stable),
            "trained": pl.DataFrame(trained + trained), "built": pl.DataFrame(built)}  # fmt: skip


def held(**how: Any) -> list[bool | None]:
    return [verdict.holds for verdict in QUESTION.answer(tables(**how), QUICK).verdicts]


def test_every_hypothesis_holds_where_tables_say_so() -> None:
    answer = QUESTION.answer(tables(), QUICK)
    assert [verdict.holds for verdict in answer.verdicts] == [True] * 6
    draws = len(QUICK.cases[:5]) * len(QUICK.gains) * 2
    assert f"{draws} of {draws} unmasked runs collapse within {QUICK.far_depth} layers" in answer.sentence
    assert "apart in 6 of 6 networks" in answer.sentence and "collapsed in 8 of 8 " in answer.sentence
    assert "training rescued 0 of 12 collapsed networks." in answer.sentence and len(answer.sentence.split()) <= 60
    assert f"0 of {draws} unmasked runs collapse within" in QUESTION.answer(tables(life=99), QUICK).sentence


def test_the_sentence_says_each_side_of_the_criterion_by_itself() -> None:
    """A sentence that averages both sides could praise a criterion that its own verdict rejects."""
    made = tables()
    wrong = (pl.col("predicted") < 0) & (pl.col("family") == "values, skip, post-norm")
    one_sided = made["stable"].with_columns(log10=pl.when(wrong).then(-1.0).otherwise("log10"))
    sentence = QUESTION.answer(made | {"stable": one_sided}, QUICK).sentence
    assert "apart in 6 of 6 networks" in sentence and "collapsed in 5 of 8 " in sentence
    untried = made["stable"].filter(pl.col("predicted") < 0)
    assert "no network was tried on both sides" in QUESTION.answer(made | {"stable": untried}, QUICK).sentence


def test_the_sentence_is_of_networks_with_norms_and_the_verdict_of_all() -> None:
    made = tables()
    wrong = (pl.col("predicted") < 0) & (pl.col("family") == "values, skip, no norm")
    answer = QUESTION.answer(
        made | {"stable": made["stable"].with_columns(log10=pl.when(wrong).then(-1.0).otherwise("log10"))}, QUICK
    )
    assert "collapsed in 8 of 8 " in answer.sentence and answer.verdicts[4].holds is False
    assert "with norms 6 of 6 and 8 of 8" in answer.verdicts[4].ours


def test_a_rescue_is_told_with_its_task_and_depth() -> None:
    made = tables(learnt=True)
    deeper = made["trained"].with_columns(layers=pl.when(pl.col("task") == "sort").then(4).otherwise(8))
    deeper = deeper.with_columns(loss=pl.when(pl.col("task") == "sort").then("loss").otherwise("equal"))
    answer = QUESTION.answer(made | {"trained": deeper}, QUICK)
    assert "training rescued 4 of 12 collapsed networks (sort, 4 layers: 4 of 6)." in answer.sentence
    assert len(answer.sentence.split()) <= 60
    awake = deeper.with_columns(log10_start=pl.when(pl.col("layers") == 8).then(-1.0).otherwise("log10_start"))
    ended = awake.with_columns(log10_end=pl.lit(-8.0))
    assert "6 of 6 end so (next character, 8 layers: 6 of 6)" in study._trained_verdict(ended).ours


def test_a_few_draws_that_are_apart_at_the_last_layer_are_too_shallow_to_tell() -> None:
    far = tables()["far"].with_columns(seed=pl.lit(0))
    many = pl.concat([far.filter(what="life").with_columns(seed=pl.lit(seed)) for seed in range(4)])
    one_gain = (pl.col("gain") == QUICK.gains[-1]) & (pl.col("tokens") == 64)

    def verdict(apart: int) -> study.HypothesisVerdict:
        late = one_gain & (pl.col("seed") < apart)
        return study._no_basin_verdict(
            many.with_columns(layer=pl.when(late).then(QUICK.far_depth + 1).otherwise("layer")), QUICK
        )

    assert [verdict(apart).holds for apart in (0, 1, 2, 4)] == [True, None, False, False]
    assert "64 tokens, width 32, 4 heads, gain 64" in verdict(1).ours


@pytest.mark.slow
def test_the_draw_that_is_apart_in_the_full_run_is_a_slow_one() -> None:
    """With tokens that differ in their last digits it collapses, and at another layer each time."""
    net = with_gains(Transformer.random(bare(400, 64, 4), 17, "xavier"), [("attention.query.weight", 64.0)])
    X, generator = random_tokens(256, 64, 17), torch.Generator().manual_seed(0)
    noise = [1e-15 * torch.randn(X.shape, generator=generator, dtype=X.dtype) for _ in range(5)]
    with torch.no_grad():
        lives = [experiments.lifetime(float(relative_mu(step.state)) for step in net.steps(X + X * e)) for e in noise]
    assert max(lives) <= 400 and len({*lives}) > 1


def test_lifetimes_that_theory_misses_are_named() -> None:
    far = tables(life=10)["far"]
    off = (pl.col("tokens") == 64) & (pl.col("gain") > 10) & (pl.col("what") == "life")
    verdict = study._lifetime_verdict(far.with_columns(layer=pl.when(off).then(20).otherwise("layer")), QUICK)
    assert "within ×1.5 in 22 of 24 pairs" in verdict.ours and verdict.holds
    assert "64 32 4 1.0 complete xavier: 2.00 at 2 gain(s) from 16 to 64" in verdict.ours


def test_hypotheses_that_a_run_suggested_are_told_from_the_others() -> None:
    assert [hypothesis.startswith(LATER) for hypothesis in QUESTION.hypotheses] == [False] + [True] * 3 + [False] * 2


def test_networks_that_learn_with_equal_tokens_have_not_left() -> None:
    assert held(learnt=True, apart=-8.0)[5] is True


def test_every_hypothesis_falls_by_its_own_numbers() -> None:
    assert held(order=1.1)[0] is False and held(rate=math.log(0.5) + 0.2)[0] is False
    assert held(rate=math.log(0.5) + 0.03)[0] is True and held(apart_by=0.06)[0] is None  # seeds differ by more
    assert held(rate=math.log(0.5) + 0.03, apart_by=0.01)[0] is None  # two seeds: an interval of 12.7 errors
    assert held(common=0.3)[1] is False
    assert held(life=QUICK.far_depth + 1)[2:4] == [False, False]
    assert held(life=5)[2:4] == [True, False]
    assert held(right=False)[4] is False
    assert held(learnt=True)[5] is False  # most of those that start collapsed learn, and end apart


def test_a_rate_is_told_from_none_at_all() -> None:
    """Where ln|nu| is small, differences that stay as they are do not pass for differences that shrink by |nu|."""
    made = tables(rate=0.0)
    slow = made["near"].with_columns(predicted=pl.lit(-0.04))
    assert QUESTION.answer(made | {"near": slow}, QUICK).verdicts[0].holds is False
    one_norm = pl.when(pl.col("norm") == "pre").then(math.log(0.5) + 0.2).otherwise(math.log(0.5))
    mixed = made["near"].with_columns(rate=one_norm)
    assert QUESTION.answer(made | {"near": mixed}, QUICK).verdicts[0].holds is False


@pytest.mark.parametrize(("mean", "width", "holds"), [
    (0.0, 0.02, True), (0.02, 0.02, True), (0.04, 0.02, None), (0.0, 0.06, None), (0.06, 0.02, None),
    (0.08, 0.02, False), (-0.08, 0.02, False),
])  # fmt: skip
def test_a_mean_rate_is_judged_with_its_interval(mean: float, width: float, holds: bool | None) -> None:
    """Five seeds whose mean is known to `width`: Student's t of 4 degrees of freedom has 95% within 2.7764."""
    deviation = width * math.sqrt(5) / 2.7764 / math.sqrt(2.5)  # the seeds 0 to 4 have a variance of 2.5
    near = pl.concat([tables()["near"].filter(seed=0).with_columns(seed=pl.lit(seed)) for seed in range(5)])
    rate = math.log(0.5) + mean + (pl.col("seed") - 2) * deviation
    assert study.interval([float(k) for k in range(5)])[1] == pytest.approx(2.7764 / math.sqrt(2), rel=1e-4)
    assert study._near_verdict(near.with_columns(rate=rate)).holds is holds


def test_a_full_run_can_tell_the_rate_under_a_window() -> None:
    """Half of ln|nu| is more than the interval of a mean whose seeds differ by as much as those of an earlier run."""
    nu = float(transverse_modes(bare(1, 8, 1, mask=MASKS["window ±1"]), FULL.tokens).abs()[0])
    seeds = [0.017 * math.sqrt(2) * math.sin(2 * math.pi * k / FULL.seeds) for k in range(FULL.seeds)]
    assert study.interval(seeds)[1] < abs(math.log(nu)) / 4


def test_a_criterion_must_be_right_on_either_side_without_draws_that_theory_settles() -> None:
    made = tables()["stable"]
    wrong = (pl.col("predicted") < 0) & (pl.col("family") == "values, skip, post-norm")
    one_sided = made.with_columns(log10=pl.when(wrong).then(-1.0).otherwise("log10"))
    verdict = study._stable_verdict(one_sided, QUICK)
    assert verdict.holds is False and "held apart in 100.0% of 9 with Λ > 0" in verdict.ours
    assert "collapsed in 72.7% of 11 with Λ < 0" in verdict.ours and "85.0% of the 20 of 20" in verdict.ours
    settled = made.with_columns(log10=pl.when(study.BARRED).then(-1.0).otherwise("log10"))
    assert study._stable_verdict(settled, QUICK).holds is False


def test_what_cannot_be_told_is_said_so() -> None:
    few = tables() | {"trained": tables()["trained"].filter(pl.col("skip") == 0).head(study.FEWEST - 1)}
    assert QUESTION.answer(few, QUICK).verdicts[5].holds is None
    empty = {name: table.clear() for name, table in tables().items()}
    assert [verdict.holds for verdict in (
        study._near_verdict(empty["near"]), study._dropout_verdict(empty["near"], QUICK),
        study._no_basin_verdict(empty["far"], QUICK), study._lifetime_verdict(empty["far"], QUICK),
        study._stable_verdict(empty["stable"], QUICK), study._trained_verdict(empty["trained"]),
    )] == [None] * 6  # fmt: skip


def test_draws_that_no_exponent_decides_are_not_judged() -> None:
    made = tables()["stable"].with_columns(predicted=pl.col("predicted") * 0.5 * study.DECIDED / QUICK.stable_depth)
    assert study._stable_verdict(made, QUICK).holds is None


def test_draws_are_either_judged_or_too_shallow_to_tell() -> None:
    """Of a draw at six nats, just below and just above, two are judged, whatever their sign."""
    made = tables()["stable"]
    edges = (1 - 1e-9, 1.0, 1 + 1e-9)
    decided = study.DECIDED / QUICK.stable_depth
    drawn = pl.concat([made.with_columns(predicted=pl.col("predicted") * edge * decided) for edge in edges])
    barred = len(made.filter(study.BARRED))
    ours = study._stable_verdict(drawn, QUICK).ours
    assert f"of the {2 * (len(made) - barred)} of {3 * (len(made) - barred)} draws" in ours
    assert f"Too shallow to tell: {len(made)} more" in ours


def test_the_figure_is_drawn_from_tables_alone() -> None:
    figure = QUESTION.draw(tables(), QUICK)[QUESTION.name]
    assert len(figure.axes) == 4
