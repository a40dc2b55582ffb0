"""Which work numbers let one leave out, asked in one place, so that a pass can be made again without asking.

Every rule has a general way that is right for all numbers, and shortcuts that are right for some. A question
about numbers on a GPU makes the host wait for all that was started before it. A pass that is made many times
is therefore asked once (`recorded`); from then on the same shortcuts are taken as allowed (`presumed`), and
whether they were is asked at the end, all at once.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from rankscope.shapes import Bool

Question = tuple[int, ...]
"""Where it is asked: the layer, the lines of those who call, and how often before."""
Answers = dict[Question, int]
"""How much can be left out: 1 where a shortcut is allowed, or so many terms. 0 is right always, and so it is
for what is not known."""
Asking = TypeVar("Asking", bound="Recorded")
GOING = ("traverse", "run_layer")
"""Who goes through a layer: a pass, and a witness of it."""


class Recorded:
    """Asks, and writes down what was answered."""

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.layer = 0
        self._before: Counter[Question] = Counter()

    def question(self) -> Question:
        """The one that is being asked, by the lines from the rule up to who goes through a layer."""
        frame, lines = sys._getframe(2), [self.layer]
        while frame.f_back is not None and frame.f_code.co_name not in GOING:
            lines += [id(frame.f_code), frame.f_lineno]
            frame = frame.f_back
        where = (*lines, frame.f_lineno)
        self._before[where] += 1
        return (*where, self._before[where])

    def answer(self, question: Question, condition: Tensor) -> int:
        """As numbers have it."""
        self.answers[question] = int(condition)
        return self.answers[question]


class Presumed(Recorded):
    """Takes answers of earlier times, and remembers what they rest on."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.rests_on: list[Question] = []
        self._violations: list[Tensor] = []

    def answer(self, question: Question, condition: Tensor) -> int:
        """As it was before; the general way rests on nothing."""
        known = self.answers.get(question, 0)
        if known:
            self.rests_on.append(question)
            self._violations.append((condition < known).reshape(()))
        return known

    def violations(self, like: Tensor) -> Bool[Tensor, " question"]:
        """Where more was left out than can be, of all that the answers `rests_on`."""
        empty = torch.zeros(0, dtype=torch.bool, device=like.device)
        return torch.stack(self._violations) if self._violations else empty


_asking: ContextVar[Recorded | None] = ContextVar("asking", default=None)


def can_skip(condition: Tensor) -> bool:
    """Whether work can be left out; to do it is right always."""
    asking = _asking.get()
    return bool(condition if asking is None else asking.answer(asking.question(), condition))


def must_compute(condition: Tensor) -> bool:
    """Whether work has to be done; to do it is right always."""
    asking = _asking.get()
    return bool(condition) if asking is None else not asking.answer(asking.question(), ~condition)


def saves_a_pass(on: Tensor, condition: Callable[[], Tensor]) -> bool:
    """Whether no more than a pass over all entries can be left out. Off the CPU only asked where answers are
    kept: this one has to cross to the host, which takes longer than the pass."""
    asking = _asking.get()
    if asking is None:
        return on.device.type == "cpu" and bool(condition())
    return bool(asking.answer(asking.question(), condition()))


def terms(enough: Tensor, most: int) -> int:
    """How many terms of a series are enough; more are right always, up to `most`."""
    asking = _asking.get()
    return int(enough) if asking is None else most - asking.answer(asking.question(), most - enough)


def at_layer(number: int) -> None:
    """Questions are of this layer from now on."""
    asking = _asking.get()
    if asking is not None:
        asking.layer = number


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Write down every answer."""
    yield from _while(Recorded())


@contextmanager
def presumed(answers: Answers) -> Iterator[Presumed]:
    """Take answers as given."""
    yield from _while(Presumed(answers))


def _while(asking: Asking) -> Iterator[Asking]:
    token = _asking.set(asking)
    try:
        yield asking
    finally:
        _asking.reset(token)
