"""Every page of a study of the docs says what its kept data say now: tables, verdicts, answer and summary."""

from pathlib import Path
from typing import Any

import pytest

from rankscope_studies.questions import QUESTIONS
from rankscope_studies.questions.page import page, read_kept
from rankscope_studies.questions.question import Question

PAGES = Path(__file__).parents[2] / "docs" / "studies"


SLOW = ("number-or-length", "does-it-pay", "what-skips-pay")  # their tables are large: seconds each


def _case(question: Question) -> Any:
    marks = [pytest.mark.slow] if question.name in SLOW else []
    return pytest.param(question, id=question.name, marks=marks)


@pytest.mark.parametrize("question", [*map(_case, QUESTIONS)])
def test_a_page_follows_from_the_data_beside_it(question: Question) -> None:
    tables, sizes, kept = read_kept(PAGES, question)
    written = page(question, question.result(tables, sizes), sizes, kept)
    assert written == (PAGES / f"{question.name}.md").read_text(encoding="utf-8")
