"""`Theorem`, and `Evaluation`: what a theorem says of one network and input."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import Hypothesis, at_most, no_parts

Kind = Literal["upper", "lower"]


@dataclass(frozen=True)
class Evaluation:
    """A theorem on one sample, by layer from 1 on. A bound counts where all its hypotheses are met."""

    bounds: Sequence[float]  # Natural logs
    hypotheses: Sequence[Sequence[Hypothesis]]
    measured: Sequence[float] | None = None
    """Natural logs, where it bounds something else than a size of the tokens by layer."""


@dataclass(frozen=True)
class Theorem:
    """What is proved, where, about which quantity, and the function that evaluates it."""

    name: str
    source: str
    says: str
    quantity: str  # residual (`||res X||_{1,inf}`), mu (`||res X||_F`), diameter, or affine_rank
    kind: Kind  # Whether the quantity stays below the bound, or above
    evaluate: Callable[[Facts], Evaluation]


def theorem(name: str, source: str, quantity: str, kind: Kind) -> Callable[[Callable[[Facts], Evaluation]], Theorem]:
    """A decorator that makes a `Theorem` of the function that evaluates it, whose docstring is what it says."""
    return lambda evaluate: Theorem(name, source, evaluate.__doc__ or "", quantity, kind, evaluate)


def by_layer(
    facts: Facts, fixed: Sequence[Hypothesis], moving: Callable[[int], Sequence[Hypothesis]] = lambda _: ()
) -> list[list[Hypothesis]]:
    """The hypotheses of every layer: those of the architecture, and those checked on layers 1..l."""
    fixed = [*no_parts(facts.arch), *fixed]
    return [[*fixed, *moving(layer)] for layer in range(1, facts.depth + 1)]


def averaging(facts: Facts, upto: int) -> list[Hypothesis]:
    """The hypothesis that rows of attention sum to one, to 1e-9, in layers 1..upto."""
    return [facts.of_pass("averaging", lambda: _averaging(facts))[upto]]


def _averaging(facts: Facts) -> list[Hypothesis]:
    defects = [0.0, *accumulate((layer.row_sum_defect for layer in facts.layers), max)]
    return [at_most("largest |row sum of attention - 1|", defect, 1e-9, measured=True) for defect in defects]


def refusal(facts: Facts, fixed: Sequence[Hypothesis], of_averages: bool = True) -> Evaluation | None:
    """The evaluation of a theorem that is about another kind of network, before anything is computed for it; None
    where the hypotheses of the architecture are met. Those `of_averages` also say what rows of attention sum to."""
    if all(hypothesis.met for hypothesis in (*no_parts(facts.arch), *fixed)):
        return None
    measured = (lambda upto: averaging(facts, upto)) if of_averages else (lambda _: [])
    return Evaluation([math.nan] * facts.depth, by_layer(facts, fixed, measured))


def averaging_bound(facts: Facts, bounds: Sequence[float], fixed: Sequence[Hypothesis]) -> Evaluation:
    """Bounds that hold wherever these hypotheses do and rows of attention sum to one."""
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: averaging(facts, upto)))
