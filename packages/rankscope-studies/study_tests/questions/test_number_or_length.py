"""Number or length of paths: sums against single paths, readouts and shares against other ways, and the answer."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional as F

from rankscope.errors import StudyError
from rankscope.lab import Model
from rankscope.paths import by_length, counts_along, decompose, freeze
from rankscope_studies.dong2021.fig4 import PublishedSort
from rankscope_studies.questions import number_or_length as study
from rankscope_studies.questions.number_or_length import QUESTION
from rankscope_studies.questions.path_sets import (
    LEVEL,
    OWN,
    SHARED,
    SetReader,
    drawn_sets,
    evaluated_lengths,
    evaluated_sets,
    set_sums,
)
from rankscope_studies.questions.readout import RIDGE, fitted_readout
from rankscope_studies.questions.set_results import SetEvidence, SetSizes
from rankscope_studies.questions.variance import grid_shares, on_grid, one_hot, r_squared, regression
from rankscope_studies.study import Setup
from study_tests.dong2021.plans import small

WAYS = ((None, 0, 1),) * 4
MADE_UP = SetSizes(("sort",), 100, 2, 4, 8, 1, 8, 1, 1, 8, 8, (1, 2, 5), 2, 64, 64)
TINY = SetSizes(("sort", "hull", "text"), 0, 1, 2, 8, 1, 12, 1, 2, 8, 8, (1, 2), 2, fit_tokens=60, test_tokens=40)


@pytest.fixture(scope="module")
def model() -> Model:
    return small(PublishedSort(40, 12)).training(0).finish().models[0].double().eval().requires_grad_(False)


# ---- Sets of paths


def test_sets_hold_no_path_twice_and_end_with_all_of_the_length() -> None:
    for length, total in enumerate(counts_along(WAYS)):
        sets = drawn_sets(WAYS, length, (1, 5, 20, 1000), repeats=3, seed=1)
        assert all(len({*drawn.paths}) == len(drawn.paths) for drawn in sets)
        assert {sum(head is not None for head in path) for drawn in sets for path in drawn.paths} == {length}
        assert [len(drawn.paths) for drawn in sets].count(total) == 1 and len(sets[-1].paths) == total
        assert sets == drawn_sets(WAYS, length, (1, 5, 20, 1000), 3, 1)
    assert drawn_sets(WAYS, 2, (5,), 3, 1) != drawn_sets(WAYS, 2, (5,), 3, 2)


def test_sums_are_those_of_single_paths(model: Model) -> None:
    """Paths one by one, through `Decomposition.path`; and all of a length by the dynamic programme."""
    X = model.tokens(PublishedSort(40, 12).data[1].inputs)
    frozen, whole = freeze(model.network(), X), decompose(model.network(), X)
    exact = by_length(frozen)
    for length in range(3):
        sets = drawn_sets(frozen.ways, length, (1, 3), 2, 0)
        found = dict(set_sums(frozen, sets, fit=slice(5)))
        for index, drawn in enumerate(sets):
            own, shared = ([whole.path(path, kind).term for path in drawn.paths] for kind in ("own", "shared"))
            level = [term / term[:5].square().mean().sqrt() for term in shared]
            for kind, terms in ((OWN, own), (SHARED, shared), (LEVEL, level)):
                torch.testing.assert_close(found[kind][index], torch.stack(terms).sum(0))
            for term in own:  # a norm ends every layer: no path of its own attention is larger than another
                torch.testing.assert_close(term.square().mean(-1), torch.ones_like(term[..., 0]))
        torch.testing.assert_close(found[SHARED][-1], exact.embedding[length] + exact.bias[length])


def test_sets_are_classified_as_in_figure_4(model: Model) -> None:
    """The accuracy of all paths of a length, from the decomposition; alignment and norm by hand."""
    data = PublishedSort(40, 12).data[1]
    fit, test = data.part(slice(8)), data.part(slice(8, 12))
    rows = pl.DataFrame(evaluated_sets(model, fit, test, (1, 2), 2), infer_schema_length=None)
    whole = rows.filter(kind="whole")
    said = model(test.inputs).argmax(-1)
    assert whole["head"][0] == float((said == test.labels).double().mean())
    assert whole["alignment"][0] == pytest.approx(1.0)
    frozen = freeze(model.network(), model.tokens(data.inputs))
    for length in range(3):
        Y = by_length(frozen).embedding[length][8:]
        row = rows.filter(kind=SHARED, length=length).sort("number").row(-1, named=True)
        read = model.head(F.layer_norm(Y, (8,), eps=1e-12)).argmax(-1)
        assert row["head"] == pytest.approx(float((read == test.labels).double().mean()))
        assert row["norm"] == pytest.approx(math.log10(float(Y.square().mean().sqrt())))
        centred = Y - Y.mean(-1, keepdim=True)
        assert row["alignment"] == pytest.approx(
            float(F.cosine_similarity(centred, frozen.output[8:], dim=-1).mean()), rel=1e-6
        )


def test_all_paths_of_a_length_are_read_without_walking_them(model: Model) -> None:
    """The readouts of all paths of a length: those of the walk along single paths."""
    data = PublishedSort(40, 32).data[1]
    fit, test = data.part(slice(16)), data.part(slice(16, 32))
    rows = pl.DataFrame(evaluated_sets(model, fit, test, (1, 2), 2), infer_schema_length=None)
    walked = rows.filter(pl.col("share") == 1, kind=SHARED).sort("length").select("length", "refit", "beside")
    assert pl.DataFrame(evaluated_lengths(model, fit, test)).equals(walked) and len(walked) == 3


@pytest.mark.slow  # draws samples of three tasks
def test_fresh_networks_are_those_that_the_trainings_begin_with() -> None:
    for task in TINY.tasks:
        first, second = (study.fresh_network(task, seed, TINY) for seed in (0, 2))
        assert first.schema == study.FRESH and first["length"].to_list() == [0, 1, 2]
        assert first.equals(study.fresh_network(task, 0, TINY)) and not first.equals(second)
        training = study.network_training(task, 0, TINY)
        read = study._read_samples(training.task, task, TINY, "cpu")
        assert first["beside"].to_list() == [row["beside"] for row in evaluated_lengths(training.models[0], *read)]


# ---- Readouts


def test_a_readout_is_the_optimum_that_another_method_finds() -> None:
    """Newton's quasi method of torch on the same loss, in float64, on features far from white."""
    draw = torch.Generator().manual_seed(0)
    scales = torch.tensor([100.0, 1.0, 1e-3])
    Y = torch.randn(1, 300, 3, generator=draw).double() * scales + 5.0
    labels = (Y[0] / scales + torch.randn(300, 3, generator=draw)).argmax(-1)
    found = fitted_readout(Y, labels, 3).logits(Y)[0]
    centred = Y[0] - Y[0].mean(0)
    white = centred @ torch.linalg.inv(torch.linalg.cholesky(centred.mT @ centred / 300)).mT
    B, b = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([B, b], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(white @ B + b, labels) + RIDGE / 2 * B.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    torch.testing.assert_close(found.softmax(-1), (white @ B + b).softmax(-1).detach(), atol=1e-3, rtol=0)


def test_readouts_find_what_is_small_and_nothing_in_noise() -> None:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (400,), generator=draw)
    noise = torch.randn(2, 400, 4, generator=draw).double()
    noise[0, :, 0] = 1e-4 * (labels + 0.1 * torch.randn(400, generator=draw))  # one direction that tells, and is small
    readout = fitted_readout(noise[:, :200], labels[:200], 2)
    right = (readout.logits(noise[:, 200:]).argmax(-1) == labels[200:]).double().mean(-1)
    assert right[0] > 0.99 and 0.35 < right[1] < 0.65
    constant = fitted_readout(torch.ones(1, 200, 4).double(), labels[:200], 2)  # nothing varies: the frequent class
    assert constant.weight.abs().max() == 0 and bool(constant.bias.isfinite().all())


def test_features_and_labels_must_be_of_the_same_tokens() -> None:
    with pytest.raises(StudyError, match="one label for each token"):
        fitted_readout(torch.ones(1, 5, 2), torch.zeros(4, dtype=torch.long), 2)


# ---- What explains


def grid(effect: object, repeats: int = 3) -> pl.DataFrame:
    draw = np.random.default_rng(0)
    rows = []
    for number in (1, 2, 5):
        for length in (1, 2, 3, 4):
            for repeat in range(repeats):
                logit = effect(number, length) + 0.1 * draw.normal()  # type: ignore[operator]
                rows.append({"number": number, "length": length, "repeat": repeat, "head": 1 / (1 + math.exp(-logit))})
    return pl.DataFrame(rows)


def test_shares_of_a_grid_add_up_and_name_what_was_put_in() -> None:
    lengths = grid_shares(grid(lambda number, length: -length), "head")
    numbers = grid_shares(grid(lambda number, length: math.log(number)), "head")
    both = grid_shares(grid(lambda number, length: (number - 8 / 3) * (length - 2.5)), "head")  # means are zero
    for shares, factor in ((lengths, "length"), (numbers, "number"), (both, "interaction")):
        assert sum(shares.values()) == pytest.approx(1.0) and shares[factor] > 0.5
        assert max(shares, key=shares.__getitem__) == factor
    assert lengths["number"] < 0.05 and numbers["length"] < 0.05
    # R² of dummies of a balanced grid is the share of their sum of squares.
    table = grid(lambda number, length: 0.3 * number - length)
    y = np.log(table["head"].to_numpy() / (1 - table["head"].to_numpy()))
    dummies = [(table["length"].to_numpy() == length).astype(float) for length in (1, 2, 3)]
    assert grid_shares(table, "head")["length"] == pytest.approx(r_squared(dummies, y))


def test_only_numbers_that_every_length_has_are_on_the_grid() -> None:
    table = grid(lambda number, length: -length)
    more = pl.DataFrame({"number": [9] * 3, "length": [4] * 3, "repeat": [0, 1, 2], "head": [0.5] * 3})
    assert on_grid(pl.concat([table, more])).equals(table)
    assert grid_shares(table.filter(~((pl.col("length") == 2) & (pl.col("number") == 5))), "head") == {}


def test_regression_tells_alone_from_beyond() -> None:
    draw = np.random.default_rng(2)
    a, b = draw.normal(size=(2, 500))
    found = regression({"a": a, "copy of a": 2 * a + 1, "b": b}, a + 0.5 * b)
    assert found["alone"]["a"] == pytest.approx(np.corrcoef(a, a + 0.5 * b)[0, 1] ** 2)
    assert found["beyond"]["a"] == pytest.approx(0, abs=1e-9)  # its copy says the same
    assert found["beyond"]["b"] > 0.1 and found["together"]["all"] == pytest.approx(1.0)


# ---- The answer


def tables(
    by: str = "length", whole: float = 0.9, refit: float = 0.85, seeds: int = 2, long: float = 0.1
) -> dict[str, pl.DataFrame]:
    """Made-up tables: accuracies that length or number decides, refitted readouts of one accuracy."""
    sets = []
    for seed in (*range(100, 100 + 2 * seeds, 2),):
        sets.append({"task": "sort", "seed": seed, "kind": "whole", "head": whole, "refit": whole, "share": 0.1})
        for kind in study.KINDS:
            for length, total in enumerate(counts_along(WAYS)):
                for drawn in drawn_sets(WAYS, length, MADE_UP.numbers, 2, seed):
                    number = len(drawn.paths)
                    by_number = 0.15 * min(5, number)
                    head = max(long, 0.8 - 0.2 * length) if by == "length" else by_number
                    head += 0.01 * drawn.repeat + 0.001 * math.log(number) - 0.001 * length
                    sets.append({
                        "task": "sort", "seed": seed, "kind": kind, "length": length, "number": number,
                        "share": number / total, "repeat": drawn.repeat, "head": head,
                        "refit": 0.3 if length == 0 else refit + 0.001 * length, "beside": refit, "half": refit,
                        "norm": math.sin(number + length), "alignment": math.log(head / (1 - head)),
                        "residual": math.cos(number * length),
                    })  # fmt: skip
    return summarised(pl.DataFrame(sets, schema=study.SETS))


def summarised(sets: pl.DataFrame, untrained: float = 0.4) -> dict[str, pl.DataFrame]:
    """The tables of made-up sets, and networks before training that are read with one accuracy."""
    made = study.summarised(sets)
    lengths = pl.DataFrame({"length": [*range(MADE_UP.layers + 1)]})
    networks = made["networks"].select("task", "seed").join(lengths, how="cross")
    fresh = networks.with_columns(refit=pl.lit(untrained), beside=pl.lit(untrained)).cast(study.FRESH)  # type: ignore[arg-type]
    return made | {"fresh": fresh}


def with_hull(head: str | float, refit: str | float) -> dict[str, pl.DataFrame]:
    """Sorting that length decides for the head, and a hull whose accuracies are those of sorting, one number, or such
    that number decides ('number'); constant guesses are right of a tenth."""

    def changed(sets: pl.DataFrame) -> pl.DataFrame:
        for reader, value in (("head", head), ("refit", refit)):
            by_number = 0.3 + 0.1 * pl.col("number").clip(upper_bound=5) - 0.001 * pl.col("length")
            known = {"number": by_number, "length": 0.9 - 0.15 * pl.col("length") + 0.001 * pl.col("number")}
            made = known[value] if isinstance(value, str) else pl.lit(value) + 0.001 * pl.col("repeat")
            is_set = (pl.col("kind") != "whole") & (pl.col("length") > 0)
            sets = sets.with_columns(pl.when(is_set).then(made).otherwise(reader).alias(reader))
        return sets

    sort = tables()["sets"]
    sort = sort.with_columns(refit=pl.when(pl.col("length") > 0).then(pl.col("head")).otherwise("refit"))
    return summarised(pl.concat([sort, changed(sort.with_columns(task=pl.lit("hull")))]))


TWO_TASKS = replace(MADE_UP, tasks=("sort", "hull"))


def test_guesses_judge_nothing_and_readers_may_differ() -> None:
    """The head guesses on the hull, where refitted readouts read by number: sorting alone is judged."""
    found = QUESTION.answer(with_hull(0.11, "number"), TWO_TASKS)
    assert found.sentence.startswith("Length, for the trained head: on sort ")
    assert "on hull it nearly always guesses" in found.sentence
    assert "Refitted readouts: length on sort, number on hull; " in found.sentence
    assert [found.verdicts[at].holds for at in (0, 2, 3)] == [True] * 3
    assert all("; convex hull: cannot be told" in found.verdicts[at].ours for at in range(4))
    assert all(found.verdicts[at].ours.endswith("; judged on sorting alone") for at in range(4))
    grid = {tuple(row[:3]): row[-1] for row in found.evidence[2].rows}
    assert grid["convex hull", "shared", "trained head"] == "no"
    assert grid["convex hull", "shared", "refitted readout"] == grid["sorting", "shared", "trained head"] == "yes"


def test_a_head_that_reads_a_second_task_is_judged_on_it() -> None:
    other = QUESTION.answer(with_hull("number", "length"), TWO_TASKS)
    assert other.sentence.startswith("It depends: ") and "guesses" not in other.sentence
    assert "Refitted readouts: length on sort and hull; " in other.sentence
    assert other.verdicts[2].holds is False and "alone" not in other.verdicts[1].ours
    same = QUESTION.answer(with_hull("length", "length"), TWO_TASKS)
    assert same.sentence.startswith("Length: ") and [same.verdicts[at].holds for at in (0, 2)] == [True, True]
    guessed = {name: table.filter(task="hull") for name, table in with_hull(0.11, 0.11).items()}
    neither = QUESTION.answer(guessed, TWO_TASKS)
    assert neither.sentence.startswith("It cannot be told of the trained head: on hull it nearly always guesses")
    assert "Refitted readouts: cannot be told; " in neither.sentence
    assert {neither.verdicts[at].holds for at in range(4)} == {None}


def test_what_is_read_beside_the_token_has_its_references() -> None:
    found = QUESTION.answer(with_hull("length", "length"), TWO_TASKS)
    wanted = "they have 0.85 on sort (untrained networks 0.40, token alone 0.30), 0.85 on hull (0.40, 0.30)."
    assert found.sentence.endswith(wanted)
    # (0.4 - 0.3) / (0.9 - 0.3): of what context adds in the trained network
    assert found.verdicts[6].ours.endswith(". Before training (shared): sorting 0.17, convex hull 0.17")
    rows = {tuple(row[:4]): row[4:] for row in found.evidence[1].rows}
    before = "before training: readout beside the token"
    assert rows["sorting", "shared", "all of the length", before] == ["0.40"] * 5


def test_tasks_whose_readouts_overfit_are_left_out_of_refitted_readouts() -> None:
    """The token alone is read with 0.3; what stands beside it on the hull takes from that, or adds to it."""

    def answered(beside: float, kind: str) -> tuple[str, list[str]]:
        made = with_hull("length", "length")
        changed = (pl.col("task") == "hull") & (pl.col("length") == 2) & (pl.col("kind") == kind)
        made["curves"] = made["curves"].with_columns(
            beside=pl.when(changed).then(pl.lit(beside)).otherwise(pl.col("beside"))
        )
        found = QUESTION.answer(made, TWO_TASKS)
        return found.sentence, [note for note in found.notes if "overfit: " in note]

    for kind in (OWN, SHARED):
        sentence, notes = answered(0.25, kind)
        assert "Refitted readouts: length on sort; " in sentence and len(notes) == 1
        assert sentence.endswith(" on sort (untrained networks 0.40, token alone 0.30).")
        assert notes[0].startswith("Readouts of convex hull overfit: beside all paths of lengths 2 the token is read")
        assert "up to 0.05 less" in notes[0]
    for beside, kind in ((0.29, OWN), (0.31, SHARED), (0.0, LEVEL)):  # too little, no loss, and not read beside it
        sentence, notes = answered(beside, kind)
        assert "Refitted readouts: length on sort and hull; " in sentence and notes == []


def test_number_counts_at_lengths_above_a_guess() -> None:
    """Two of four lengths are read, the shorter one better, and number matters there alone: the whole grid, most of
    which is guesses, says less of number than the lengths that are read."""
    sets = tables()["sets"]
    read = 0.5 - 0.1 * pl.col("length") + 0.06 * pl.col("number")
    head = pl.when(pl.col("length") <= 2).then(read).otherwise(0.1) + 0.001 * pl.col("repeat")
    made = summarised(sets.with_columns(head=pl.when(pl.col("kind") == "whole").then("head").otherwise(head)))
    shares = {
        (measure, factor): SetEvidence(made, MADE_UP).share("sort", SHARED, factor, measure)
        for measure in ("grid", "above")
        for factor in ("length", "number")
    }
    curves = made["curves"].filter(pl.col("length").is_in([1, 2]), pl.col("number").is_in([1, 2, 5]), kind=SHARED)
    logit = (pl.col("head") / (1 - pl.col("head"))).log()
    variances = [
        curves.filter(seed=100).group_by(name).agg(logit.mean().alias("mean"))["mean"].var(ddof=0)
        for name in ("length", "number")
    ]
    ratio = shares["above", "length"][0] / shares["above", "number"][0]
    assert ratio == pytest.approx(variances[0] / variances[1], rel=0.02)  # type: ignore[operator]
    assert ratio < shares["grid", "length"][0] / shares["grid", "number"][0]
    verdict = QUESTION.answer(made, MADE_UP).verdicts[2]
    assert f". Over lengths above a guess alone: sorting: own {ratio:.1f}" in verdict.ours
    guessed = summarised(sets.with_columns(head=pl.when(pl.col("kind") == "whole").then("head").otherwise(0.1)))
    assert SetEvidence(guessed, MADE_UP).share("sort", SHARED, "length", "above") == []


def test_numbers_on_the_grid_are_those_of_each_task() -> None:
    made = with_hull("length", "length")
    few = (pl.col("task") == "sort") & (pl.col("number") == 5) & (pl.col("length") == 1)
    made["curves"] = made["curves"].filter(~few)
    evidence = SetEvidence(made, TWO_TASKS)
    assert evidence.numbers("sort") == [1, 2] and evidence.numbers("hull") == [1, 2, 5]
    note = QUESTION.answer(made, TWO_TASKS).evidence[2].note
    assert "(sorting: 1, 2; convex hull: 1, 2, 5)" in note


@pytest.mark.parametrize("tasks", [("sort",), ("sort", "hull"), ("sort", "hull", "text")])
def test_every_task_has_a_panel(tasks: tuple[str, ...]) -> None:
    made = with_hull(0.11, "number")
    made = {
        name: pl.concat([table, table.filter(task="hull").with_columns(task=pl.lit("text"))])
        for name, table in made.items()
    }
    sizes = replace(MADE_UP, tasks=tasks)
    titles = [axes.get_title(loc="left") for axes in study.draw(made, sizes)[QUESTION.name].axes if axes.axison]
    lengths = [title for title in titles if "equal number" in title]
    assert [title.split(":")[0].lower() for title in lengths] == [study.TASKS[task] for task in tasks]
    assert len(titles) == len(tasks) + 2


def test_the_sentence_turns_with_what_decides() -> None:
    length, number = (QUESTION.answer(tables(by), MADE_UP) for by in ("length", "number"))
    assert length.sentence.startswith("Length")
    assert number.sentence.startswith("Number")
    assert all(": on sort 5 paths give " in found.sentence for found in (length, number))
    assert [length.verdicts[at].holds for at in (0, 2, 3, 4)] == [True] * 4
    assert [number.verdicts[at].holds for at in (1, 2, 3)] == [True, False, False]
    assert len(length.sentence.split()) <= 60


@pytest.mark.slow
def test_information_that_is_there_is_told_from_what_is_gone() -> None:
    there, gone = QUESTION.answer(tables(), MADE_UP), QUESTION.answer(tables(refit=0.35), MADE_UP)
    assert there.verdicts[5].holds is True and gone.verdicts[5].holds is False
    assert there.verdicts[6].holds is True and gone.verdicts[6].holds is False
    assert QUESTION.answer(tables(), study.QUICK).verdicts[6].holds is None  # made on the quick run's data
    heard = QUESTION.answer(tables(long=0.7), MADE_UP)  # the trained head reads long paths too
    assert heard.verdicts[5].holds is False


def test_networks_that_learnt_nothing_tell_nothing() -> None:
    found = QUESTION.answer(tables(whole=0.35), MADE_UP)
    assert found.sentence.startswith("It cannot be told") and {verdict.holds for verdict in found.verdicts} == {None}
    assert any("Left out" in note and "sorting" in note for note in found.notes)


def test_networks_that_differ_leave_it_open() -> None:
    first, second = tables("length", seeds=2), tables("number", seeds=2)
    mixed = {name: pl.concat([first[name].filter(seed=100), second[name].filter(seed=102)]) for name in first}
    found = QUESTION.answer(mixed, MADE_UP)
    assert found.sentence.startswith("It depends: ") and found.verdicts[2].holds is None


@pytest.mark.slow  # trains three networks and draws
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    names = [f"{task} 0" for task in TINY.tasks]
    assert said == [*(f"fresh {name}" for name in names), *names] and first.summary == again.summary
    assert all(table.equals(again.tables[name]) for name, table in first.tables.items())
    assert {*first.tables["sets"]["task"]} == {*TINY.tasks} and first.figures[QUESTION.name].axes
    assert first.tables["curves"].filter(length=1, task="hull")["number"].max() == 6  # three heads in two layers


def test_readouts_have_one_learning_curve_point(model: Model) -> None:
    """Half of the samples give the accuracy of a reader that has no others."""
    data = PublishedSort(40, 32).data[1]
    Y = model.tokens(data.inputs) ** 2
    few = torch.cat([torch.arange(8), torch.arange(16, 32)])
    whole = SetReader(model, Y, data.part(slice(16)), data.part(slice(16, 32)))
    half = SetReader(model, Y[few], data.part(slice(8)), data.part(slice(16, 32)))
    assert whole.refitted(Y, share=0.5) == half.refitted(Y[few]) == half.read(Y[few][None])[0]["refit"]
    other = torch.cat([Y[:8], Y[8:16].flip(-1), Y[16:]])  # what half of the samples are is not looked at
    assert whole.refitted(other, share=0.5) == whole.refitted(Y, share=0.5)
    assert whole.refitted(other) != whole.refitted(Y)


def test_lengths_that_guess_have_no_order() -> None:
    """Of five paths, accuracies at or near the constant guess are ties, whatever their order."""

    def falls(accuracies: dict[int, float]) -> list[float]:
        made = tables()
        by_length = pl.col("length").replace_strict(accuracies, default=0.1, return_dtype=pl.Float64)
        made["curves"] = made["curves"].with_columns(head=by_length)
        return SetEvidence(made, MADE_UP).falls("sort", SHARED, "number 5")

    three = falls({1: 0.8, 2: 0.5, 3: 0.3, 4: 0.149})
    assert three == falls({1: 0.8, 2: 0.5, 3: 0.3, 4: 0.101}) and max(three) < -0.7
    assert min(falls({1: 0.3, 2: 0.5, 3: 0.8, 4: 0.1})) > -0.7
    # Of two lengths either order would do: with ties behind them, -0.85 if the first is better, -0.78 if the second is.
    assert all(math.isnan(value) for ends in ((0.8, 0.5), (0.5, 0.8)) for value in falls(dict(enumerate(ends, 1))))
    for accuracies, wanted in (
        ({1: 0.8, 2: 0.5, 3: 0.3}, True), ({1: 0.3, 2: 0.5, 3: 0.8}, False), ({1: 0.8, 2: 0.5}, None),
    ):  # fmt: skip
        made = tables()
        by_length = pl.col("length").replace_strict(accuracies, default=0.1, return_dtype=pl.Float64)
        made["curves"] = made["curves"].with_columns(head=by_length)
        found = QUESTION.answer(made, MADE_UP)
        assert [found.verdicts[at].holds for at in (0, 3)] == [wanted] * 2
        assert f"Lengths above a guess (3 are needed): sorting: own {len(accuracies)}, " in found.verdicts[0].ours
    made = tables()
    flat = made["curves"].with_columns(head=pl.lit(0.1))
    found = QUESTION.answer({**made, "curves": flat}, MADE_UP)
    assert found.verdicts[0].holds is found.verdicts[1].holds is found.verdicts[3].holds is None


def test_length_of_any_shape_is_length() -> None:
    values = np.repeat([1, 2, 3, 4], 5)
    y = np.where(values == 2, 1.0, 0.0)  # no line, but a function of length
    found = regression({"length": one_hot(values), "line": values.astype(float)}, y)
    assert found["alone"]["length"] == pytest.approx(1.0) and found["alone"]["line"] < 0.5
    assert r_squared([np.full(20, 0.1)], y) == pytest.approx(0.0)  # what does not vary explains nothing
