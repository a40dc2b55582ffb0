"""Lower bounds that mean something: terms against slow references, the answer from made-up tables, a tiny run."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.deviation import dissect
from rankscope.nets import Architecture, Transformer
from rankscope.theory import certify
from rankscope_studies.questions import bound_networks as networks
from rankscope_studies.questions import bound_terms as terms
from rankscope_studies.questions import lower_bounds as study
from rankscope_studies.questions.bound_networks import (
    CHANGES,
    HALF_DEPTH,
    NONE,
    ONE_LAYER,
    SCHEMA,
    SKIPLESS,
    BoundTraining,
)
from rankscope_studies.questions.bound_terms import HalfTerms, half_terms, network_rows
from rankscope_studies.questions.lower_bounds import FULL, QUESTION, QUICK
from rankscope_studies.study import Setup
from rankscope_studies.trial import SETTINGS

TEN = math.log(10)
QUARTER = "branches start at a quarter"
TINY = replace(
    QUICK, depths=(1,), width=8, heads=2, context=4, batch=2, steps=2, snapshots=(0,), seeds=1, change_seeds=1,
    changes=(NONE, "skips of weight 1.5"), samples=2,
)  # fmt: skip


def perturbed(arch: Architecture, seed: int = 0) -> Transformer:
    """A random network whose gains and biases are no ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in Transformer.random(arch, seed, "xavier").state_dict().items()
    }
    return Transformer.from_weights(arch, state)


def tokens(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


def off_mean(X: torch.Tensor) -> torch.Tensor:
    return X - X.mean(0)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_terms_are_those_of_a_block_written_out_by_hand(place: str) -> None:
    arch = Architecture(layers=1, width=6, heads=2, norm_place=place, mlp_width=10, attention_skip=0.7, norm_eps=1e-3)  # type: ignore[arg-type]
    net, X = perturbed(arch), tokens(5, 6)
    w = net.weights.layers[0]

    def norm(Y: torch.Tensor, weights: Any) -> torch.Tensor:
        return torch.nn.functional.layer_norm(Y, (6,), weights.gain, weights.bias, 1e-3)

    def linear(Y: torch.Tensor, part: Any) -> torch.Tensor:
        return torch.einsum("td,dhe->the", Y, part.weight) + part.bias

    def attention(Y: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(Y, part) for part in (w.attention.query, w.attention.key, w.attention.value))
        P = (torch.einsum("the,she->hts", q, k) / math.sqrt(3)).softmax(-1)
        patterns.append(P)
        return torch.einsum("hts,she,hed->td", P, v, w.attention.output.weight) + w.attention.output.bias  # type: ignore[operator]

    def mlp(Y: torch.Tensor) -> torch.Tensor:
        assert w.mlp is not None
        return torch.nn.functional.gelu(Y @ w.mlp.up.weight + w.mlp.up.bias) @ w.mlp.down.weight + w.mlp.down.bias  # type: ignore[operator]

    patterns: list[torch.Tensor] = []
    (halves,) = half_terms(net, X)
    for half, branch, weights, skip in zip(
        halves, (attention, mlp), (w.attention_norm, w.mlp_norm), (0.7, 1.0), strict=True
    ):
        inside = norm(X, weights) if place == "pre" else X
        F, R = off_mean(branch(inside)), off_mean(X)
        U = skip * X + branch(inside)
        after = norm(U, weights) if place == "post" else U
        c, a = float(F.norm() / R.norm()), float((F * R).sum() / R.square().sum())
        assert math.exp(half.log_gain) == pytest.approx(c) and half.alignment == pytest.approx(a)
        assert half.weight == skip and math.exp(half.log_growth) == pytest.approx(
            float(off_mean(after).norm() / R.norm())
        )
        n = float(off_mean(after).norm() / off_mean(U).norm())
        assert math.exp(half.log_norm) == pytest.approx(n)
        assert math.exp(half.log_growth) == pytest.approx(math.sqrt((skip + a) ** 2 + c**2 - a**2) * n)
        if half.part == "attention":
            centring = torch.eye(5, dtype=torch.float64) - 1 / 5
            matrices = torch.einsum("dhe,hec->hdc", w.attention.value.weight, w.attention.output.weight)
            pairs = zip(patterns[0], matrices, strict=True)
            reached = sum(
                float(torch.linalg.matrix_norm(centring @ P, 2) * torch.linalg.matrix_norm(W, 2)) for P, W in pairs
            )
        else:
            assert w.mlp is not None
            two = (torch.linalg.matrix_norm(part.weight, 2) for part in (w.mlp.up, w.mlp.down))
            reached = 1.12891 * math.prod(map(float, two))
        stretch = 1.0
        if place == "pre":
            sd = ((X - X.mean(-1, keepdim=True)).square().mean(-1) + 1e-3).sqrt()
            stretch = float(weights.gain.abs().max() / sd.min())  # type: ignore[union-attr]
            ratio = float(off_mean(inside).norm() / R.norm())
            assert half.log_norm_before == pytest.approx(math.log(stretch / ratio))
        assert math.exp(half.log_reached) == pytest.approx(reached * stretch, rel=1e-9)
        X = after


@pytest.mark.parametrize(("place", "norm", "seed"), [*product(["pre", "post"], ["layer", "rms"], [0, 1])])
def test_who_knows_more_proves_more_and_nobody_more_than_is_so(place: str, norm: str, seed: int) -> None:
    arch = Architecture(layers=3, width=8, heads=2, norm=norm, norm_place=place, mask="causal", norm_eps=1e-2)  # type: ignore[arg-type]
    net = perturbed(arch, seed)
    for half in (half for layer in half_terms(net, 2 * tokens(6, 8, seed)) for half in layer):
        rungs = [half.factors[name] for name in ("weights", "sizes", "direction")] + [half.log_growth]
        assert rungs == sorted(rungs)
        assert half.log_reached >= half.log_gain and half.log_norm_after <= half.log_norm
        assert half.log_norm_before >= 0


@pytest.mark.slow
def test_rows_are_the_certificates_and_their_losses_add_up() -> None:
    arch = Architecture(layers=3, width=8, heads=2, norm_place="post")
    net, X = Transformer.random(arch, 1, "xavier"), torch.stack([tokens(5, 8, k) for k in (0, 1)])
    rows = network_rows(net, X)
    table = certify(net, X, theorems=["elementary-skip", "aligned-skip"]).table
    for row, layer in zip(rows, (1, 2, 3), strict=True):
        here = table.filter(theorem="aligned-skip", layer=layer)
        assert row["direction"] == pytest.approx((here["log10_bound"] - here["log10_size"]).min())
        assert row["measured"] == pytest.approx((here["log10_measured"] - here["log10_size"]).min())
        assert row["loose"] == pytest.approx(here["slack"].max())
        lost = sum(r["attention_lost"] + r["mlp_lost"] for r in rows[:layer])
        assert lost == pytest.approx(here["slack"].mean(), abs=1e-8)
        assert row["weights"] <= row["sizes"] <= row["direction"] <= row["measured"]
    by_sizes = [sum(half.factors["sizes"] for layer in half_terms(net, x) for half in layer) for x in X]
    sizes = table.filter(theorem="elementary-skip", layer=3).sort("sample")
    starts = [float(off_mean(x).norm().log()) for x in X]
    for start, factor, bound in zip(starts, by_sizes, sizes["log10_bound"], strict=True):
        assert (start + factor) / TEN == pytest.approx(bound, abs=1e-8) or factor == bound == -math.inf


def test_what_weights_say_starts_from_the_tokens() -> None:
    """Weights so small that norms of them prove something, against the product written out."""
    arch = Architecture(layers=2, width=8, heads=2, norm="none", mlp="none")
    net = Transformer.random(arch, 0, "bert")
    X = tokens(4, 8)
    rows = network_rows(net, X[None])
    output = net.run(X[None]).output[0]
    factors = [math.exp(half.factors["weights"]) for layer in half_terms(net, X) for half in layer]
    expected = math.log10(float(off_mean(X).norm() / output.norm()) * math.prod(factors))
    assert rows[-1]["weights"] == pytest.approx(expected) and 0.5 < math.prod(factors) < 1


@pytest.mark.parametrize("c", [-0.4, 0.4])
def test_a_branch_along_what_is_there_is_bounded_exactly(c: float) -> None:
    """F = c R: direction attains its bound, and sizes theirs where the branch takes away."""
    arch = Architecture(layers=1, width=4, heads=1, norm="none", mlp_width=4, activation="identity", biases=False)
    state, eye = Transformer.random(arch, 0).state_dict(), torch.eye(4, dtype=torch.float64)
    for name in state:
        if "attention.output" in name:
            state[name] = torch.zeros_like(state[name])
        elif ".mlp." in name:
            state[name] = eye if ".up." in name else c * eye
    attention, mlp = half_terms(Transformer.from_weights(arch, state), tokens(3, 4))[0]
    assert attention.log_growth == 0 and attention.log_gain == -math.inf
    assert math.exp(mlp.log_growth) == pytest.approx(1 + c) == pytest.approx(math.exp(mlp.factors["direction"]))
    assert math.exp(mlp.factors["sizes"]) == pytest.approx(0.6)
    assert math.exp(mlp.log_reached) == pytest.approx(0.4)


def test_the_floor_of_a_norm_is_attained_by_tokens_of_one_length() -> None:
    arch = Architecture(layers=1, width=4, heads=1, norm="rms", norm_place="post", mlp="none", norm_eps=0.0)
    state = Transformer.random(arch, 0).state_dict()
    state = {name: torch.zeros_like(t) if "attention.output" in name else t for name, t in state.items()}
    X = 3 * torch.nn.functional.normalize(tokens(5, 4), dim=-1)
    (half,) = half_terms(Transformer.from_weights(arch, state), X)[0]
    assert math.exp(half.log_norm) == pytest.approx(2 / 3) == pytest.approx(math.exp(half.log_norm_after))
    X[0] *= 100  # one long token: lengths alone say nothing any more
    (half,) = half_terms(Transformer.from_weights(arch, state), X)[0]
    assert half.log_norm_after < half.log_norm


def made(direction: float, growth: float) -> HalfTerms:
    """A half block of skip 1 with |w + a| = direction, that multiplies mu by `growth`."""
    return HalfTerms("mlp", 1.0, math.log(5.0), direction - 1, 0.0, math.log(growth), math.inf, 0.0, 0.0)


def test_bounds_of_other_samples_can_be_wrong() -> None:
    first, second = [[made(0.5, 1.0)], [made(2.0, 3.0)]], [[made(1.0, 1.5)], [made(4.0, 20.0)]]
    assert terms.carried([first]) is None
    assert terms.carried([first, second]) == pytest.approx(math.log10(3.0 / 4.0))  # wrong of the first
    assert terms.carried([second, second]) == pytest.approx(math.log10(30.0 / 4.0))


def test_without_skips_direction_alone_is_a_bound_and_sizes_refuse() -> None:
    """Direction as the product of |<F, R>| / |R|^2, from tokens before and after each half."""
    arch = Architecture(layers=2, width=8, heads=2, attention_skip=0.0, mlp_skip=0.0, norm_place="pre")
    net, X = Transformer.random(arch, 0, "xavier"), torch.stack([tokens(4, 8, k) for k in (0, 1)])
    rows = network_rows(net, X)
    assert all(row["weights"] == -math.inf for row in rows)
    assert all(row[name] is None for row in rows for name in ("sizes", "untouched", "lambda"))
    bounds, slacks = [], []
    for x in X:
        start, product_of_a = float(off_mean(x).norm()), 1.0
        states = [x]
        for record in dissect(net, x[None]):
            for half in record.halves:  # without a skip the branch is the next state
                states.append(half.after.tokens()[0])
                R, F = off_mean(states[-2]), off_mean(states[-1])
                product_of_a *= abs(float((R * F).sum() / R.square().sum()))
        size, left = float(states[-1].norm()), float(off_mean(states[-1]).norm())
        bounds.append(math.log10(start * product_of_a / size))
        slacks.append(math.log10(left / (start * product_of_a)))
    assert rows[-1]["direction"] == pytest.approx(min(bounds)) and rows[-1]["loose"] == pytest.approx(max(slacks))
    assert min(slacks) > 0


@pytest.mark.parametrize("c", [-0.4, 2.0])
def test_without_skips_direction_is_exact_where_a_branch_scales(c: float) -> None:
    """Tokens attend to themselves alone, and the branch is c times each: what the bound proves is what is measured."""
    arch = Architecture(layers=2, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0, biases=False)
    eye = torch.eye(4, dtype=torch.float64)
    state = {}
    for name, tensor in Transformer.random(arch, 0).state_dict().items():
        factor = c if "output" in name else 1.0 if "value" in name else 100.0
        state[name] = (factor * eye).reshape(tensor.shape)
    row = network_rows(Transformer.from_weights(arch, state), 3 * eye[None])[-1]
    assert row["direction"] == pytest.approx(row["measured"]) == pytest.approx(0.5 * math.log10(0.75))
    assert row["loose"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_padding_is_in_no_number() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, norm_place="post"), 0, "xavier")
    X = torch.stack([tokens(5, 8, k) for k in (0, 1)])
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    both = network_rows(net, X, padding)
    apart = [network_rows(net, X[:1]), network_rows(net, X[1:, :3])]
    for layer in (0, 1):
        assert both[layer]["direction"] == pytest.approx(min(rows[layer]["direction"] for rows in apart))
        assert both[layer]["mlp_gain"] == pytest.approx(sum(rows[layer]["mlp_gain"] for rows in apart) / 2)


# ---- Networks


@pytest.mark.parametrize("change", [*CHANGES])
def test_a_change_is_what_it_is_called(change: str) -> None:
    sizes = replace(TINY, depths=(4,), width=16)
    plain, changed = (
        networks.training_of(BoundTraining("post", 4, name, 1e-3), sizes, [0], "cpu") for name in (NONE, change)
    )  # fmt: skip
    arch, recipe = changed.models[0].net.arch, changed.recipe
    assert arch.layers == {HALF_DEPTH: 2, ONE_LAYER: 1}.get(change, 4) and arch.norm_place == "post"
    skip = float(change.rpartition(" ")[2]) if change.startswith("skips") else 1.0
    assert arch.attention_skip == arch.mlp_skip == skip
    decay = float(change.rpartition(" ")[2]) if change.startswith("weight decay") else plain.recipe.weight_decay
    assert recipe.weight_decay == decay
    old, new = (training.networks()[0].weights.layers[0] for training in (plain, changed))
    ratio = float(new.attention.output.weight.norm() / old.attention.output.weight.norm())
    down = float(new.mlp.down.weight.norm() / old.mlp.down.weight.norm())  # type: ignore[union-attr]
    expected = {QUARTER: 0.25}.get(change, 1.0)
    if change == "smaller start":
        assert ratio < 1 and down < 1
    elif change not in (HALF_DEPTH, ONE_LAYER):
        assert ratio == pytest.approx(expected) and down == pytest.approx(expected)
    reparametrised = any("parametrizations" in name for name, _ in changed.models[0].named_parameters())
    assert reparametrised == (change == "sigmaReparam")


def test_models_are_at_hand_only_where_they_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "find_spec", lambda name: None if name == "rxnfp" else "found")
    assert networks.models_at_hand() == [name for name in networks.MODELS if name != "rxnfp"]
    monkeypatch.setattr(networks, "find_spec", lambda name: None)
    assert networks.models_at_hand() == []


def test_a_network_that_diverged_has_a_row_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    training = networks.training_of(BoundTraining("pre", 1, NONE, 1e-3), TINY, [0])
    with torch.no_grad():
        training.models[0].net.layers[0].mlp.down.weight.fill_(math.nan)  # type: ignore[union-attr,operator]
    (row,) = networks._read(training, BoundTraining("pre", 1, NONE, 1e-3), 2, 1)
    assert math.isnan(row["loss"]) and "measured" not in row and row["layer"] == row["depth"] == 1


@pytest.mark.slow  # loads trained checkpoints
@pytest.mark.parametrize("name", networks.MODELS)
def test_trained_models_are_read_on_texts_of_their_own(name: str) -> None:
    if name not in networks.models_at_hand():
        pytest.skip(f"{name} is not at hand")
    rows = networks.model_rows(name, replace(QUICK, texts=2))
    trained = rows.filter(stage="trained")
    assert trained["layer"].to_list() == [*range(1, trained["depth"][0] + 1)]
    assert (trained["direction"] <= trained["measured"]).all() and trained["measured"].min() > -1  # type: ignore[operator]


# ---- The answer, from made-up tables


def rows_of(
    kind: str, stage: str, *, depth: int = 4, seed: int = 0, change: str = NONE, loss: float = 2.0,
    measured: float = -0.2, weights: float = -math.inf, sizes: float | None = -1.0, direction: float | None = -0.5,
    attention: float = 0.02, mlp: float = 0.05, step: int | None = None, rate: float | None = QUICK.rates[0],
) -> list[dict[str, Any]]:  # fmt: skip
    """One network: the same numbers at every layer, losses of halves by layer."""
    own = kind != "at hand"
    network = f"{kind}, {QUICK.depths[0]} layers" if own else networks.MINILM
    step = step if step is not None else 0 if stage == "fresh" else QUICK.steps
    return [
        {"network": network, "kind": kind, "depth": depth, "change": change, "rate": rate if own else None,
         "seed": seed, "step": step if own else None, "stage": stage, "loss": loss if own else None,
         "blind": 3.0 if own else None, "layer": layer, "measured": measured, "weights": weights, "sizes": sizes,
         "direction": direction, "loose": None if direction is None else measured - direction,
         "carried": None if direction is None else 0.1, "attention_lost": attention, "mlp_lost": mlp}
        for layer in range(1, depth + 1)
    ]  # fmt: skip


def made_tables(**trained: Any) -> dict[str, pl.DataFrame]:
    """Fresh networks that sizes prove, trained ones as given, skipless ones, a change that mends and a control."""
    rows = []
    for seed in (0, 1):
        for kind in ("pre", "post", "images"):
            rows += rows_of(kind, "fresh", seed=seed, loss=3.0)
            rows += rows_of(kind, "between", seed=seed, step=10) if kind == "pre" else []
            rows += rows_of(kind, "trained", seed=seed, **{"sizes": -3.0, **trained})
        rows += rows_of(SKIPLESS, "trained", seed=seed, sizes=None, direction=-5.0)
        rows += rows_of("pre", "trained", seed=seed, change=QUARTER, loss=2.01 + 0.01 * seed, sizes=-1.5)
        rows += rows_of("pre", "trained", seed=seed, change=ONE_LAYER, depth=1, loss=2.3, sizes=-1.5)
    rows += [*rows_of("at hand", "fresh"), *rows_of("at hand", "trained", **{"sizes": -math.inf, **trained})]
    return {"layers": pl.DataFrame(rows, schema=SCHEMA)}


def verdicts(tables: dict[str, pl.DataFrame]) -> list[bool | None]:
    return [verdict.holds for verdict in study.answer(tables, QUICK).verdicts]


def test_the_answer_that_was_expected() -> None:
    answer = study.answer(made_tables(), QUICK)
    assert [verdict.holds for verdict in answer.verdicts] == [True] * 6
    assert (
        "on an input" in answer.sentence
        and "(measured: 2 times the bound) in 7 of 7 trained networks" in answer.sentence
    )
    assert "Branch sizes prove none (7 of 7 fresh), weight norms none" in answer.sentence
    assert f"with {QUARTER} (pre-norm, rate 0.005) sizes prove every seed, for 0.0" in answer.sentence
    assert "+0.01 (+0.01 to +0.02)" in answer.verdicts[5].ours or "+0.02 (+0.01 to +0.02)" in answer.verdicts[5].ours
    assert "from step" in answer.verdicts[1].ours and "6 of 6" in answer.verdicts[1].ours
    assert len(answer.sentence.split()) <= 60
    assert any("rxnfp" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("place", "trained"),
    [
        (0, {"weights": -1.0}),
        (1, {"sizes": -1.0}),
        (2, {"direction": -2.5}),
        (2, {"direction": -1.9}),  # proved, and too loose: 0.425 decades a layer
        (3, {"attention": 0.06}),
    ],
)
def test_each_hypothesis_can_fail(place: int, trained: dict[str, float]) -> None:
    assert verdicts(made_tables(**trained))[place] is False


@pytest.mark.parametrize(("before", "after", "holds"), [(9, 1, True), (8, 1, False), (9, 2, False), (10, 0, True)])
def test_sizes_are_judged_by_shares_of_networks(before: int, after: int, holds: bool) -> None:
    """Of ten networks fresh and trained, nine tenths at least must be proved before, and a tenth at most after."""
    rows = [
        row for stage, count in (("fresh", before), ("trained", after)) for seed in range(10)
        for row in rows_of("pre", stage, seed=seed, sizes=-1.0 if seed < count else -3.0)
    ]  # fmt: skip
    verdict = study.answer({"layers": pl.DataFrame(rows, schema=SCHEMA)}, QUICK).verdicts[1]
    assert verdict.holds is holds and f"{before} of 10 fresh, {after} of 10 trained" in verdict.ours


def test_nothing_is_said_where_nothing_was_learnt() -> None:
    tables = made_tables(loss=2.9)
    unlearnt = {"layers": tables["layers"].filter(pl.col("kind").is_in(["pre", "post", "images"]))}
    answer = study.answer(unlearnt, QUICK)
    assert [verdict.holds for verdict in answer.verdicts] == [None] * 6
    assert answer.sentence.startswith("It cannot be told")


def test_a_bound_on_a_network_without_skips_would_refute() -> None:
    table = made_tables()["layers"]
    for bound, holds in ((-1.0, False), (-3.0, True), (None, True)):  # a hundredth, or less, is proved
        said = pl.when(pl.col("kind") == SKIPLESS).then(bound).otherwise("direction")
        assert verdicts({"layers": table.with_columns(direction=said)})[4] is holds
    collapsed = pl.when(pl.col("kind") == SKIPLESS).then(-5.0).otherwise("measured")
    assert verdicts({"layers": table.with_columns(measured=collapsed)})[4] is None


def test_a_change_must_be_cheap_better_than_a_shallower_network_and_work_for_every_seed() -> None:
    table = made_tables()["layers"]
    mine = pl.col("change") == QUARTER
    dear = table.with_columns(loss=pl.when(mine).then(2.2).otherwise("loss"))
    assert verdicts({"layers": dear})[5] is False
    shallow = table.with_columns(loss=pl.when(pl.col("change") == ONE_LAYER).then(2.0).otherwise("loss"))
    assert verdicts({"layers": shallow})[5] is False
    once = table.with_columns(sizes=pl.when(mine & (pl.col("seed") == 1)).then(-math.inf).otherwise("sizes"))
    assert verdicts({"layers": once})[5] is False
    assert "sizes prove every seed" not in study.answer({"layers": once}, QUICK).sentence
    idle = table.with_columns(loss=pl.when(mine).then(2.9).otherwise("loss"))  # provable, and it has not learnt
    assert verdicts({"layers": idle})[5] is False
    assert "sizes prove every seed" not in study.answer({"layers": idle}, QUICK).sentence
    proved = table.with_columns(sizes=pl.when(pl.col("change") == NONE).then(-1.0).otherwise("sizes"))
    assert verdicts({"layers": proved})[5] is None


def test_a_change_is_not_judged_where_seeds_disagree() -> None:
    table = made_tables()["layers"]

    def with_losses(**losses: tuple[float, float]) -> bool | None:
        changed = table
        for change, by_seed in losses.items():
            name = {"quarter": QUARTER, "shallow": ONE_LAYER}[change]
            for seed, loss in enumerate(by_seed):
                mine = (pl.col("change") == name) & (pl.col("seed") == seed)
                changed = changed.with_columns(loss=pl.when(mine).then(loss).otherwise("loss"))
        return verdicts({"layers": changed})[5]

    assert with_losses(quarter=(2.05, 2.08)) is True
    assert with_losses(quarter=(2.05, 2.12)) is None  # cheap with one seed alone, though in the mean
    assert with_losses(quarter=(2.12, 2.14)) is False
    assert with_losses(quarter=(2.05, 2.08), shallow=(2.07, 2.3)) is None  # ranges overlap
    assert with_losses(quarter=(2.05, 2.08), shallow=(2.01, 2.02)) is False
    assert with_losses(quarter=(2.05, 2.08), shallow=(2.09, 2.10)) is True


def test_networks_that_did_not_learn_are_counted_and_left_out() -> None:
    table = made_tables()["layers"]
    post = (pl.col("kind") == "post") & (pl.col("seed") == 1) & (pl.col("stage") == "trained")
    idle = table.with_columns(
        loss=pl.when(post).then(2.9).otherwise("loss"), mlp_lost=pl.when(post).then(9.0).otherwise("mlp_lost")
    )
    answer = study.answer({"layers": idle}, QUICK)
    assert "6 of 6 trained networks with skips. " in answer.sentence
    assert any("post, 4 layers (1 of 2 seeds)" in note for note in answer.notes)
    ladder, _, parts, _ = answer.evidence
    assert ["post, 4 layers", "trained; 1 of 2 did not learn"] in [row[:2] for row in ladder.rows]
    assert [row[4] for row in parts.rows if row[:2] == ["post, 4 layers", "MLP"]] == ["0.05"]
    diverged = idle.with_columns(measured=pl.when(post).then(None).otherwise("measured"))
    assert any("post, 4 layers (1 of 2 seeds)" in note for note in study.answer({"layers": diverged}, QUICK).notes)


def at_rate(rate: float, losses: Sequence[float], change: str = QUARTER, **numbers: Any) -> list[dict[str, Any]]:
    """Trained pre-norm networks of one change and rate, with a loss for each seed."""
    depth = 1 if change == ONE_LAYER else 4
    return [
        row for seed, loss in enumerate(losses)
        for row in rows_of("pre", "trained", change=change, rate=rate, seed=seed, loss=loss, depth=depth, **numbers)
    ]  # fmt: skip


def made_with(*rows: list[dict[str, Any]], without: str = "") -> pl.DataFrame:
    """The made-up table with further networks, and without those of a change."""
    table = made_tables()["layers"].filter(pl.col("change") != without)
    return pl.DataFrame([*table.rows(named=True), *(row for part in rows for row in part)], schema=SCHEMA)


def test_costs_are_against_unchanged_networks_at_their_best_rate_and_a_rate_that_diverges_is_none() -> None:
    sizes = replace(QUICK, rates=(QUICK.rates[0], 1e-2))
    table = made_with(at_rate(1e-2, (1.5, math.nan)), at_rate(1e-2, (1.9, 1.9), NONE, sizes=-3.0))
    tried = study.changes(table, sizes)
    row = tried.filter(pl.col("shown"), change=QUARTER).row(0, named=True)
    assert row["rate"] == QUICK.rates[0] and row["seeds"] == row["proved"] == 2 and row["best"]
    assert row["cost"] == pytest.approx(2.015 - 1.9) and row["cost_most"] == pytest.approx(2.02 - 1.9)
    base = tried.filter(pl.col("shown"), change=NONE).row(0, named=True)
    assert base["rate"] == 1e-2 and base["at_end"] and base["cost"] == 0
    assert not tried.filter(change=ONE_LAYER)["at_end"][0]  # one was tried
    wider = pl.concat([table, pl.DataFrame(at_rate(2e-2, (1.95, 1.95), NONE, sizes=-3.0), schema=SCHEMA)])
    inside = study.changes(wider, replace(sizes, rates=(*sizes.rates, 2e-2))).filter(pl.col("best"), change=NONE)
    assert inside["rate"][0] == 1e-2 and not inside["at_end"][0]


def test_the_price_is_that_of_the_cheapest_change_and_rate_that_prove_every_seed() -> None:
    """Quarters prove at the lower rate alone, at a higher loss; skips of 1.5 prove at both, and cost more."""
    skips, high, low = "skips of weight 1.5", QUICK.rates[0], 1e-4
    table = made_with(
        at_rate(high, (2.0, 2.01), sizes=-2.5), at_rate(low, (2.05, 2.06)), at_rate(high, (2.07, 2.08), skips),
        at_rate(low, (2.3, 2.3), skips), without=QUARTER,
    )  # fmt: skip
    sizes = replace(QUICK, rates=(high, low))
    tried = study.changes(table, sizes)
    shown = tried.filter(pl.col("shown"))
    assert {row["change"]: row["rate"] for row in shown.iter_rows(named=True)} == {
        NONE: high, QUARTER: low, skips: high, ONE_LAYER: high,
    }  # fmt: skip
    answer = study.answer({"layers": table}, sizes)
    verdict = answer.verdicts[5]
    assert verdict.holds is True and f"{QUARTER} (pre-norm, rate 0.0001): +0.0" in verdict.ours
    assert f"with {QUARTER} (pre-norm, rate 0.0001) sizes prove every seed" in answer.sentence
    cells = {row[1]: row[2] for row in answer.evidence[-1].rows}
    assert cells[QUARTER] == "0.0001 (cheapest proof, end of those tried)"
    assert cells[skips] == "0.005 (cheapest proof, lowest loss, end of those tried)"
    panel = study.draw({"layers": table}, sizes)[QUESTION.name].axes[3]
    heights = {float(line.get_xydata()[0, 1]) for line in panel.lines if line.get_marker() == "o"}  # type: ignore[index,arg-type]
    assert heights == {-3.0, -1.0, -1.5}  # no mark is at -2.5, where the lowest loss of quarters is
    dear = [row | {"loss": 2.2} if row["rate"] == low else row for row in table.rows(named=True)]
    beside = study.answer({"layers": pl.DataFrame(dear, schema=SCHEMA)}, sizes).verdicts[5]
    assert beside.holds is True and beside.ours.startswith(f"{skips} (pre-norm, rate 0.005)")
    none_proves = table.with_columns(sizes=pl.when(pl.col("rate") == low).then(-4.0).otherwise("sizes"))
    worse = none_proves.with_columns(loss=pl.when(pl.col("change") == skips).then(2.2).otherwise("loss"))
    assert study.answer({"layers": worse}, sizes).verdicts[5].holds is False  # dear
    torn = pl.when((pl.col("change") == skips) & (pl.col("seed") == 1)).then(2.2).otherwise("loss")
    assert study.answer({"layers": none_proves.with_columns(loss=torn)}, sizes).verdicts[5].holds is None


def test_a_lower_rate_alone_is_a_change_of_training() -> None:
    table = made_with(at_rate(1e-4, (2.005, 2.005), NONE))
    sizes = replace(QUICK, rates=(QUICK.rates[0], 1e-4))
    answer = study.answer({"layers": table}, sizes)
    assert answer.verdicts[5].holds is True and "with no other change (pre-norm, rate 0.0001)" in answer.sentence
    rates = [row[2] for row in answer.evidence[-1].rows if row[1] == NONE]
    assert len(rates) == 2 and any("lowest loss" in rate for rate in rates)  # what others are compared with is shown


def test_the_table_of_changes_says_how_many_rates_are_ends_of_the_grid() -> None:
    single = study.answer(made_tables(), QUICK).evidence[-1]
    assert "grid" not in single.title and "grid" not in single.note
    sizes = replace(QUICK, rates=(1e-4, QUICK.rates[0], 1e-2))
    others = [at_rate(rate, (2.5, 2.5), change) for rate in (1e-4, 1e-2) for change in (NONE, QUARTER, ONE_LAYER)]
    inside = study.answer({"layers": made_with(*others)}, sizes).evidence[-1]
    assert inside.title.endswith("else at the best of 3, an end of the grid for 0 of 3")
    better = at_rate(3e-2, (1.9, 1.9), NONE, sizes=-3.0)
    assert "for 1 of 3" in study.answer({"layers": made_with(*others, better)}, sizes).evidence[-1].title
    ends = [at_rate(1e-4, (2.5, 2.5), change) for change in (NONE, QUARTER, ONE_LAYER)]
    table = study.answer({"layers": made_with(*ends)}, sizes).evidence[-1]
    assert table.title.endswith("an end of the grid for all 3") and "for all 3 changes" in table.note


def test_the_answer_names_where_direction_fails() -> None:
    table = made_tables()["layers"]
    assert "post-norm, 4 layers" not in study.answer({"layers": table}, QUICK).sentence
    trained = pl.col("stage") == "trained"
    one = trained & (pl.col("kind") == "post") & (pl.col("seed") == 1)
    failing = table.with_columns(direction=pl.when(one).then(-2.5).otherwise("direction"))
    answer = study.answer({"layers": failing}, QUICK)
    assert "in 6 of 7 trained networks with skips (post-norm, 4 layers: 1 of 2)" in answer.sentence
    assert "(post-norm, 4 layers: 1 of 2)" in answer.verdicts[2].ours
    many = table.with_columns(direction=pl.when(trained).then(-2.5).otherwise("direction"))
    sentence = study.answer({"layers": many}, QUICK).sentence
    assert "in none of 7" in sentence and "pre-norm, 4 layers: 0 of 2" in sentence and "2 more kinds" in sentence


def test_shares_lost_in_mlps_are_told_by_kind() -> None:
    table = made_tables()["layers"]
    at_hand = table.with_columns(mlp_lost=pl.when(pl.col("kind") == "at hand").then(0.18).otherwise("mlp_lost"))
    ours = study.answer({"layers": at_hand}, QUICK).verdicts[3].ours
    assert "2 post-norm 71%" in ours and "1 models at hand 90%" in ours


def test_seeds_that_did_not_learn_are_left_out_of_curves_over_training() -> None:
    table = made_tables()["layers"]
    post = (pl.col("kind") == "post") & (pl.col("seed") == 1)
    low = table.with_columns(
        loss=pl.when(post & (pl.col("stage") == "trained")).then(2.9).otherwise("loss"),
        direction=pl.when(post).then(-4.0).otherwise("direction"),
    )
    axes = study.draw({"layers": low}, QUICK)[QUESTION.name].axes[1]
    assert axes.get_title(loc="left").startswith("4 layers")
    lines = {line.get_label(): line for line in axes.lines}
    assert {*lines["post"].get_ydata()} == {-0.5}
    skipless = table.with_columns(loss=pl.when(pl.col("kind") == SKIPLESS).then(2.9).otherwise("loss"))
    labels = [line.get_label() for line in study.draw({"layers": skipless}, QUICK)[QUESTION.name].axes[1].lines]
    assert f"{SKIPLESS} (did not learn)" in labels


def test_the_step_from_which_on_sizes_prove_nothing() -> None:
    rows = [
        row for step, bound in ((0, -1.0), (10, -3.0), (40, -1.5), (60, -4.0), (100, -5.0))
        for row in rows_of("pre", "between", step=step, sizes=bound)
    ]  # fmt: skip
    never = [row for step in (0, 100) for row in rows_of("post", "between", step=step, sizes=-9.0)]
    kept = [row for step in (0, 100) for row in rows_of("images", "between", step=step)]
    ends = study.last_layers(pl.DataFrame([*rows, *never, *kept], schema=SCHEMA))
    assert sorted(study.lost_from(ends), key=str) == [60, None]


def test_layers_proved_are_counted_from_the_first() -> None:
    rows = rows_of("pre", "trained")
    rows[2]["sizes"] = -math.inf
    assert study._leading(pl.DataFrame(rows, schema=SCHEMA), "sizes") == [2]
    assert study._leading(pl.DataFrame(rows, schema=SCHEMA), "weights") == [0]


def test_made_up_tables_are_drawn() -> None:
    figure = study.draw(made_tables(), QUICK)[QUESTION.name]
    assert len(figure.axes) == 4
    silent = made_tables()["layers"].with_columns(sizes=pl.lit(-math.inf))  # every change proves nothing
    drawn = study.draw({"layers": silent}, QUICK)[QUESTION.name].axes[3]
    heights = [float(line.get_xydata()[0, 1]) for line in drawn.lines if line.get_marker() == "o"]  # type: ignore[index,arg-type]
    assert len(heights) == 3 and len({*heights}) == 1  # a height would look like a value
    assert drawn.get_ylim()[0] < heights[0] < study.FLOOR_DRAWN


def test_bars_of_halves_stand_end_to_end() -> None:
    """In each of four layers attention loses 0.02 decades, with one of two pre-norm seeds 9 times that; MLPs 0.05."""
    table = made_tables()["layers"]
    one = (pl.col("kind") == "pre") & (pl.col("seed") == 1)
    table = table.with_columns(attention_lost=pl.col("attention_lost") * pl.when(one).then(9).otherwise(1))
    axes = study.draw({"layers": table}, QUICK)[QUESTION.name].axes[2]
    networks_drawn = [label.get_text() for label in axes.get_yticklabels()]
    attention, mlp = ([(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers)
    widths = [4 * 0.02 * (5 if network.startswith("pre") else 1) for network in networks_drawn]
    assert len(widths) == 4 and sorted(widths)[-1] == pytest.approx(0.4)
    for (left, width), (begin, length), expected in zip(attention, mlp, widths, strict=True):
        assert (left, width, begin, length) == pytest.approx((0, expected, expected, 0.2))
    assert axes.get_xlim() == pytest.approx((0, 1.35 * 0.6))


def test_a_full_run_is_cut_into_many_parts() -> None:
    trainings = len(SETTINGS) * len(FULL.depths) + len(FULL.changed) * len(FULL.changes) * len(FULL.rates)
    assert trainings >= 12 and {*FULL.changes} == {*CHANGES} and {*FULL.changed} <= {*SETTINGS}
    assert max(FULL.snapshots) < FULL.steps and FULL.samples > 1


def test_a_tiny_study_is_answered_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "models_at_hand", list)
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    count = len(said)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == count == len(SETTINGS) + 1 and first.tables["layers"].equals(again.tables["layers"])
    table = first.tables["layers"]
    assert {*table["stage"]} == {"fresh", "trained"} and table["measured"].is_not_null().all()
    assert first.figures[QUESTION.name].axes and len(first.comparisons) == len(QUESTION.hypotheses)
