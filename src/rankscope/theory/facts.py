"""What was measured on one sample, once, for all theorems: sizes by layer, and what every layer did.

All sizes are natural logs, read in deviation arithmetic, so that a theorem can be compared with a residual of 1e-4000;
where a kernel has no rule there the pass runs in float64, and what only deviation arithmetic can say is NaN. Tokens
are those of one sample without its padding, masks those of its pass, padding and all. Every number may be off by
rounding: `rounding.py` has several passes'.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rankscope.deviation import Scaled, State
from rankscope.deviation.attention import DeviationPattern
from rankscope.nets import Architecture, MaskGraph, Transformer
from rankscope.nets.graphs import matrix_graph
from rankscope.nets.masks import Mask
from rankscope.shapes import Bool, Float
from rankscope.theory.logs import log
from rankscope.theory.weight_norms import HeadNorms, MLPNorms, WeightNorms

Centre = Literal["mean", "argmin"]


@dataclass(frozen=True)
class TokenSizes:
    """Sizes of the tokens at one layer, as natural logs."""

    residual: float  # `||X - 1 x^T||_{1,inf}` about the chosen centre
    mu: float  # `||X - 1 mean^T||_F`
    diameter: float  # The largest distance between two tokens, in the 2-norm
    of_tokens: dict[str, float]  # The same measure of the tokens themselves, to compare each quantity with
    shortest: float
    longest: float  # Lengths of the shortest and the longest token
    cosine: float  # The smallest cosine between two tokens, as it is
    log_cosine_gap: float  # log(1 - the smallest cosine), to full precision
    noise: bool  # Whether these are rounding noise, as far as one pass can tell
    state: State  # The tokens themselves
    float64_difference: float = 0.0
    """How far float64's deviation is from this one, as a share of it, where float64 can see."""


@dataclass(frozen=True)
class HalfFacts:
    """What a skip and its branches did to the deviation, in the Frobenius norm."""

    weight: float  # The weight of the skip
    log_gain: float  # c: `||res(branch)|| / ||res(X)||`
    alignment: float
    """`<res(branch), res(X)> / ||res(X)||^2`: how much of X's own deviation the branch adds or takes away."""
    log_norm: float  # `||res(norm U)|| / ||res(U)||` of a norm after the sum U; 0, a factor of one, where there is none
    log_longest: float  # The longest token of the branch
    branch: Scaled  # res(branch) `[1, token, width]`
    log_stretch: float
    """Differences between tokens grow at most so much, by measured factors of each part (`factors.py`)."""
    ranks: tuple[tuple[int, int, int], ...]  # Each norm's (affine rank before, after, the most it may take away)
    clear: bool  # Whether the ranks after are plain: no singular value lies where rounding decides if it counts
    vanished: bool
    """Whether a norm met a token that is zero but for rounding: it leaves one that is zero, and makes one
    that is rounding, or underflowed, as long as any."""


@dataclass(frozen=True)
class LayerFacts:
    """Norms of one layer's weights, and what the layer did to these tokens."""

    heads: HeadNorms
    mlp: MLPNorms
    log_oscillation: float  # The largest `|E_ij - E_ij'|`, `E = R W_QK R^T / divisor`, over heads and rows
    log_oscillation_factor: float
    """Factors of the composite residual through attention (`factors.py`), from loose to exact."""
    log_attention_factor: float
    log_exact_factor: float
    log_averaging: float  # `sum_h tau_h ||W_h||_2`, tau Dobrushin's coefficient
    log_smallest: float  # The smallest attention weight on an edge of the mask
    row_sum_defect: float
    attention: DeviationPattern
    halves: tuple[HalfFacts, ...]


@dataclass(frozen=True)
class Facts:
    """What was measured on one sample in one network, for all theorems."""

    net: Transformer
    centre: Centre
    arithmetic: str
    X: Float[Tensor, "token width"]  # The tokens at layer 0, float64
    first: State  # The same as a common token and deviations
    visible: dict[str | Mask, Bool[Tensor, "token token"]]
    """Whom these tokens see by each mask, in the order of layers, on the CPU: as they ran, among any padding."""
    sizes: tuple[TokenSizes, ...]  # By layer, 0 the input
    layers: tuple[LayerFacts, ...]
    norms: WeightNorms

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
        return matrix_graph(self.mask)

    @cached_property
    def distinct_views(self) -> int:
        """The most different sets of visible tokens in any layer: 1 where all tokens see the same."""
        return max(len(torch.unique(M, dim=0)) if len(M) else 1 for M in self.visible.values())

    @property
    def inflation(self) -> float:
        """log of kappa: the mean-centred residual is at most `2 (1 - 1/n)` times the smallest."""
        return log(2 * (1 - 1 / self.token_count)) if self.centre == "mean" else 0.0
