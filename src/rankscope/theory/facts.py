"""What was measured on one sample, once, for all theorems: sizes by layer, and what every layer did.

All sizes are natural logs, read in deviation arithmetic, so that a theorem can be compared with a residual of 1e-4000;
where a kernel has no rule there the pass runs in float64, and what only deviation arithmetic can say is NaN. Tokens
are those of one sample without its padding, masks those of its pass, padding and all. Every number may be off by
rounding: `rounding.py` has several passes'.

Numbers are taken of a whole batch, on the device that the network is on (`observation.py`, and the files that it calls:
`attention_numbers.py`, `readings.py`); then each of the classes below that is a `Generic[Number]` holds
tensors with an entry for each sample. A theorem gets floats.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rankscope.deviation import Scaled, State
from rankscope.nets import Architecture, Mask, MaskGraph, Transformer, matrix_graph
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
    """Differences between tokens grow at most so much, by measured factors of each part (`upper_bounds.py`)."""
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
    """Factors of the composite residual through attention (`upper_bounds.py`), from loose to exact."""
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


def _once(memo: dict[Hashable, Any], key: Hashable, compute: Callable[[], Result]) -> Result:
    if key not in memo:
        memo[key] = compute()
    return cast(Result, memo[key])


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
    memo_of_pass: dict[Hashable, Any] = field(default_factory=dict)

    def of_network(self, name: str, compute: Callable[[], Result]) -> Result:
        """A number that depends on the network alone, computed once for all samples and passes."""
        return _once(self.memo, name, compute)

    def of_tokens(self, name: str, compute: Callable[[], Result]) -> Result:
        """A number that depends on the tokens at layer 0 alone, computed once for all passes."""
        return _once(self.memo, (name, self.sample), compute)

    def of_pass(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """A result that depends on these facts alone, computed once for all theorems."""
        return _once(self.memo_of_pass, key, compute)

    @property
    def arch(self) -> Architecture:
        """The architecture of the network."""
        return self.net.arch

    @property
    def depth(self) -> int:
        """The number of layers of the network."""
        return len(self.layers)

    @property
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

    @property
    def inflation(self) -> float:
        """log of kappa: the mean-centred residual is at most `2 (1 - 1/n)` times the smallest."""
        return log(2 * (1 - 1 / self.token_count)) if self.centre == "mean" else 0.0


@dataclass(frozen=True)
class Passes:
    """The facts of one sample: of the pass itself, then of its perturbed copies; and how far they agree."""

    facts: tuple[Facts, ...]
    agreement: tuple[Agreement[float], ...]  # By layer, 0 the input
    memo: dict[str, Any] = field(default_factory=dict)  # Results that depend on these passes alone, by name
