"""Long paths: what is trained and read, and that the answer follows the tables."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.errors import StudyError
from rankscope.lab import NextCharacter
from rankscope_studies.path_model import PathModel
from rankscope_studies.questions import path_networks
from rankscope_studies.questions.length_trainings import MARKS, ROWS, Arm, LengthSizes, arms, training_of
from rankscope_studies.questions.long_paths import FULL, QUESTION, QUICK, REMEDY
from rankscope_studies.study import Setup

TINY = LengthSizes(
    ("hull",), layers=1, first_seed=0, seeds=2, widths=(6,), heads=(2,), steps=(2,), batches=(4,), rates=(1e-3,),
    context=8, samples=32, remedies=(REMEDY,), factors=(), evaluation_samples=4, head_samples=8, probe_samples=2,
)  # fmt: skip
SEEDS = (0, 2)
SEVERAL = replace(QUICK, first_seed=100, seeds=5)  # enough seeds to tell arms apart


def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == len(arms("hull", TINY)) == 8
    table = first.tables["paths"]
    assert table.equals(again.tables["paths"]) and first.summary == again.summary
    assert first.figures[QUESTION.name].axes and len(first.page_tables) == 2
    for mark, name in itertools.product(MARKS, ("share", "size")):  # of whole networks, these add up to one
        found = table.filter(kind="all", condition="plain", quantity=f"{name} {mark:g}")
        assert found.group_by("seed").agg(pl.col("value").sum())["value"].to_list() == pytest.approx([1, 1])
        assert name == "share" or found["value"].min() >= 0  # type: ignore[operator]
    fresh = table.filter(quantity="fresh residual", at=1)
    assert {*fresh["condition"]} == {"no skips", f"no skips {REMEDY}"} and fresh["value"].is_finite().all()
    bare = table.filter(condition="no skips", quantity="residual").sort("at", "seed")["value"]
    assert bare[:2].is_nan().all() and bare[2:].is_finite().all()  # without skips there is no path of length 0


@pytest.mark.slow  # trains every arm of every task
def test_every_task_and_arm_trains(tmp_path: Path) -> None:
    sizes = replace(
        TINY, tasks=QUESTION.full.tasks, layers=2, widths=(8,) * 3, heads=(2,) * 3, steps=(2,) * 3, batches=(4,) * 3,
        rates=(1e-3,) * 3, remedies=FULL.remedies, factors=FULL.factors,
    )  # fmt: skip
    result = QUESTION.run(Setup(tmp_path), sizes)
    assert {*result.tables["paths"]["task"]} == {"sort", "hull", "text"}
    assert result.tables["paths"].filter(quantity="loss")["value"].is_finite().all()


def test_arms_are_of_the_lengths_that_they_name() -> None:
    assert Arm().weights(3) == (1, 1, 1, 1) and Arm("exact", 2).weights(3) == (0, 0, 1, 0)
    assert Arm("most", 1).weights(3) == (1, 1, 0, 0) and Arm("least", 1).weights(3) == (0, 1, 1, 1)
    assert Arm("exact", 3, REMEDY, skips=False).condition == "no skips centred" and Arm().condition == "plain"
    with pytest.raises(StudyError, match="kind"):
        Arm("few").weights(3)
    with pytest.raises(StudyError, match="task"):
        path_networks.path_task("chess", 8, 8)
    for sizes in (QUICK, FULL):
        for task in sizes.tasks:
            weights = [(arm.weights(sizes.layers), arm.condition) for arm in arms(task, sizes)]
            assert len({*weights}) == len(weights)  # nothing is trained twice


def test_sorting_is_of_the_papers_size() -> None:
    training = training_of("sort", Arm("exact", 6), replace(FULL, seeds=1))
    model, arch = training.models[0], training.models[0].net.arch
    assert isinstance(model, PathModel) and model.lengths.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert (arch.layers, arch.width, arch.heads, arch.mlp, arch.norm_place) == (6, 48, 2, "none", "post")
    recipe = training.recipe
    assert len(training.task.batch(2000, 0, 0)) == 1000 and recipe.steps * recipe.batch_size == 60 * 1000


def test_new_heads_are_fitted_to_held_out_samples_that_nothing_else_sees() -> None:
    letters = torch.randint(26, (2000,), generator=torch.Generator().manual_seed(0))
    text = "".join(chr(97 + int(letter)) for letter in letters)
    task = NextCharacter(8, text)
    held = task.ids[-200:]
    for batch, stretch in zip(path_networks.held_out_samples(task, 30, 40), (held[100:], held[:100]), strict=True):
        wanted = torch.cat([batch.inputs, batch.labels[:, -1:]], 1)
        assert all(bool((stretch.unfold(0, 9, 1) == excerpt).all(1).any()) for excerpt in wanted)
        assert torch.equal(wanted[0], stretch[:9]) and torch.equal(wanted[-1], stretch[-9:])
    sort = path_networks.path_task("sort", 8, 8)
    test, fit = path_networks.held_out_samples(sort, 300, 200)
    assert (len(test), len(fit)) == (300, 200) and torch.equal(
        torch.cat([test.inputs, fit.inputs]), sort.held_out(500).inputs
    )
    last = path_networks.held_out_samples(sort, 1999, 1)[1]  # all that there are
    assert torch.equal(last.inputs, sort.held_out(2000).inputs[1999:])
    with pytest.raises(StudyError, match="held-out samples"):
        path_networks.held_out_samples(sort, 2000, 1)


def test_even_attention_is_the_diagonal_of_an_even_pattern() -> None:
    causal = torch.ones(12, 12).tril()
    assert path_networks.even_attention("sort", 64) == 1 / 8 and path_networks.even_attention("hull", 64) == 1 / 10
    expected = float((causal / causal.sum(1, keepdim=True)).diagonal().mean())
    assert path_networks.even_attention("text", 12) == pytest.approx(expected)


def test_seeds_of_weights_are_never_those_of_embeddings() -> None:
    for sizes in (QUICK, FULL):
        assert not {*sizes.networks} & {seed + 1 for seed in sizes.networks} and len(sizes.networks) == sizes.seeds
    assert not {*QUICK.networks} & {*FULL.networks}


def tables(
    alone: float | Sequence[float] = 0.9, headed: float = 0.2, own: float = 0.1, centred: float = 0.97,
    bare: float = 0.2, size: float = 0.05, whole: float = 0.95, without: float = 0.2,
    mended: float | Sequence[float] = 0.8,
    sizes: LengthSizes = SEVERAL, task: str = "sort",
) -> dict[str, pl.DataFrame]:  # fmt: skip
    """Made-up tables: accuracies of the longest paths, the network by tokens having 0.2."""
    last, rows = sizes.layers, []

    def put(arm: Arm, quantity: str, value: float | Sequence[float], at: int | None = None) -> None:
        for place, seed in enumerate(sizes.networks):
            labels = (task, arm.kind, arm.length, arm.condition, seed, quantity, at)
            rows.append((*labels, value + 0.002 * place if isinstance(value, float) else value[place]))

    put(Arm(), "accuracy", whole)
    for k in range(last + 1):
        put(Arm("exact", k), "accuracy", 0.2 if k == 0 else alone)
        put(Arm(), "own head", 0.5 if k == 1 else own, k)
        put(Arm(), "new head", without if k == 0 else headed if k == last else 0.575, k)
        for mark in MARKS:
            put(Arm(), f"size {mark:g}", size / 2 if k >= sizes.long else 0.4, k)
            put(Arm(), f"share {mark:g}", 9.0 * (-1) ** k, k)  # large and of either sign: no verdict rests on them
    put(Arm("exact", last, REMEDY), "accuracy", centred)
    put(Arm("exact", last, skips=False), "accuracy", bare)
    put(Arm("exact", last, skips=False), "fresh residual", -16.0, last)
    put(Arm("exact", last, REMEDY, skips=False), "fresh residual", -0.3, last)
    put(Arm("exact", last, REMEDY, skips=False), "accuracy", mended)
    return {"paths": pl.DataFrame(rows, schema=ROWS, orient="row")}


def test_the_sentence_turns_with_the_numbers() -> None:
    trained, failed, head = (QUESTION.answer(tables(*numbers), SEVERAL) for numbers in ((0.9,), (0.3,), (0.9, 0.8)))
    free, limited = (QUESTION.answer(tables(bare=bare, mended=0.22), SEVERAL).sentence for bare in (0.8, 0.22))
    lead = "On sort paths through heads in all 3 layers are "
    assert trained.sentence.startswith(f"{lead}useless by training: ")
    assert "93%" in trained.sentence  # (0.9 - 0.2) / (0.95 - 0.2)
    assert "trained whole 0% (paths through 2 heads: 50%). " in trained.sentence  # (0.575 - 0.2) / (0.95 - 0.2)
    assert trained.sentence.endswith(". Without skips networks recover at best 80%.")
    assert free.startswith(f"{lead}useless by training: ") and free.endswith("recover at best 80%.")
    # What networks without skips did changes no cause: those that hardly learnt show none.
    assert limited.startswith(f"{lead}useless by training: ")
    assert limited.endswith(". Without skips networks hardly learnt.")
    assert failed.sentence.startswith(f"{lead}not learnt with this recipe: ") and "13%" in failed.sentence
    assert head.sentence.startswith(f"{lead}not useless: ") and "80%" in head.sentence
    # The same reader at length 0 is what a new head is held against: (0.8 - 0.7) / (0.95 - 0.7).
    assert "trained whole 40%" in QUESTION.answer(tables(0.9, 0.8, without=0.7), SEVERAL).sentence
    blind = QUESTION.answer(tables(whole=0.22), SEVERAL)
    assert blind.sentence.startswith("It cannot be told")
    assert [blind.verdicts[at].holds for at in (1, 2, 3, 5, 6)] == [None] * 5
    assert all(len(found.sentence.split()) <= 60 for found in (trained, failed, head))


BOTH = replace(SEVERAL, tasks=("sort", "hull"), widths=(48, 84), heads=(2, 3), steps=(9, 9), batches=(9, 9))


def test_causes_that_differ_are_said_of_each_task() -> None:
    def sentence(sizes: LengthSizes, **hull: Any) -> str:
        rows = [tables(sizes=sizes, task=task, **hull if task == "hull" else {})["paths"] for task in sizes.tasks]
        found = QUESTION.answer({"paths": pl.concat(rows)}, sizes).sentence
        assert len(found.split()) <= 60
        return found

    lead = "paths through heads in all 3 layers are useless by training"
    assert sentence(BOTH).startswith(f"On sort and hull {lead}: networks")
    assert sentence(BOTH, alone=0.3).startswith(f"On sort {lead}, on hull not learnt with this recipe: networks")
    three = replace(FULL, first_seed=0, layers=3)
    differing = sentence(three, headed=0.8)
    assert differing.startswith(f"On sort and text {lead}, on hull not useless: networks")
    assert "trained whole 0%, 0%, 80% (paths" in differing  # in the order of the lead
    failed = sentence(BOTH, bare=0.2, mended=0.23)
    assert failed.endswith(". Without skips networks hardly learnt on hull and recover at best 80% on sort.")


def test_networks_without_skips_that_hardly_learnt_are_named_with_what_was_tried() -> None:
    def notes(**numbers: Any) -> list[str]:
        return [note for note in QUESTION.answer(tables(**numbers), SEVERAL).notes if "hardly learnt" in note]

    said = [note for note in notes(bare=0.21, mended=0.24) if note.startswith("Without skips")]
    assert len(said) == 1 and "at best 0.24 (0.24–0.25) (no skips centred, at the one rate that was tried)" in said[0]
    assert "token by token 0.20 (0.20–0.21)" in said[0]
    # At most 0.05 above the networks that read each token alone, which have 0.2: 0.26 is more.
    assert not any(note.startswith("Without skips") for note in notes(bare=0.21, mended=0.26))


def test_lengths_that_cancel_are_said() -> None:
    def notes(share: float) -> list[str]:
        made = tables(headed=0.8)["paths"]
        is_share = pl.col("quantity").str.starts_with("share")
        made = made.with_columns(value=pl.when(is_share).then(share * pl.col("value").sign()).otherwise("value"))
        return [note for note in QUESTION.answer({"paths": made}, SEVERAL).notes if "lengths cancel" in note]

    assert notes(0.9) == []
    (said,) = notes(3.0)
    assert "at lengths 0 to 3: +3.0, -3.0, +3.0, -3.0" in said and "at length 3 recovers 80%" in said


def test_the_notes_say_how_alike_tokens_are_before_the_first_step() -> None:
    notes = " ".join(QUESTION.answer(tables(), SEVERAL).notes)
    assert "relative residual is 1.0e-16 on sort (centred: 0.50" in notes.replace("1e-16", "1.0e-16")
    assert "Changed after the quick run of " in notes
    without = tables()["paths"].filter(pl.col("quantity") != "fresh residual")
    assert "Before the first step" not in " ".join(QUESTION.answer({"paths": without}, SEVERAL).notes)


def test_a_task_that_cannot_tell_is_named() -> None:
    both = BOTH
    rows = [tables(sizes=both)["paths"], tables(whole=0.22, sizes=both, task="hull")["paths"]]
    found = QUESTION.answer({"paths": pl.concat(rows)}, both)
    assert (
        found.sentence.endswith("; hull cannot be told.")
        and found.sentence.count("..") == 0
        and found.verdicts[3].holds is None
    )


def test_networks_without_skips_are_judged_at_their_best_rate() -> None:
    sizes = replace(SEVERAL, factors=(3.0,), remedies=FULL.remedies)
    rows = tables(sizes=sizes, mended=0.3)["paths"]
    assert QUESTION.answer({"paths": rows}, sizes).sentence.endswith("Without skips networks recover at best 13%.")
    for changed in ("no skips centred rate x 3", "no skips contranorm", "no skips contranorm rate x 3"):
        better = rows.filter(kind="exact", length=3, condition="no skips centred").with_columns(
            condition=pl.lit(changed), value=pl.col("value") + 0.5
        )
        found = QUESTION.answer({"paths": pl.concat([rows, better])}, sizes)
        assert found.sentence.endswith("Without skips networks recover at best 80%.")
    conditions = [arm.condition for arm in arms("sort", FULL)]
    assert {"no skips centred rate x 0.3", "no skips contranorm rate x 3", "rate x 3"} <= {*conditions}


def test_hypotheses_are_judged_by_the_tables() -> None:
    def holds(place: int, **numbers: Any) -> bool | None:
        return QUESTION.answer(tables(**numbers), SEVERAL).verdicts[place].holds

    assert [verdict.holds for verdict in QUESTION.answer(tables(), SEVERAL).verdicts] == [True] * 7
    assert holds(0, own=0.4) is False
    assert holds(1, headed=0.7) is False and holds(2, alone=0.4) is False
    assert holds(2, alone=(0.5, 0.7, 0.5, 0.7, 0.7)) is None  # seeds on either side of a half
    assert holds(3, centred=0.8) is False and holds(3, centred=0.905) is None
    assert holds(4, size=0.3) is False and holds(4, size=0.1) is False and holds(4, size=0.08) is True
    # Without skips it is the remedied network that counts; the other, whose tokens are equal to rounding, never does.
    assert holds(5, mended=0.98) is False and holds(5, mended=0.965) is None and holds(5, bare=0.98) is True
    assert holds(6, mended=0.4) is False and holds(6, mended=(0.5, 0.7, 0.5, 0.7, 0.7)) is None
    assert holds(6, bare=0.9, mended=0.4) is False
    # A remedy with which networks hardly learn tells nothing, however sure it is that they are worse.
    assert holds(3, centred=0.24) is None and holds(3, centred=0.26) is False
    assert "with centred networks hardly learnt sort" in QUESTION.answer(tables(centred=0.24), SEVERAL).verdicts[3].ours
    assert holds(5, centred=0.24, mended=0.6) is None and holds(5, centred=0.26, mended=0.6) is False
    # Networks without skips that hardly learnt do not show that short paths are needed.
    assert holds(6, mended=0.24) is None and holds(6, mended=0.26) is False
    assert holds(3, centred=0.9) is None  # the same numbers: a tie is no difference
    # At the ceiling no arm has room to be better, and a worse one is no news; the ceiling is the best arm's.
    high, low = (QUESTION.answer(tables(0.94, centred=centred), SEVERAL).verdicts[3] for centred in (0.96, 0.6))
    assert (high.holds, low.holds) == (None, None) and "at the ceiling" in high.ours and "at the ceiling" in low.ours
    assert (
        holds(3, alone=0.8, whole=0.7, centred=0.97) is True
    )  # above an undertrained whole network, far from the best
    empty = {"paths": pl.DataFrame(schema=ROWS)}
    assert [verdict.holds for verdict in QUESTION.answer(empty, QUICK).verdicts] == [None] * 7


def test_a_remedy_that_breaks_one_task_tells_nothing_of_another() -> None:
    for hull, wanted in ((0.97, True), (0.6, False), (0.22, None)):  # of a remedy that helps on sort
        rows = [tables(sizes=BOTH)["paths"], tables(sizes=BOTH, task="hull", centred=hull)["paths"]]
        assert QUESTION.answer({"paths": pl.concat(rows)}, BOTH).verdicts[3].holds is wanted


def test_few_seeds_and_trials_seen_before_tell_nothing() -> None:
    few = replace(SEVERAL, seeds=2)  # all of one arm above all of another: one time in six by chance
    verdicts = [verdict.holds for verdict in QUESTION.answer(tables(sizes=few), few).verdicts]
    assert verdicts == [True, True, True, None, True, None, True]
    quick = QUESTION.answer(tables(sizes=QUICK), QUICK)
    assert [verdict.holds for verdict in quick.verdicts] == [True, True, None, None, True, None, None]


def test_a_whole_network_that_learnt_less_than_one_length_is_said() -> None:
    said, quiet = (QUESTION.answer(tables(alone), SEVERAL).notes for alone in (0.97, 0.9))
    assert any("Undertrained: on sort" in note and "length 1 alone" in note for note in said)
    assert not any("Undertrained" in note for note in quiet)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ({"a": [True, True], "b": [True]}, True),
        ({"a": [True, True], "b": [False, False]}, False),
        ({"a": [True, False], "b": [True]}, None),
        ({"a": [], "b": [True]}, None),
        ({}, None),
    ],
)
def test_a_hypothesis_on_every_task_needs_every_seed(cases: dict[str, list[bool]], expected: bool | None) -> None:
    assert path_networks.judged(cases) is expected


def test_the_figure_has_the_errors_of_every_length() -> None:
    """Medians of five seeds, which are 0.002 apart: the third."""
    panel, norms = QUESTION.draw(tables(), SEVERAL)[QUESTION.name].axes[:2]
    lines = {str(line.get_label()): line for line in panel.lines}
    accuracies = {
        "trained on length k alone": {0: 0.2, 1: 0.9, 2: 0.9, 3: 0.9}, "trained on ≤ k": {0: 0.2, 3: 0.95},
        "trained on ≥ k": {0: 0.95, 3: 0.9}, "trained whole, read at k": {0: 0.1, 1: 0.5, 2: 0.1, 3: 0.1},
        "trained whole, new head at k": {0: 0.2, 1: 0.575, 2: 0.575, 3: 0.2},
    }  # fmt: skip
    for label, by_length in accuracies.items():
        assert [*lines[label].get_xdata()] == [*by_length]
        errors = [1 - (accuracy + 0.004) for accuracy in by_length.values()]
        assert [*lines[label].get_ydata()] == pytest.approx(errors)
    sizes = {str(line.get_label()): [*line.get_ydata()] for line in norms.lines}
    assert sizes["length 0"] == pytest.approx([0.404] * len(MARKS))
    assert sizes["length 3"] == pytest.approx([0.029] * len(MARKS))
