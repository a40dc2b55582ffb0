"""Questions of one's own, answered by experiment: `rankscope study NAME`. `question.py` says how to write one."""

from rankscope.errors import StudyError, one_of
from rankscope_studies.questions.beyond_attention import QUESTION as BEYOND_ATTENTION
from rankscope_studies.questions.does_it_pay import QUESTION as DOES_IT_PAY
from rankscope_studies.questions.efficient import QUESTION as EFFICIENT
from rankscope_studies.questions.hysteresis import QUESTION as HYSTERESIS
from rankscope_studies.questions.layernorm import QUESTION as LAYERNORM
from rankscope_studies.questions.long_paths import QUESTION as LONG_PATHS
from rankscope_studies.questions.lower_bounds import QUESTION as LOWER_BOUNDS
from rankscope_studies.questions.number_or_length import QUESTION as NUMBER_OR_LENGTH
from rankscope_studies.questions.page import keep, read_kept, refuse_smaller, write_pages
from rankscope_studies.questions.question import HypothesisVerdict, Question, StudyAnswer
from rankscope_studies.questions.using_paths import QUESTION as USING_PATHS
from rankscope_studies.questions.what_skips_pay import QUESTION as WHAT_SKIPS_PAY
from rankscope_studies.questions.width_depth import QUESTION as WIDTH_DEPTH

QUESTIONS: tuple[Question, ...] = (
    LONG_PATHS,
    NUMBER_OR_LENGTH,
    USING_PATHS,
    WIDTH_DEPTH,
    EFFICIENT,
    BEYOND_ATTENTION,
    WHAT_SKIPS_PAY,
    LAYERNORM,
    DOES_IT_PAY,
    HYSTERESIS,
    LOWER_BOUNDS,
)


def questions(name: str) -> list[Question]:
    """The question of a name, or every one with 'all'.

    >>> [question.name for question in questions("hysteresis")]
    ['hysteresis']
    """
    known = {question.name: question for question in QUESTIONS}
    if name == "all":
        return list(QUESTIONS)
    if name not in known:
        raise StudyError(one_of("study", name, [*known, "all"]), subject="study")
    return [known[name]]


__all__ = [
    "QUESTIONS", "HypothesisVerdict", "Question", "StudyAnswer", "keep", "questions", "read_kept", "refuse_smaller",
    "write_pages",
]  # fmt: skip
