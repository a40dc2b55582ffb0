"""`Theorem`, the `Hypothesis` it asks for, in words, with the number found, and `Evaluation`, what it says of an input.

Nothing that is nearly zero counts as zero: a skip of 1e-9 is a skip. A number that was measured may be off,
and says how much room it has before the answer would be another (`rounding.py`).
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

from rankscope.nets import Architecture, kernels
from rankscope.nets.order import order
from rankscope.remedies import BUILT_IN
from rankscope.theory.facts import Facts

SOFTMAX = ("softmax", "gaussian", "uniform")
"""Kernels that are a softmax of scores, bilinear in tokens but for what is constant down a column."""
AVERAGES = tuple(kernel.name for kernel in kernels.KERNELS.values() if kernel.averages)
"""Kernels that divide every row by its sum."""


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One condition of a theorem, with the number found and whether it is met; equal to itself alone."""

    says: str
    number: float
    limit: str
    met: bool
    room: float = math.inf
    """How far the number is from its limit, where it was measured and may be off; infinite where it is exact,
    as what an architecture is or has."""

    def __str__(self) -> str:
        return self._sentence

    @cached_property
    def _sentence(self) -> str:
        return f"{self.says}: {self.number:.6g}, must be {self.limit}"


@lru_cache(maxsize=1024)
def compared(sign: str, says: str, number: int | float, limit: int | float, measured: bool = False) -> Hypothesis:
    """The hypothesis that a number stands to its limit as the sign says; one that was `measured` may be off."""
    room = (limit - number if sign == "<=" else number - limit) if measured else math.inf
    return Hypothesis(says, float(number), f"{sign} {limit:g}", bool(SIGNS[sign](number, limit)), float(room))


SIGNS: dict[str, Callable[[Any, Any], Any]] = {"=": operator.eq, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
equal, at_most, above, at_least = (partial(compared, sign) for sign in SIGNS)


# Conditions on the architecture that several theorems share.


def pure_attention(arch: Architecture) -> list[Hypothesis]:
    """The hypotheses that layers have no skip around attention, no MLP and no norm."""
    return [no_skip(arch), no_mlp(arch), no_norm(arch)]


def no_skip(arch: Architecture) -> Hypothesis:
    """The hypothesis that there is no skip around attention."""
    return equal("weight of the skip around attention", arch.attention_skip, 0)


def no_mlp(arch: Architecture) -> Hypothesis:
    """The hypothesis that layers have no MLP."""
    return equal("MLPs in a layer", arch.mlp != "none", 0)


def no_norm(arch: Architecture) -> Hypothesis:
    """The hypothesis that layers have no norm."""
    return equal("norms in a layer (0: norm 'none')", arch.norm != "none", 0)


def normed_sums(arch: Architecture) -> bool:
    """True if a norm follows the sum of skip and branch."""
    return any(half.after is not None for half in order(arch))


def normed_branches(arch: Architecture) -> bool:
    """True if a norm follows a branch, before its sum with the skip."""
    return any(branch.after is not None for half in order(arch) for branch in half.branches)


def skips(arch: Architecture) -> list[float]:
    """|weight| of every skip of a layer."""
    return [abs(half.skip) for half in order(arch)]


def outside(arch: Architecture) -> str:
    """Why no theorem here applies to this architecture; empty where some may."""
    if arch.cross_attention:
        return "cross-attention, by which tokens take in what differs in a memory"
    if arch.key_latent or arch.query_latent:
        return "latents that go through norms of their own before they are queries, keys or values"
    if arch.log_gain:
        return "scores that grow with the log of the number of tokens"
    return ""


def own_objects(arch: Architecture) -> str:
    """The names of the kernel and parts that are the user's own; empty where there are none."""
    kernel = [arch.kernel] if isinstance(arch.kernel, kernels.Kernel) else []
    return ", ".join(part.name for part in (*kernel, *arch.parts) if not isinstance(part, BUILT_IN))


def no_parts(arch: Architecture) -> list[Hypothesis]:
    """The hypothesis that no custom parts, experts or head gates are there; an empty list where there are none."""
    names = [part.name for part in arch.parts]
    names += ["a mixture of experts"] if arch.mlp == "experts" else []
    names += ["gates on heads"] if arch.head_gate else []
    sentence = f"parts that are not the theorem's ({', '.join(names)})"
    return [equal(sentence, len(names), 0)] if names else []


def token_scores(arch: Architecture) -> list[Hypothesis]:
    """Scores are a bilinear form of tokens: a softmax over `X W_QK X^T` and what is constant along a row or
    down a column."""
    relative = arch.positions not in ("none", "absolute")
    return [
        softmax(arch),
        equal("scores that depend on where tokens stand (relative, rotary, bias, alibi)", relative, 0),
        equal("norms of queries and keys", arch.query_norm, 0),
        equal("the cap on scores (0: none)", arch.score_cap, 0),
    ]


def softmax(arch: Architecture) -> Hypothesis:
    """The kernel is a softmax of scores."""
    return equal(f"attention by a kernel other than {', '.join(SOFTMAX)}", arch.kernel not in SOFTMAX, 0)


def averages(arch: Architecture) -> Hypothesis:
    """Rows of attention sum to one whatever the tokens are, not just nearly so on these: a defect of 1e-10
    times a large common token is more than what is left of small differences."""
    says = f"attention by a kernel other than {', '.join(AVERAGES)}, whose rows sum to one"
    return equal(says, not kernels.kernel_of(arch.kernel).averages, 0)


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

    def compute() -> list[Hypothesis]:
        defects = [0.0, *accumulate((layer.row_sum_defect for layer in facts.layers), max)]
        return [at_most("largest |row sum of attention - 1|", defect, 1e-9, measured=True) for defect in defects]

    return [facts.of_pass("averaging", compute)[upto]]


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
