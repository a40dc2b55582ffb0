"""Questions of one's own, answered by experiment: `rankscope study NAME`."""

from rankscope.errors import StudyError, one_of
from rankscope.studies.questions.hysteresis import STUDY as HYSTERESIS
from rankscope.studies.study import Study

QUESTIONS: tuple[Study, ...] = (HYSTERESIS,)


def questions(name: str) -> list[Study]:
    """The study of a name, or every one with 'all'.

    >>> [study.figure for study in questions("hysteresis")]
    ['hysteresis']
    """
    known = {study.figure: study for study in QUESTIONS}
    if name == "all":
        return list(QUESTIONS)
    if name not in known:
        raise StudyError(one_of("study", name, [*known, "all"]), subject="study")
    return [known[name]]


__all__ = ["QUESTIONS", "questions"]
