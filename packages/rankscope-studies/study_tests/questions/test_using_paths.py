"""Uses of paths: what is trained and taken away at test time, and that the answer follows the tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import StudyError
from rankscope.lab import Batch, Initialisation, Interface, Model, Recipe, Training
from rankscope.metrics import relative_residual
from rankscope.nets import Architecture, Dropout, Transformer
from rankscope.paths import decompose
from rankscope_studies.dong2021.tasks import Sort
from rankscope_studies.path_model import EPS
from rankscope_studies.questions import path_networks, path_uses
from rankscope_studies.questions import using_paths as study
from rankscope_studies.questions.path_networks import CHANCE
from rankscope_studies.questions.path_uses import (
    ALONE,
    DIVERSE,
    DROPOUT,
    LONG_PENALTY,
    PATH_DROPOUT,
    ROWS,
    SHORT_PENALTY,
    PathUseModel,
    PathUseTraining,
    Use,
    UseSizes,
)
from rankscope_studies.questions.using_paths import FULL, MEASURES, QUESTION, QUICK
from rankscope_studies.study import Setup
from tests.builders import awake
from tests.lab.test_steps import CpuUse

TINY = UseSizes(
    ("sort",), layers=2, first_seed=0, seeds=2, widths=(6,), heads=(2,), steps=(2,), batches=(4,), rates=(1e-3,),
    context=8, samples=32, dropouts=(0.4,), chances=(0.4,), penalties=(1.0,), evaluation_samples=4, probe_samples=2,
)  # fmt: skip
ATTENTION = {"mlp": "none", "norm": "layer", "norm_place": "post", "norm_eps": 1e-12, "biases": ("query", "key")}
DECODER = {"mlp": "none", "biases": ("query", "key"), "norm_place": "pre", "final_norm": True, "norm_eps": 1e-12}
TASK, LAYERS, SAMPLES = Interface(classes=5, symbols=7), 3, 2
SYMBOLS = torch.tensor([[0, 3, 1, 6, 2], [5, 5, 2, 0, 4]])
ONES = (1.0,) * (LAYERS + 1)


def model(penalties: tuple[float, ...] = (), lengths: tuple[float, ...] = ONES, **fields: Any) -> PathUseModel:
    """A model in float64 whose weights are all of a size that shows."""
    net = awake(Architecture(layers=LAYERS, width=8, heads=2, **fields or ATTENTION), seed=3)
    gains = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items() if name.endswith("gain")}
    net = Transformer.from_weights(net.arch, net.state_dict() | gains)  # as the study keeps them
    return PathUseModel(net, TASK, 1.0, seed=4, lengths=lengths, samples=SAMPLES, penalties=penalties)


@pytest.mark.parametrize("fields", [ATTENTION, DECODER])
def test_plain_training_and_ordinary_dropout_are_of_one_function(fields: dict[str, Any]) -> None:
    """All lengths with weight 1 are the network itself, which `Model` runs where there is dropout."""
    one = model(**fields)
    drop = Dropout.seeded(0.0, 0, torch.device("cpu"))
    for mode in (one.train(), one.eval()):
        torch.testing.assert_close(mode(SYMBOLS), Model.forward(one, SYMBOLS), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(mode(SYMBOLS), one(SYMBOLS, None, drop), rtol=1e-8, atol=1e-9)


def test_every_sample_has_lengths_weighted_by_its_own_weights_in_training_alone() -> None:
    one = model().train()
    exact = decompose(one.network(), one.tokens(SYMBOLS).detach()).by_length().embedding
    one.weights.copy_(torch.tensor([[0.0, 1.0], [2.0, 0.5], [1.0, 0.0], [0.0, 3.0]]))
    sums = torch.stack([2 * exact[1, 0] + exact[2, 0], exact[0, 1] + 0.5 * exact[1, 1] + 3 * exact[3, 1]])
    expected = one.head(F.layer_norm(sums, (8,), eps=EPS))
    torch.testing.assert_close(one(SYMBOLS), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one(SYMBOLS[:1]), expected[:1], rtol=1e-9, atol=1e-9)  # the last, smaller batch
    torch.testing.assert_close(one.eval()(SYMBOLS), Model.forward(one, SYMBOLS), rtol=1e-8, atol=1e-9)


def test_a_penalty_is_a_share_of_norms_added_to_the_loss_of_a_step() -> None:
    penalties = (0.3, 0.0, 0.0, 2.0)
    one = model(penalties).train()
    norms = decompose(one.network(), one.tokens(SYMBOLS).detach()).by_length().embedding.norm(dim=-1)
    shares = norms / norms.sum(0)
    output = one(SYMBOLS)
    assert output.shape == (2, 5, 6) and one.eval()(SYMBOLS).shape == (2, 5, 5)
    torch.testing.assert_close(output[..., 5], 0.3 * shares[0] + 2 * shares[3], rtol=1e-8, atol=1e-8)
    task = Sort(64, 16)
    arch = task.architecture(2, 8, 2)
    both = []
    for paid in ((), (0.5, 0.5, 0.5)):  # all lengths at the same penalty: shares add up to one
        make = partial(PathUseModel, lengths=(1.0,) * 3, samples=8, penalties=paid)
        recipe, start = Recipe(steps=2, batch_size=8), Initialisation("kaiming", 1.0)
        both.append(
            PathUseTraining(
                task, arch, recipe, seeds=[0, 1], initialisation=start, model=make, dtype=torch.float64
            ).finish()
        )
    torch.testing.assert_close(torch.stack(both[1].losses), torch.stack(both[0].losses) + 0.5, rtol=1e-6, atol=1e-6)
    assert both[0].evaluate(8)[1].loss == pytest.approx(both[1].evaluate(8)[1].loss, rel=1e-5)


@pytest.mark.parametrize(("use", "up"), [(Use(SHORT_PENALTY, 10.0), True), (Use(LONG_PENALTY, 10.0), False)])
def test_a_penalty_drives_lengths_away(use: Use, up: bool) -> None:
    sizes = replace(TINY, steps=(12,), rates=(3e-2,))

    def long_share(kind: Use) -> Tensor:
        training = path_uses.training_of("sort", kind, sizes, [0, 1])
        path_uses.finish_training(training, kind)
        batch = training.task.held_out(16)
        models: list[Any] = training.models
        with torch.no_grad():
            terms = [one.terms(batch.inputs) for one in models]
        return torch.stack([path_networks.size_shares(stack)[sizes.long :].sum(0).mean() for stack in terms])

    moved, plain = long_share(use), long_share(Use())
    assert bool(((moved > plain) if up else (moved < plain)).all())


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_noise_of_every_kind_has_the_mean_and_variance_of_dropout(p: float) -> None:
    lengths, steps = 4, 4000
    for kind in (PATH_DROPOUT, DIVERSE):
        drawn = path_uses.drawn_weights(Use(kind, p), lengths, 8, steps, seed=1)
        assert drawn.shape == (steps, lengths, 8) and bool((drawn.sum(1) > 0).all())  # no sample reads nothing
        assert torch.equal(drawn, path_uses.drawn_weights(Use(kind, p), lengths, 8, steps, seed=1))
        assert not torch.equal(drawn, path_uses.drawn_weights(Use(kind, p), lengths, 8, steps, seed=2))
        error = 5 * math.sqrt(p / (1 - p) / (8 * steps))
        assert drawn.mean((0, 2)).tolist() == pytest.approx([1.0] * lengths, abs=error)
        # Without draws that are all zero, those left are less alike than dropout's by a known share.
        wanted = (1 - p**lengths) / (1 - p) - 1 if kind == PATH_DROPOUT else p / (1 - p)
        assert drawn.var((0, 2)).tolist() == pytest.approx([wanted] * lengths, rel=0.1)
    dropped = path_uses.drawn_weights(Use(PATH_DROPOUT, p), lengths, 8, steps, seed=1)
    kept = (1 - p) / (1 - p**lengths)  # the chance that a length is kept, given that one of all is
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / kept], rel=1e-6)
    assert path_uses.drawn_weights(Use(), lengths, 8, 3, seed=0).eq(1).all()


def test_each_step_is_made_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    use, used = Use(PATH_DROPOUT, 0.4), []
    training = path_uses.training_of("sort", use, replace(TINY, steps=(3,)), [0, 1])
    losses = training._batch_losses

    def watched(*given: Any) -> Tensor:
        used.append([one.weights.clone() for one in training.models])  # type: ignore[operator]
        return losses(*given)

    monkeypatch.setattr(training, "_batch_losses", watched)
    path_uses.finish_training(training, use)
    for seed in (0, 1):
        drawn = path_uses.drawn_weights(use, 3, 4, 3, seed)
        assert all(torch.equal(step[seed], wanted) for step, wanted in zip(used, drawn, strict=True))


def test_a_step_with_weights_and_penalties_waits_for_nothing() -> None:
    """On torch's device without numbers, where a question has no answer, as when a step is recorded on a GPU."""
    for use in (Use(PATH_DROPOUT, 0.4), Use(LONG_PENALTY, 1.0)):
        training = path_uses.training_of("sort", use, TINY, [0, 1], "meta")
        for one in training.models:
            one.train()
        batches = training._batches(0)
        training._batch_losses(batches)  # masks are made in the first
        with CpuUse() as watch:
            training._batch_losses(batches).sum().backward()
            training._clip()
        assert watch.calls > 100 and watch.waited == [] and training.learner.refusal is None  # type: ignore[union-attr]


def test_what_is_taken_away_is_gone() -> None:
    """Every number again, from networks and terms that are changed by other code."""
    one = model().float()
    task = Sort(64, 16)
    symbols = torch.randint(7, (60, 5), generator=torch.Generator().manual_seed(0))
    batch = Batch(symbols, symbols % 5)
    rows = {(name, at): value for name, at, value in path_uses.evaluation_rows(one, task, batch, 60)}
    precise = one.double().eval()
    net, X = precise.network(), precise.tokens(symbols).detach()
    terms = decompose(net, X).by_length()

    def right(Y: Tensor) -> float:
        return float((precise.head(Y).argmax(-1) == batch.labels).float().mean())

    def normed(Y: Tensor) -> Tensor:
        return F.layer_norm(Y, (8,), eps=EPS)

    whole = net.run(X).output
    assert rows["accuracy", None] == right(whole)
    assert rows["loss", None] == pytest.approx(F.cross_entropy(precise.head(whole).mT, batch.labels).item(), rel=1e-5)
    for layer in range(LAYERS):  # attention whose output is zero leaves the skip; the norm of a normed token is itself
        state = net.state_dict()
        state[f"layers.{layer}.attention.output.weight"] = torch.zeros(2, 4, 8, dtype=torch.float64)
        assert rows["layers", layer + 1] == right(Transformer.from_weights(net.arch, state).run(X).output)
    for draw, heads in enumerate(path_uses.heads_out(LAYERS, 2)):
        state = net.state_dict()
        for layer, removed in heads.items():
            name = f"layers.{layer - 1}.attention.output.weight"
            state[name] = state[name].clone()
            state[name][removed] = 0.0
        assert sum(map(len, heads.values())) == 2  # a quarter of six, rounded up
        assert rows["heads", draw] == right(Transformer.from_weights(net.arch, state).run(X).output)
    for length in range(LAYERS + 1):
        alone = terms.embedding[length]
        assert rows["one length", length] == right(normed(alone))
        assert rows["length out", length] == right(normed(terms.output - alone))
        share = (alone * terms.output).sum((-2, -1)) / terms.output.square().sum((-2, -1))
        assert rows["share", length] == pytest.approx(float(share.mean()), rel=1e-6)
        norms = terms.embedding.norm(dim=-1)
        size = float((norms[length] / norms.sum(0)).mean())
        assert rows["size", length] == pytest.approx(size, rel=1e-6)
        assert path_networks.mean_sizes(net, X)[length] == pytest.approx(size, rel=1e-6)
    assert rows["residual", None] == pytest.approx(float(relative_residual(whole).mean()), rel=1e-6)
    noise = torch.from_numpy(np.random.default_rng(path_uses.SEED).standard_normal(X.shape))
    assert rows["noise", None] == right(
        net.run(X + path_uses.NOISE * float(X.norm() / math.sqrt(X.numel())) * noise).output
    )
    single = {name for name, *_ in path_uses.evaluation_rows(model(lengths=(1.0, 0.0, 0.0, 0.0)), task, batch, 2)}
    assert single == {"loss", "accuracy"}


def test_bad_uses_are_refused() -> None:
    with pytest.raises(StudyError, match="kind"):
        Use("magic", 0.1)
    for p in (1.0, -0.1):
        with pytest.raises(StudyError, match="chance"):
            Use(DROPOUT, p)
    assert Use(LONG_PENALTY, 3.0).label == "penalty on long 3" and Use().label == "plain"


def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == 2 + 2 + 4  # plain and token by token, a piece for each seed with dropout, four uses
    table = first.tables["uses"]
    assert table.equals(again.tables["uses"]) and first.summary == again.summary
    assert first.figures[QUESTION.name].axes and len(first.page_tables) == 2
    assert table.filter(quantity="loss")["value"].is_finite().all()
    found = table.filter(quantity="share").group_by("kind", "strength", "seed").agg(pl.col("value").sum())
    assert len(found) == 6 * 2 and found["value"].to_list() == pytest.approx([1.0] * 12)  # not of token by token


@pytest.mark.slow  # trains every use on every task
def test_every_task_and_use_trains(tmp_path: Path) -> None:
    sizes = replace(
        TINY,
        tasks=FULL.tasks,
        dropouts=FULL.dropouts,
        chances=FULL.chances,
        penalties=FULL.penalties,
        widths=(8, 8),
        heads=(2, 2),
        steps=(2, 2),
        batches=(4, 4),
        rates=(1e-3, 1e-3),
    )
    result = QUESTION.run(Setup(tmp_path), sizes)
    assert {*result.tables["uses"]["task"]} == {"sort", "text"} and len(result.page_tables) == 3
    assert result.tables["uses"].filter(quantity="loss")["value"].is_finite().all()


def test_sorting_is_of_the_papers_size() -> None:
    training: Training = path_uses.training_of("sort", Use(DIVERSE, 0.1), FULL, [0])
    arch = training.models[0].net.arch
    assert (arch.layers, arch.width, arch.heads, arch.mlp, arch.norm_place) == (6, 48, 2, "none", "post")
    recipe = training.recipe
    assert len(training.task.batch(2000, 0, 0)) == 1000 and recipe.steps * recipe.batch_size == 60 * 1000
    assert path_uses.training_of("sort", Use(DROPOUT, 0.4), FULL, [0]).initialisation.dropout == 0.4
    penalised: Any = path_uses.training_of("sort", Use(SHORT_PENALTY, 2.0), FULL, [0]).models[0]
    assert penalised.penalties.tolist() == [2, 2, 2, 0, 0, 0, 0]
    alone: Any = path_uses.training_of("sort", Use(ALONE), FULL, [0]).models[0]
    assert alone.lengths.tolist() == [1, 0, 0, 0, 0, 0, 0] and torch.equal(alone.weights[:, 7], alone.lengths)


# ---- The answer, from made-up tables

Made = float | Sequence[float] | None
Change = Callable[[Use, str], Made]


def tables(change: Change = lambda use, quantity: None, sizes: UseSizes = QUICK) -> dict[str, pl.DataFrame]:
    """Made-up tables of the quick study: every way to train has 0.7 and seeds that differ by 0.01, but for changes."""
    rows = []

    def put(task: str, use: Use, quantity: str, at: int | None, value: float | Sequence[float]) -> None:
        for place, seed in enumerate(sizes.networks):
            mine = value + 0.01 * place if isinstance(value, float) else value[place]
            rows.append((task, use.kind, use.strength, seed, quantity, at, mine))

    for task in sizes.tasks:
        for use in (Use(ALONE), *sizes.controls, *sizes.uses):
            for quantity in (*MEASURES, "loss", "residual"):
                value = change(use, quantity)
                put(task, use, quantity, None, (0.3 if use.kind == ALONE else 0.7) if value is None else value)
            size = change(use, "size")
            for k in (2, 3):  # two long lengths of equal norms; their shares of the output cancel, and decide nothing
                put(task, use, "size", k, 0.15 if size is None else size)
                put(task, use, "share", k, 5.0 * (-1) ** k)
    return {"uses": pl.DataFrame(rows, schema=ROWS, orient="row")}


def changed(**values: Any) -> Change:
    """A change of one quantity of some kinds, at their larger strength."""
    kinds = {"path": PATH_DROPOUT, "diverse": DIVERSE, "short": SHORT_PENALTY, "long": LONG_PENALTY, "drop": DROPOUT}
    wanted = {(kinds[name], quantity): value for name, (quantity, value) in values.items()}
    return lambda use, quantity: wanted.get((use.kind, quantity)) if use.strength in (0.4, 1.0) else None


DOUBTFUL = (0.701, 0.713, 0.75, 0.79, 0.8)  # above every control with all seeds, by 0.001 to 0.06
MIXED = (0.75, 0.75, 0.75, 0.75, 0.7)  # above every control with all seeds but one, which has 0.74


def test_the_sentence_turns_with_the_numbers() -> None:
    def sentence(sizes: UseSizes = QUICK, **values: Any) -> str:
        found = QUESTION.answer(tables(changed(**values), sizes), sizes).sentence
        assert len(found.split()) <= 60
        return found

    assert sentence().startswith("No: no gain was shown in accuracy (at best 0.72 against 0.72 on sort) or robustness ")
    lengths = sentence(path=("one length", 0.9), drop=("one length", 0.8))
    wanted = "with one length alone, path dropout 0.4 has 0.92 on sort (plain 0.72, best control 0.82). "
    assert lengths.startswith(f"Against lost lengths: {wanted}")
    out = sentence(diverse=("length out", 0.9))
    assert out.startswith("Against lost lengths: with one length out, diverse lengths 0.4 has 0.92 on sort (")
    robust = sentence(long=("layers", 0.8))
    assert (
        robust.startswith("For robustness to removed layers: ")
        and "with one layer out, penalty on long 1 has 0.82" in robust
    )
    assert sentence(diverse=("accuracy", 0.8)).startswith(
        "For accuracy: with all in place, diverse lengths 0.4 has 0.82"
    )
    assert sentence(diverse=("accuracy", 0.8), path=("noise", 0.8)).startswith("Yes: ")
    # Gains are of the same seed: they may be smaller than seeds differ.
    assert sentence(diverse=("accuracy", 0.72)).startswith("Slightly, for accuracy: ")
    several = sentence(long=("layers", 0.72), path=("noise", 0.73))
    assert several.startswith("Slightly, for robustness to noise and removed layers: ")
    # A difference that every seed has may be chance where seeds differ much in it.
    doubtful = sentence(long=("layers", DOUBTFUL))
    assert (
        doubtful.startswith("No gain could be shown: ") and " beyond chance (0.75 against 0.72 with one l" in doubtful
    )
    # A gain that ordinary dropout has as well is none, nor is one that is small; seeds that disagree show nothing.
    assert sentence(diverse=("accuracy", 0.8), drop=("accuracy", 0.8)).startswith("No: ")
    assert sentence(diverse=("accuracy", 0.705)).startswith("No: ")
    assert sentence(diverse=("accuracy", MIXED)).startswith("No gain could be shown: ")
    few = replace(QUICK, seeds=2)
    assert sentence(few, diverse=("accuracy", 0.8)).startswith("No gain could be shown: ")
    assert sentence(few, path=("one length", 0.9)).startswith("No gain could be shown: ")
    blind = QUESTION.answer(tables(lambda use, quantity: 0.3 if quantity == "accuracy" else None), QUICK)
    assert blind.sentence.startswith("It cannot be told: ") and [v.holds for v in blind.verdicts[:4]] == [None] * 4
    both = replace(FULL, layers=3)
    assert " on sort, " in sentence(both) and sentence(both, long=("heads", 0.8), path=("one length", 0.9))
    mixed, better = tables(sizes=both)["uses"], tables(changed(long=("heads", 0.8)), both)["uses"]
    mixed = pl.concat([mixed.filter(task="sort"), better.filter(task="text")])  # a gain on one of two tasks
    told = QUESTION.answer({"uses": mixed}, both).sentence
    assert (
        told.startswith("For robustness to removed heads, on text: with 1/4 of heads out, penalty on long 1 has ")
        and ". No gain was shown in accuracy or " in told
        and len(told.split()) <= 60
    )


def test_hypotheses_are_judged_by_the_tables() -> None:
    def holds(place: int, sizes: UseSizes = QUICK, **values: Any) -> bool | None:
        return QUESTION.answer(tables(changed(**values), sizes), sizes).verdicts[place].holds

    few = replace(QUICK, seeds=2)
    assert holds(0) is True and holds(0, path=("accuracy", 0.8)) is False
    assert holds(0, few, path=("accuracy", 0.8)) is None and holds(0, path=("accuracy", MIXED)) is None
    assert holds(0, path=("accuracy", DOUBTFUL)) is None and holds(2, path=("layers", DOUBTFUL)) is None
    high: dict[str, Any] = {"path": ("one length", 0.9), "diverse": ("one length", 0.9)}
    assert holds(1, **high) is True and holds(1) is False and holds(1, path=("one length", 0.9)) is None
    assert [holds(2, path=("layers", value)) for value in (0.9, MIXED, 0.5)] == [True, None, False]
    assert holds(3) is True and holds(3, long=("noise", 0.9)) is False and holds(3, long=("noise", MIXED)) is None
    assert holds(4, short=("size", 0.3), long=("size", 0.01)) is True and holds(4, short=("size", 0.3)) is None
    assert holds(4, short=("size", 0.01), long=("size", 0.3)) is False
    assert [holds(5, short=("residual", value)) for value in (0.5, 0.7, MIXED, 0.9)] == [True, None, None, False]
    assert holds(5, few, short=("residual", 0.5)) is None  # two seeds move the same way one time in two
    empty = {"uses": pl.DataFrame(schema=ROWS)}
    assert [verdict.holds for verdict in QUESTION.answer(empty, QUICK).verdicts] == [None] * 6


def test_the_answer_says_what_a_use_costs_with_every_seed() -> None:
    def answered(*accuracies: float) -> tuple[str, str]:
        def change(use: Use, quantity: str) -> Made:
            if use != Use(PATH_DROPOUT, 0.4):
                return None
            made: dict[str, Made] = {"one length": 0.9, "accuracy": accuracies}
            return made.get(quantity)

        found = QUESTION.answer(tables(change), QUICK)
        assert len(found.sentence.split()) <= 60
        return found.sentence, " ".join(found.notes)

    # Plain networks have 0.70, 0.71 … 0.74.
    sentence, notes = answered(0.66, 0.67, 0.68, 0.69, 0.7)
    assert "; it costs 0.04 of accuracy on sort. No gain" in sentence
    assert "cost accuracy on sort with every seed, beside plain: path dropout 0.4 0.040." in notes
    for few in ((0.66, 0.67, 0.68, 0.69, 0.75), (0.695, 0.705, 0.715, 0.725, 0.735)):  # a seed gains; too little
        assert "costs" not in answered(*few)[0] and "with every seed, beside plain" not in answered(*few)[1]


def test_a_task_at_the_ceiling_tells_nothing_of_accuracy() -> None:
    def answered(whole: float, **values: Any) -> Any:
        made = changed(**values)

        def change(use: Use, quantity: str) -> Made:
            value = made(use, quantity)
            return whole if value is None and quantity == "accuracy" and use.kind != ALONE else value

        return QUESTION.answer(tables(change), QUICK)

    below, full = answered(0.92), answered(0.95)  # the median of seeds is 0.02 higher
    assert below.verdicts[0].holds is True and full.verdicts[0].holds is None
    assert "at the ceiling" in full.verdicts[0].ours and "at the ceiling" not in below.verdicts[0].ours
    assert full.sentence.startswith("No gain could be shown: no gain was shown in accuracy (sort: at the ceiling) or ")
    assert any("at the ceiling" in note and "0.970 (0.950–0.990)" in note for note in full.notes)
    gained = answered(0.95, path=("accuracy", (0.97, 0.98, 0.99, 1.0, 1.01)))  # a gain is one, there too
    assert gained.verdicts[0].holds is False and gained.sentence.startswith("Slightly, for accuracy: ")
    both = replace(FULL, layers=3)
    high = tables(lambda use, quantity: 0.95 if quantity == "accuracy" and use.kind != ALONE else None, both)["uses"]
    mixed = pl.concat([high.filter(task="sort"), tables(sizes=both)["uses"].filter(task="text")])
    found = QUESTION.answer({"uses": mixed}, both)
    assert found.verdicts[0].holds is True  # on text, which has room
    assert "(at best 0.72 against 0.72 on text; sort: at the ceiling)" in found.sentence


def test_shares_of_the_output_stand_beside_norms() -> None:
    found = QUESTION.answer(tables(changed(short=("size", 0.3))), QUICK)
    assert "(of the output 0.04 (0.00–0.08), plain 0.04 (0.00–0.08))" in found.verdicts[4].ours
    assert any(note.startswith("Norms can be inflated by terms that cancel") for note in found.notes)
    lengths = found.evidence[-1]
    assert lengths.headings[3:] == ["0", "1", "2", "3"] and len(lengths.rows) == 2 * 3


def test_ordinary_dropout_that_never_pays_is_said() -> None:
    for weak, said in ((0.68, True), (0.7, False)):
        found = QUESTION.answer(
            tables(lambda use, quantity, weak=weak: weak if use.kind == DROPOUT and quantity == "accuracy" else None),
            QUICK,
        )
        assert any("every ordinary dropout costs accuracy too" in note for note in found.notes) is said


def test_long_shares_and_residuals_are_held_against_each_other() -> None:
    def note(up: bool) -> str:
        uses = [*QUICK.controls, *QUICK.uses]

        def change(use: Use, quantity: str) -> Made:
            place = uses.index(use) if use in uses else 0
            return {"size": 0.01 * place, "residual": 0.5 + 0.01 * place * (1 if up else -1)}.get(quantity)

        return next(note for note in QUESTION.answer(tables(change), QUICK).notes if "rank correlation" in note)

    assert " is 1.00 " in note(True) and " is -1.00 " in note(False)


def test_chance_seldom_names_a_gain_however_alike_controls_are() -> None:
    """A training method that makes no difference, beside controls that are nearly one: every seed is above all of them
    once in 2^5 times, as no count of controls tells; gains must be rarer than the level of one comparison allows."""
    draw, repeats, many = np.random.default_rng(0), 4000, study.comparisons(QUICK)
    above = beyond = 0
    for _ in range(repeats):
        use, plain = draw.standard_normal((2, QUICK.seeds))
        controls = {
            control: [*(plain + 1e-3 * draw.standard_normal(QUICK.seeds))] if index < 2 else [-9.0] * QUICK.seeds
            for index, control in enumerate(QUICK.controls)
        }
        entry = study.Gain("sort", "accuracy", QUICK.uses[0], [*use], controls, many)
        above, beyond = above + entry.above, beyond + entry.beyond
    assert many == 8 * 6 and above / repeats == pytest.approx(0.5**QUICK.seeds, rel=0.3)
    assert beyond <= 3 * CHANCE / many * repeats  # about 4 are expected
    sure = study.Gain("sort", "accuracy", QUICK.uses[0], [0.7, 0.71, 0.7], {Use(): [0.5, 0.5, 0.51]}, many)
    assert sure.above and not sure.beyond  # three seeds agree one time in eight
    assert study.least_t(5, many) < study.least_t(5, 2 * many) and study.least_t(1, many) == math.inf
    assert study.least_t(5, 2) == pytest.approx(2.776, abs=1e-3)  # 0.025 with 4 degrees of freedom, of printed tables
