"""Studies of questions of one's own: the names they are run by."""

import pytest

from rankscope.errors import StudyError
from rankscope_studies.commands.study import STUDIES
from rankscope_studies.questions import QUESTIONS, questions


def test_studies_are_found_by_name() -> None:
    assert {question.name for question in QUESTIONS} == set(STUDIES)
    assert questions("all") == list(QUESTIONS)
    with pytest.raises(StudyError):
        questions("nothing")
