"""What a theorem is given, and what it says: `Facts`, the `Hypothesis` it asks for, `Theorem`, `Evaluation`.

**Facts** are what was measured on one sample, once, for all theorems: sizes by layer, and what every layer did. All
sizes are natural logs, read in deviation arithmetic, so that a theorem can be compared with a residual of 1e-4000;
where a kernel has no rule there the pass runs in float64, and what only deviation arithmetic can say is NaN. Tokens
are those of one sample without its padding, masks those of its pass, padding and all. Every number may be off by
rounding: `rounding.py` has several passes'.

Numbers are taken of a whole batch, on the device that the network is on (`observation.py`, `readings.py`); then each of
the classes below that is a `Generic[Number]` holds tensors with an entry for each sample. A theorem gets floats.

**Hypotheses** are conditions in words, with the number found. Nothing that is nearly zero counts as zero: a skip of
1e-9 is a skip. A number that was measured may be off, and says how much room it has before the answer would be another.
"""

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rankscope.deviation import Scaled, State
from rankscope.nets import (
    KERNELS,
    Architecture,
    Kernel,
    Mask,
    MaskGraph,
    Transformer,
    block_order,
    kernel_of,
    matrix_graph,
)
from rankscope.remedies import BUILT_IN
from rankscope.shapes import Bool, Float
from rankscope.theory.logs import log
from rankscope.theory.weight_norms import HeadNorms, MLPNorms, WeightNorms

Centre = Literal["mean", "argmin"]
Number = TypeVar("Number")  # A float, or a tensor of one float for each sample
PerSample = Float[Tensor, " batch"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenSizes(Generic[Number]):
    """Sizes of the tokens at one layer, as natural logs."""

    residual: Number  # `||X - 1 x^T||_{1,inf}` about the chosen centre
    mu: Number  # `||X - 1 mean^T||_F`
    diameter: Number  # The largest distance between two tokens, in the 2-norm
    of_tokens: dict[str, Number]  # The same measure of the tokens themselves, to compare each quantity with
    shortest: Number
    longest: Number  # Lengths of the shortest and the longest token
    cosine: Number  # The smallest cosine between two tokens, as it is
    log_cosine_gap: Number  # log(1 - the smallest cosine), to full precision
    noise: Number  # Whether these are rounding noise, as far as one pass can tell


@dataclass(frozen=True)
class HalfFacts(Generic[Number]):
    """What a skip and its branches did to the deviation, in the Frobenius norm."""

    weight: float  # The weight of the skip
    log_gain: Number  # c: `||res(branch)|| / ||res(X)||`
    alignment: Number
    """`<res(branch), res(X)> / ||res(X)||^2`: how much of X's own deviation the branch adds or takes away."""
    log_norm: Number
    """`||res(norm U)|| / ||res(U)||` of a norm after the sum U; 0, a factor of one, where there is none."""
    log_longest: Number  # The longest token of the branch
    log_stretch: Number
    """Differences between tokens grow at most so much, by measured factors of each part (`bounds.py`)."""
    ranks: tuple[tuple[Number, Number, Number], ...]
    """Each norm's (affine rank before, after, the most it may take away)."""
    clear: Number  # Whether the ranks after are plain: no singular value lies where rounding decides if it counts
    vanished: Number
    """Whether a norm met a token that is zero but for rounding: it leaves one that is zero, and makes one
    that is rounding, or underflowed, as long as any."""


@dataclass(frozen=True)
class Agreement(Generic[Number]):
    """How far perturbed copies and float64 agree with the pass itself on the tokens after a layer."""

    difference: Number  # Of the copies' tokens, the largest, as `state_distance` has it
    float64_difference: Number
    """How far float64's deviation is from this one, as a share of it, where float64 can see."""
    lost: Number  # Whether a token that was not zero before the layer is too short after it
    undecided: Number  # Whether a copy disagrees on the order of steep scores
    elsewhere: Number  # Whether a copy attends to other tokens by steep scores


@dataclass(frozen=True)
class LayerNumbers(Generic[Number]):
    """What a layer did to these tokens; NaN where no theorem about such a network asks: oscillations beside a norm,
    factors of attention and exact ones beside a norm or an MLP."""

    log_oscillation: Number  # The largest `|E_ij - E_ij'|`, `E = R W_QK R^T / divisor`, over heads and rows
    log_oscillation_factor: Number
    """Factors of the composite residual through attention (`bounds.py`), from loose to exact."""
    log_attention_factor: Number
    log_exact_factor: Number
    log_averaging: Number  # `sum_h tau_h ||W_h||_2`, tau Dobrushin's coefficient
    log_smallest: Number  # The smallest attention weight on an edge of the mask
    row_sum_defect: Number


@dataclass(frozen=True)
class LayerFacts(LayerNumbers[float]):
    """Norms of one layer's weights, and what the layer did to these tokens."""

    heads: HeadNorms
    mlp: MLPNorms
    halves: tuple[HalfFacts[float], ...]


@lru_cache(maxsize=16)
def _mask_facts(n: int, entries: bytes) -> tuple[MaskGraph, int]:
    """(a mask as a graph, how many sets of visible tokens differ in it), computed once for equal masks."""
    M = torch.from_numpy(np.frombuffer(entries, dtype=np.bool_).reshape(n, n).copy())
    return matrix_graph(M), len(set(map(bytes, M.numpy()))) if n else 1


@dataclass(frozen=True)
class Facts:
    """What was measured on one sample in one network, for all theorems."""

    net: Transformer
    centre: Centre
    arithmetic: str
    sample: int  # Its number in the batch
    X: Float[Tensor, "token width"]  # The tokens at layer 0, float64, on the CPU
    first: State  # The same as a common token and deviations, where the network is
    visible: dict[str | Mask, Bool[Tensor, "token token"]]
    """Whom these tokens see by each mask, in the order of layers, on the CPU: as they ran, among any padding."""
    sizes: tuple[TokenSizes[float], ...]  # By layer, 0 the input
    layers: tuple[LayerFacts, ...]
    norms: WeightNorms
    branches: tuple[tuple[Scaled, ...], ...] = ()
    """By layer and half, res(branch) `[1, token, width]`, where the network is; empty where a norm follows a sum or a
    branch, so that no theorem asks for them."""
    memo: dict[Hashable, Any] = field(default_factory=dict)
    """Shared by the facts of all samples and passes of one call, of the same network."""

    def of_network(self, name: Hashable, compute: Callable[[], Result]) -> Result:
        """A number that depends on the network alone, computed once for all samples and passes."""
        if name not in self.memo:
            self.memo[name] = compute()
        return cast(Result, self.memo[name])

    def of_tokens(self, name: str, compute: Callable[[], Result]) -> Result:
        """A number that depends on the tokens at layer 0 alone, computed once for all passes."""
        return self.of_network((name, self.sample), compute)

    @cached_property
    def averaging(self) -> "list[Hypothesis]":
        """By layer from 1 on, the hypothesis that rows of attention sum to one, to 1e-9, in it and those before."""
        defects = accumulate([layer.row_sum_defect for layer in self.layers], max)
        says = "largest |row sum of attention - 1|"
        return [at_most(says, defect, 1e-9, measured=True) for defect in defects]

    @cached_property
    def arch(self) -> Architecture:
        """The architecture of the network."""
        return self.net.arch

    @cached_property
    def premises(self) -> "Premises":
        """What several theorems ask of the architecture."""
        return premises_of(self.net.arch)

    @cached_property
    def depth(self) -> int:
        """The number of layers of the network."""
        return len(self.layers)

    @cached_property
    def token_count(self) -> int:
        """The number of tokens of the sample."""
        return len(self.X)

    @property
    def mask(self) -> Bool[Tensor, "token token"]:
        """Whom these tokens see in the first layer."""
        return next(iter(self.visible.values()))

    @cached_property
    def graph(self) -> MaskGraph:
        """The mask of the first layer as a graph on these tokens."""
        return _mask_facts(len(self.mask), self.mask.numpy().tobytes())[0]

    @cached_property
    def distinct_views(self) -> int:
        """The most different sets of visible tokens in any layer: 1 where all tokens see the same."""
        return max(_mask_facts(len(M), M.numpy().tobytes())[1] for M in self.visible.values())

    @cached_property
    def inflation(self) -> float:
        """log of kappa: the mean-centred residual is at most `2 (1 - 1/n)` times the smallest."""
        return log(2 * (1 - 1 / self.token_count)) if self.centre == "mean" else 0.0


@dataclass(frozen=True)
class Passes:
    """The facts of one sample: of the pass itself, then of its perturbed copies; and how far they agree."""

    facts: tuple[Facts, ...]
    agreement: tuple[Agreement[float], ...]  # By layer, 0 the input
    memo: dict[str, Any] = field(default_factory=dict)  # Results that depend on these passes alone, by name


SOFTMAX = ("softmax", "gaussian", "uniform")
"""Kernels that are a softmax of scores, bilinear in tokens but for what is constant down a column."""
AVERAGES = tuple(kernel.name for kernel in KERNELS.values() if kernel.averages)
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
        return self.sentence

    @cached_property
    def sentence(self) -> str:
        """What is asked, the number found, and what it must be."""
        return f"{self.says}: {self.number:.6g}, must be {self.limit}"


MET = attrgetter("met")


@lru_cache(maxsize=1024)
def compared(sign: str, says: str, number: int | float, limit: int | float, measured: bool = False) -> Hypothesis:
    """The hypothesis that a number stands to its limit as the sign says; one that was `measured` may be off."""
    room = (limit - number if sign == "<=" else number - limit) if measured else math.inf
    return Hypothesis(says, float(number), f"{sign} {limit:g}", bool(SIGNS[sign](number, limit)), float(room))


SIGNS: dict[str, Callable[[Any, Any], Any]] = {"=": operator.eq, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
equal, at_most, above, at_least = (partial(compared, sign) for sign in SIGNS)


@dataclass(frozen=True)
class Premises:
    """What several theorems ask of an architecture, each as a hypothesis, and what else they need to know of it."""

    pure_attention: tuple[Hypothesis, ...]  # No skip around attention, no MLP, no norm
    no_skip: Hypothesis  # There is no skip around attention
    no_mlp: Hypothesis
    no_norm: Hypothesis
    no_parts: tuple[Hypothesis, ...]  # No custom parts, experts or gates on heads; empty where there are none
    softmax: Hypothesis  # The kernel is a softmax of scores
    token_scores: tuple[Hypothesis, ...]
    """Scores are a bilinear form of tokens: a softmax over `X W_QK X^T` and what is constant along a row or down a
    column."""
    averages: Hypothesis
    """Rows of attention sum to one whatever the tokens are, not just nearly so on these: a defect of 1e-10 times a
    large common token is more than what is left of small differences."""
    skips: tuple[float, ...]  # |weight| of every skip of a layer
    normed_sums: bool  # Whether a norm follows the sum of skip and branch
    normed_branches: bool  # Whether a norm follows a branch, before its sum with the skip


@lru_cache(maxsize=64)
def premises_of(arch: Architecture) -> Premises:
    """The premises of theorems on this architecture."""
    no_skip = equal("weight of the skip around attention", arch.attention_skip, 0)
    no_mlp = equal("MLPs in a layer", arch.mlp != "none", 0)
    no_norm = equal("norms in a layer (0: norm 'none')", arch.norm != "none", 0)
    names = [part.name for part in arch.parts]
    names += ["a mixture of experts"] if arch.mlp == "experts" else []
    names += ["gates on heads"] if arch.head_gate else []
    no_parts = (equal(f"parts that are not the theorem's ({', '.join(names)})", len(names), 0),) if names else ()
    softmax = equal(f"attention by a kernel other than {', '.join(SOFTMAX)}", arch.kernel not in SOFTMAX, 0)
    relative = arch.positions not in ("none", "absolute")
    token_scores = (
        softmax,
        equal("scores that depend on where tokens stand (relative, rotary, bias, alibi)", relative, 0),
        equal("norms of queries and keys", arch.query_norm, 0),
        equal("the cap on scores (0: none)", arch.score_cap, 0),
    )
    says = f"attention by a kernel other than {', '.join(AVERAGES)}, whose rows sum to one"
    averages, halves = equal(says, not kernel_of(arch.kernel).averages, 0), block_order(arch)
    return Premises(
        (no_skip, no_mlp, no_norm), no_skip, no_mlp, no_norm, no_parts, softmax, token_scores, averages,
        skips=tuple(abs(half.skip) for half in halves),
        normed_sums=any(half.after is not None for half in halves),
        normed_branches=any(branch.after is not None for half in halves for branch in half.branches),
    )  # fmt: skip


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
    kernel = [arch.kernel] if isinstance(arch.kernel, Kernel) else []
    return ", ".join(part.name for part in (*kernel, *arch.parts) if not isinstance(part, BUILT_IN))


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


def by_layer(facts: Facts, fixed: Sequence[Hypothesis], *checked: Sequence[Hypothesis]) -> list[Sequence[Hypothesis]]:
    """The hypotheses of every layer from 1 on.

    Args:
        facts: What was measured.
        fixed: Hypotheses about the architecture, which every layer has.
        checked: Hypotheses with an entry for each layer, which says what holds in it and those before.
    """
    fixed = [*facts.premises.no_parts, *fixed]
    return [[*fixed, *of_layer] for of_layer in zip(*checked, strict=True)] if checked else [fixed] * facts.depth


def refusal(facts: Facts, fixed: Sequence[Hypothesis], of_averages: bool = True) -> Evaluation | None:
    """The evaluation of a theorem that is about another kind of network, before anything is computed for it; None
    where the hypotheses of the architecture are met. Those `of_averages` also say what rows of attention sum to."""
    if all(map(MET, (*facts.premises.no_parts, *fixed))):
        return None
    return Evaluation([math.nan] * facts.depth, by_layer(facts, fixed, *[facts.averaging][:of_averages]))


def averaging_bound(facts: Facts, bounds: Sequence[float], fixed: Sequence[Hypothesis]) -> Evaluation:
    """Bounds that hold wherever these hypotheses do and rows of attention sum to one."""
    return Evaluation(bounds, by_layer(facts, fixed, facts.averaging))
