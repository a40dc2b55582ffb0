"""Is collapse unique to attention? What is measured, and that the answer follows the tables."""

import math
from pathlib import Path

import polars as pl
import pytest

from rankscope.lab import Digits
from rankscope_studies.questions import beyond_attention as study
from rankscope_studies.questions.beyond_attention import ACROSS, CURVES, METRIC, QUESTION, SCORES, MixerSizes
from rankscope_studies.questions.token_mixers import MIXERS
from rankscope_studies.study import Setup

pytest.importorskip("sklearn")
TINY = MixerSizes(("attention", "gru", "gcn complete", "mixer"), 3, 8, 2, 2, 2, 1, steps=2, batch=4)
DEPTH = 8
MADE_UP = MixerSizes(tuple(MIXERS), DEPTH, 8, 2, 2, 2, 2, steps=2, batch=4)


@pytest.mark.slow
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == 4 * (3 * 2 + 2 + 2)  # fresh in three forms, ratios, trained in two
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    elsewhere = QUESTION.run(Setup(tmp_path / "elsewhere"), TINY)
    assert len(said) == 40
    for name, table in first.tables.items():
        assert table.equals(again.tables[name]) and table.equals(elsewhere.tables[name])
    assert first.summary == again.summary and first.figures[QUESTION.name].axes
    curves = first.tables["curves"]
    assert set(curves["metric"]) == {*study.WATCHED, ACROSS} and first.tables["scores"].height == 8
    # One step of averaging over all makes positions equal: a residual that is rounding is marked.
    averaged = curves.filter(mixer="gcn complete", form="bare", trained=False, metric=METRIC, layer=1)
    assert averaged["marked"].all() and averaged["log10"].max() < -14  # type: ignore[operator]
    assert not curves.filter(layer=0, metric=METRIC)["marked"].any()


def tables(ends: dict[str, tuple[float, float]], accuracy: float = 0.9) -> dict[str, pl.DataFrame]:
    """Made-up tables: log10 of what is left after the last block, (bare, whole), of every mixer; straight curves."""
    curves, scores, averages = [], [], []
    for mixer in MIXERS:
        bare, whole = ends.get(mixer, (-0.1, -0.1))
        for seed in (0, 1):
            averages.append({"mixer": mixer, "seed": seed, "ratio": 10 ** (bare / DEPTH)})
            for form, end in (("bare", bare), ("norm", bare), ("whole", whole)):
                for metric in (METRIC, ACROSS, "effective_rank"):
                    for layer in range(DEPTH + 1):
                        log10 = end * layer / DEPTH
                        curves.append((mixer, form, False, seed, layer, metric, log10, False))
            for form in ("bare", "whole"):
                curves.append((mixer, form, True, seed, 2, METRIC, -0.1, False))
                learnt = accuracy if form == "whole" else 0.1
                scores.append((mixer, form, seed, 1.0, learnt, 100))
    return {
        "curves": pl.DataFrame(curves, schema=CURVES, orient="row"),
        "scores": pl.DataFrame(scores, schema=SCORES, orient="row"), "averages": pl.DataFrame(averages),
    }  # fmt: skip


def test_the_sentence_turns_with_the_numbers() -> None:
    alone = QUESTION.answer(tables({"attention": (-9.0, -0.2)}), MADE_UP)
    shared = QUESTION.answer(tables({"attention": (-9.0, -0.2), "gcn ring": (-3.0, -2.0)}), MADE_UP)
    assert alone.sentence.startswith("Yes: none of 8") and "9 of 9 keep" in alone.sentence
    assert shared.sentence.startswith("No: 1 of 8") and "(gcn ring)" in shared.sentence
    assert "8 of 9 keep" in shared.sentence
    assert alone.verdicts[4].holds is True and shared.verdicts[4].holds is False


def test_stacks_that_end_about_at_the_threshold_are_not_told_apart_by_it() -> None:
    ends = {"attention": (-9.0, -0.2), "gcn ring": (-3.0, -0.2), "lstm": (-1.04, -0.2), "gru": (-0.91, -0.2)}
    sentence = QUESTION.answer(tables(ends), MADE_UP).sentence
    assert sentence.startswith("No: 1 of 8") and "(gcn ring; undecided: lstm, gru)" in sentence
    assert "(undecided: lstm)" in QUESTION.answer(tables({"lstm": (-1.04, -0.2)}), MADE_UP).sentence


def test_hypotheses_are_judged_by_the_tables() -> None:
    expected = dict.fromkeys(study.AVERAGING, (-9.0, -0.2))
    right = QUESTION.answer(tables(expected), MADE_UP)
    wrong = QUESTION.answer(tables(expected | {"conv": (-5.0, -0.2)}), MADE_UP)
    assert [right.verdicts[0].holds, wrong.verdicts[0].holds] == [True, False] and "conv" in wrong.verdicts[0].ours
    assert right.verdicts[1].holds is False  # straight lines: attention falls geometrically
    assert right.verdicts[3].holds is True  # ratios were made of the falls
    assert right.verdicts[5].holds is True
    assert QUESTION.answer(tables(expected, accuracy=0.2), MADE_UP).verdicts[5].holds is None


def test_a_fall_is_read_up_to_its_floor() -> None:
    logs = [0.0, -1.0, -4.0, -13.0, -16.0, -16.1]
    rows = [("attention", "bare", False, 0, k, METRIC, log10, k > 3) for k, log10 in enumerate(logs)]
    found = study.mixer_fall(pl.DataFrame(rows, schema=CURVES, orient="row"), "attention", "bare")
    assert found is not None and found.at_floor and found.collapsed
    assert found.decades == pytest.approx(13 / 3) and found.order == pytest.approx(3.0)
    assert "floor" in found.text and study.mixer_fall(pl.DataFrame(schema=CURVES), "attention", "bare") is None


def test_across_images_says_what_depends_on_the_image() -> None:
    """A network that multiplies its embedding by zero but for positions has no difference between images left."""
    network = study._network("gcn ring", "bare", 1, 0, TINY)
    network.pixel.weight.data.zero_()
    images = Digits(patch=1).held_out(3).inputs
    rows = {(row["layer"], row["metric"]): row for row in study.measured(network, images)}
    assert rows[0, ACROSS]["marked"] and not rows[0, METRIC]["marked"]
    assert math.isfinite(float(str(rows[0, METRIC]["log10"])))
