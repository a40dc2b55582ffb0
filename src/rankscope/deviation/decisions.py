"""Shortcuts that the numbers of a pass allow, each asked for by name, so that a pass can be replayed without asking.

Every rule of deviation arithmetic has a general formula that is right for all numbers, and shortcuts that are
right for some: no token is padding, no score is far above the others, five terms of a series are enough.
Whether a shortcut is allowed is a question about numbers, and on a GPU its answer makes the host wait for
every kernel that was started before.

A rule states its formula, with a condition if it has two pieces, by `piecewise`, which finds out which pieces some
sample needs. The other questions are asked where numbers are kept (`state.py`), where passes are led through layers
(`second_pass.py`), and by the few rules that take one formula for a whole batch, so that the answer is in the last
digits of what they give (`softmax.py`, `terms_needed` of a series): `can_skip`, `must_compute`, `saves_a_pass`.
`replay.py` decides how questions are answered, in this order:

1. A computation on tokens of a shape that was not met before runs under `Recording`: every question is
   answered by the numbers, and the answers are kept.
2. The next computation of that shape runs under `Presuming` these answers: the same shortcuts are taken
   without looking, so that nothing waits and the computation can be captured as a CUDA graph. The conditions
   that shortcuts rest on are collected, and looked at together at the end, as one tensor, `violations`, which
   later replays of the graph compute anew.
3. If a replay has violations, its result is dropped: the computation runs under `Recording` again, with
   `at_most` the former answers: from then on only shortcuts that both recordings allow are presumed.

Outside of these (on a CPU) each question is answered by the numbers and nothing is kept.

A question is identified by the layer, its name and how often that name was asked before in the layer. Names
are string constants, one per call (`tests/deviation/test_decisions.py`). A pass asks the same questions in
the same order when it gets the same answers, since nothing else decides which formula it takes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rankscope.nets import converted
from rankscope.shapes import Bool

Question = tuple[int, str, int]  # (layer, name, how often the name was asked before in this layer)
Answers = dict[Question, int]
"""How much may be left out: 1 if a shortcut is allowed, or a number of terms. 0 (take the general formula) is
always correct; it is also the answer for a question that was never recorded."""


class Recording:
    """Answers each question by its numbers, and keeps the answers."""

    def __init__(self, at_most: Answers | None = None) -> None:
        """No answer is larger than in `at_most`, where it has one."""
        self.answers: Answers = {}
        self.layer = 0
        self._at_most = at_most or {}
        self._asked: Counter[tuple[int, str]] = Counter()

    def answer(self, name: str, condition: "Condition") -> int:
        """How much the condition allows to leave out."""
        question, allowed = self.question(name), condition.answer()
        self.answers[question] = min(allowed, self._at_most.get(question, allowed))
        return self.answers[question]

    def question(self, name: str) -> Question:
        """The identity of the question that is asked now."""
        key = (self.layer, name)
        self._asked[key] += 1
        return (*key, self._asked[key] - 1)


class Presuming(Recording):
    """Gives recorded answers without looking at numbers, and collects the conditions that these answers rest on."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.kept: list[Tensor] = []  # tensors that outlive the pass: a graph reads them where they lie
        self.must_hold: dict[float | None, list[Tensor]] = {}
        """Numbers that must lie within a limit, by that limit; by None truth values of which none may be false."""

    def answer(self, name: str, condition: "Condition") -> int:
        """The recorded answer; 0, which stands for the general formula, rests on no condition."""
        presumed = self.answers.get(self.question(name), 0)
        if presumed:
            numbers = condition.numbers(presumed)
            if numbers.numel() > MOST_ENTRIES:
                numbers = numbers.abs().max() if condition.within is not None else numbers.all()
            self.must_hold.setdefault(condition.within, []).append(numbers.flatten())
        return presumed

    def violations(self, like: Tensor) -> Bool[Tensor, " number"]:
        """True for each presumed answer that the numbers do not allow; on the device of `like`. Conditions are looked
        at together, which on a GPU is a few kernels in all, where it would be a few for each question."""
        parts = [torch.zeros(0, dtype=torch.bool, device=like.device)]
        for limit, numbers in self.must_hold.items():
            together = torch.cat(numbers)
            parts.append(~(together if limit is None else together.abs() <= limit))  # NaN is beyond every limit
        return torch.cat(parts)


MOST_ENTRIES = 4096  # entries of a condition that are kept for the end; a larger condition is reduced to one at once


@dataclass(frozen=True)
class Condition:
    """What an answer rests on."""

    numbers: Callable[[int], Tensor]  # truth values that all hold if so much may be left out
    within: float | None = None  # a limit, where these are numbers that all lie within it, on both sides of 0
    allowed: Callable[[], int] | None = None  # how much may be left out; 1 if the numbers hold, where this is None

    def answer(self) -> int:
        """How much the numbers allow to leave out."""
        if self.allowed is not None:
            return self.allowed()
        numbers = self.numbers(1)
        return int((numbers if self.within is None else numbers.abs() <= self.within).all())


How = TypeVar("How", bound=Recording)
Numbers = TypeVar("Numbers")
_asking: ContextVar[Recording | None] = ContextVar("asking", default=None)


def can_skip(name: str, condition: Tensor) -> bool:
    """True if work can be left out, where the condition holds in all its entries; doing the work is always right."""
    asking = _asking.get()
    return bool(condition.all() if asking is None else asking.answer(name, Condition(lambda _: condition)))


def must_compute(name: str, condition: Tensor) -> bool:
    """True if work has to be done, where the condition holds in some entry; doing the work is always right."""
    asking = _asking.get()
    return bool(condition.any()) if asking is None else not asking.answer(name, Condition(lambda _: ~condition))


def saves_a_pass(name: str, on: Tensor, condition: Callable[[], Tensor], within: float | None = None) -> bool:
    """True if one pass over the entries of a tensor can be left out: truth values all hold, or numbers lie within a
    limit on both sides of 0.

    Off the CPU this is only asked while answers are kept: to wait for it takes longer than the pass."""
    asking, holds = _asking.get(), Condition(lambda _: condition(), within)
    if asking is None:
        return on.device.type == "cpu" and bool(holds.answer())
    return bool(asking.answer(name, holds))


def terms_needed(name: str, enough: Tensor, most: int) -> int:
    """How many terms of a series to sum, where `enough` suffice; more are always right, up to `most`."""
    asking = _asking.get()
    if asking is None:
        return int(enough)
    left_out = Condition(lambda count: enough <= most - count, allowed=lambda: most - int(enough))
    return most - asking.answer(name, left_out)


def piecewise(
    name: str, pick: Bool[Tensor, "*batch"], there: Callable[[], Numbers], elsewhere: Numbers | Callable[[], Numbers]
) -> Numbers:
    """A formula of two pieces: the numbers of `there()` for the samples (or heads) where `pick` is true, those of
    `elsewhere` for the others. A piece that no sample needs is not computed.

    Args:
        name: A string constant, one per call, under which the answer (which pieces are needed) is kept for replays.
        pick: `[batch]`, or `[batch, head]`.
        there: Computes one piece: a tensor, or a tuple or dataclass of tensors, whose first axes are those of `pick`.
        elsewhere: Computes the other piece, or is it, if it was computed anyway.
    """
    asking = _asking.get()
    if asking is None:
        picked = int(pick.sum())  # one number, for which a GPU is waited for once
        nowhere, everywhere = not picked, picked == pick.numel()
    else:
        nowhere = bool(asking.answer(f"{name}, nowhere", Condition(lambda _: ~pick)))
        everywhere = not nowhere and bool(asking.answer(f"{name}, everywhere", Condition(lambda _: pick)))
    if everywhere:
        return there()
    rest = elsewhere() if callable(elsewhere) else elsewhere
    if nowhere:
        return rest
    shaped = {ndim: pick.reshape(*pick.shape, *[1] * (ndim - pick.ndim)) for ndim in range(pick.ndim, 5)}
    return converted(there(), lambda a, b: torch.where(shaped[a.ndim], a, b), rest)


def at_layer(index: int) -> None:
    """Makes the questions that follow belong to this layer."""
    asking = _asking.get()
    if asking is not None:
        asking.layer = index


def keep(t: Tensor) -> None:
    """Keeps a tensor that is no input and no result of a pass for as long as a graph reads it."""
    asking = _asking.get()
    if isinstance(asking, Presuming):
        asking.kept.append(t)


@contextmanager
def answering(asking: How) -> Iterator[How]:
    """Inside the `with`, questions are answered by this `Recording` or `Presuming`."""
    token = _asking.set(asking)
    try:
        yield asking
    finally:
        _asking.reset(token)
