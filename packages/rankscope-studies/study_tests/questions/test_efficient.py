"""Patterns of efficient transformers: what is measured, and that the answer follows the tables."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rankscope.nets import mask_matrix as matrix
from rankscope_studies.questions import attention_patterns
from rankscope_studies.questions import efficient as study
from rankscope_studies.questions.attention_patterns import CERTIFICATES, CURVES, FORMS, PATTERNS, PatternSizes
from rankscope_studies.questions.efficient import QUESTION
from rankscope_studies.study import Setup

pytest.importorskip("sklearn")
TINY = PatternSizes(
    ("complete", "causal", "window 2", "linformer"), depth=4, width=8, heads=2, tokens=12, samples=1, seeds=2,
    certified_depth=2, certified_seeds=1, trained_depth=1, trained_width=8, trained_seeds=1, steps=2, batch=4, patch=2,
    timed_steps=1,
)  # fmt: skip
MASKS = [name for name, (_, kernel) in PATTERNS.items() if kernel == "softmax"]
DEPTH = 8
MADE_UP = PatternSizes(tuple(PATTERNS), DEPTH, 8, 2, 32, 1, 2, 2, 1, 1, 8, 2, 2, 4, 2, 1)


def test_there_are_at_least_ten_patterns() -> None:
    assert len(PATTERNS) >= 10 and len({*PATTERNS.values()}) == len(PATTERNS)


@pytest.mark.slow  # certifies, trains, and draws
def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == 4 * (3 * 2 + 1 + 1) + 1  # fresh, certified, trained; and costs
    again, elsewhere = (
        QUESTION.run(Setup(tmp_path, say=said.append), TINY),
        QUESTION.gather(Setup(tmp_path / "b"), TINY),
    )
    assert len(said) == 33
    for name, table in first.tables.items():
        assert table.equals(again.tables[name])
        assert name == "costs" or table.equals(elsewhere[name])
    assert first.summary == again.summary and first.figures[QUESTION.name].axes
    assert set(first.tables["curves"]["arithmetic"]) == {"deviation", "float64"}  # Linformer has no deviation rule
    # Bare heads on the complete graph fall below what float64 can hold; the answer is no floor.
    end = first.tables["curves"].filter(pattern="complete", form="bare", layer=4)
    assert end["log10"].max() < -16 and not end["marked"].any()  # type: ignore[operator]


@pytest.mark.parametrize(("mask", "expected"), [("complete", 0.0), ("causal", 0.5), ("unidirectional", 0.5)])
def test_second_eigenvalues_are_those_of_triangles(mask: str, expected: float) -> None:
    """A triangle has its diagonal as eigenvalues: 1, 1/2, 1/3, ... of causal attention."""
    assert attention_patterns.second_eigenvalue(matrix(mask, 6).numpy()) == pytest.approx(expected, abs=1e-4)


def test_a_graph_in_parts_has_the_eigenvalue_one_twice() -> None:
    assert attention_patterns.second_eigenvalue(np.kron(np.eye(2), np.ones((3, 3)))) == pytest.approx(1.0)


@pytest.mark.parametrize("mask", ["causal", "unidirectional", "window:2", "bigbird:1:1:1"])
def test_what_even_attention_leaves_is_that_of_its_power(mask: str) -> None:
    """The power of the matrix itself, where float64 still holds it."""
    M = matrix(mask, 8).double().numpy()
    power = np.linalg.matrix_power(M / M.sum(1, keepdims=True), 6)
    left = np.linalg.norm(power - power.mean(0)) / np.linalg.norm(np.eye(8) - 1 / 8)
    assert attention_patterns.even_fall(M, 6) == pytest.approx(math.log10(left), rel=1e-9)


def tables(ends: dict[str, float], whole: float = -0.2, decided_by: str = "") -> dict[str, pl.DataFrame]:
    """Made-up tables: log10 of what is left with norms after the last layer, geometric; -0.5 where nothing is given.
    `decided_by` a column of the graphs, ends of masks are ordered by it."""
    graphs = attention_patterns.graphs(MADE_UP)
    if decided_by:
        order = graphs.filter("masked").sort(decided_by, nulls_last=True)
        values = [math.inf if value is None else value for value in order[decided_by].to_list()]
        places = {value: k for k, value in enumerate(sorted({*values}))}
        ends = {name: -20.0 + places[value] for name, value in zip(order["pattern"], values, strict=True)}
    curves = []
    for name in PATTERNS:
        for form in FORMS:
            end = whole if form == "whole" else ends.get(name, -0.5)
            for seed in (0, 1):
                curves += [(name, form, seed, layer, end * layer / DEPTH, False, "deviation")
                           for layer in range(DEPTH + 1)]  # fmt: skip
    rows = [(name, 0, "exact-factors", "upper", 2, 2, 0.5, None) for name in MASKS]
    trained = [{"pattern": name, "seed": seed, "loss": 1.0 + (k * 7 % 5) / 10, "accuracy": 0.5}
               for k, name in enumerate(PATTERNS) for seed in (0, 1)]  # fmt: skip
    return {
        "graphs": graphs, "curves": pl.DataFrame(curves, schema=CURVES, orient="row"),
        "certificates": pl.DataFrame(rows, schema=CERTIFICATES, orient="row"), "trained": pl.DataFrame(trained),
        "costs": pl.DataFrame([{"pattern": name, "round": 0, "ratio": 1.0} for name in PATTERNS]),
    }  # fmt: skip


def test_the_sentence_turns_with_what_decides() -> None:
    radius = QUESTION.answer(tables({}, decided_by="radius"), MADE_UP)
    other = QUESTION.answer(tables({}, decided_by="eigenvalue"), MADE_UP)
    assert radius.sentence.startswith("Without skips, the radius decides") and "radius 1.00" in radius.sentence
    assert other.sentence.startswith("Without skips, the radius does not decide")
    assert "second eigenvalue 1.00" in other.sentence
    assert [radius.verdicts[1].holds, radius.verdicts[2].holds] == [True, True]
    assert other.verdicts[2].holds is False


def test_the_answer_does_not_rest_on_what_was_added_after_the_quick_run() -> None:
    """Even attention may order masks best: the sentence still compares the radius with the rivals named before."""
    made = tables({}, decided_by="radius")
    ends = {name: study.pattern_fall(made["curves"], name, "norm").end for name in PATTERNS}  # type: ignore[union-attr]
    graphs = made["graphs"].with_columns(even=pl.col("pattern").replace_strict(ends))
    found = QUESTION.answer(made | {"graphs": graphs}, MADE_UP)
    assert found.sentence.startswith("Without skips, the radius decides (")
    assert found.verdicts[7].holds is False  # no better than it
    quick = QUESTION.answer(made | {"graphs": graphs}, study.QUICK)
    assert quick.verdicts[7].holds is None and "made on these data" in quick.verdicts[7].ours
    by_eigenvalue = tables({}, decided_by="eigenvalue")
    falls = {name: study.pattern_fall(by_eigenvalue["curves"], name, "norm") for name in PATTERNS}
    graphs = by_eigenvalue["graphs"].with_columns(
        even=pl.col("pattern").replace_strict({n: f.end for n, f in falls.items() if f is not None})
    )
    shown = [QUESTION.answer(by_eigenvalue | {"graphs": graphs}, sizes).sentence for sizes in (MADE_UP, study.QUICK)]
    assert ["what even attention" in sentence for sentence in shown] == [True, False]


def test_hypotheses_are_judged_by_the_tables() -> None:
    gone = QUESTION.answer(tables(dict.fromkeys(PATTERNS, -5.0), whole=-2.0), MADE_UP)
    kept = QUESTION.answer(tables({}), MADE_UP)
    assert [gone.verdicts[0].holds, kept.verdicts[0].holds] == [True, False]
    assert [gone.verdicts[4].holds, kept.verdicts[4].holds] == [False, True]
    assert "0 of 17 patterns keep" in gone.sentence and "17 of 17 collapse" in gone.sentence
    assert "17 of 17 patterns keep" in kept.sentence and "none collapses" in kept.sentence
    assert kept.verdicts[1].holds is None  # all ends are the same: nothing is ordered
    assert gone.verdicts[6].holds is True
    slow = QUESTION.answer(tables(dict.fromkeys(PATTERNS, -5.0) | {"linear": -1.0}), MADE_UP)
    assert [gone.verdicts[3].holds, slow.verdicts[3].holds] == [True, False]


def test_a_fall_that_speeds_up_is_told_from_a_straight_one() -> None:
    def fall(logs: list[float]) -> study.PatternFall:
        rows = [("complete", "norm", 0, k, log10, False, "deviation") for k, log10 in enumerate(logs)]
        found = study.pattern_fall(pl.DataFrame(rows, schema=CURVES, orient="row"), "complete", "norm")
        assert found is not None
        return found

    cubing, straight = fall([-(3.0**k) for k in range(6)]), fall([-2.0 * k for k in range(6)])
    assert cubing.faster and not straight.faster and straight.rate == pytest.approx(2.0)
    assert cubing.end == -(3.0**5)


def test_certificates_count_only_if_all_seeds_have_them() -> None:
    rows = [("causal", 0, "a", "upper", 2, 2, 0.5, None), ("causal", 1, "a", "upper", 2, 1, 0.5, None),
            ("causal", 0, "b", "upper", 2, 2, 3.0, None), ("causal", 1, "b", "upper", 2, 2, 4.0, None),
            ("causal", 0, "c", "lower", 2, 2, 0.1, None), ("causal", 1, "c", "lower", 2, 2, 0.1, None)]  # fmt: skip
    table = pl.DataFrame(rows, schema=CERTIFICATES, orient="row")
    assert study._certificates(table, "causal", 2) == {"b": 4.0}
