"""Phases of attention, and exponents of angles and gradients, in closed form: the limit of many tokens.

`giorlandino` takes the traversal of a block (`nets/traversal.py`) with rules on numbers instead of tensors. Tokens are
exchangeable: each has the mean square q, each two the mean product p. Weights are random and a head is wide, so that
the n scores of a row are Gaussian and differ with variance `sigma^2 q (q - p)`. With `sigma = beta sqrt(ln n)` they are
the energies of Derrida's random energy model (Giorlandino & Goldt 2026), which has a phase transition:

| phase            | where                                   | a row of attention is              | `Y_2`              |
|------------------|-----------------------------------------|------------------------------------|--------------------|
| rank collapse    | `beta < beta_c = sqrt(2 / (q (q - p)))` | on more and more tokens as n grows | 0                  |
| neither          | `beta_c < beta < 2 beta_c`              | on a few tokens                    | `1 - m`            |
| entropy collapse | `2 beta_c < beta`                       | on one token, or nearly            | `1 - m`, above 1/2 |

with `Y_2` the sum of squares of the row, `Y_3` that of cubes, and `m = beta_c / beta`. The second boundary is a
convention: `1 / Y_2` is the number of tokens that a row is on. Where tokens are read through a norm, its q and p decide
(the published notebook for pre-norm takes those before it). Attention makes of (q, p)

    q = sigma_v^2 (p + (q - p) Y_2),    p = sigma_v^2 p,    sigma_v^2 the gain of values and output together.

What a small change of tokens becomes decides the exponents. Linear maps, norms and skips pass it on as they do q, an
activation by `E phi'(u)^2`, attention by `Y_2` through values; queries and keys add to that

    sigma^2 (q - p) (2 q - p) Y,    Y = E[Y_2 - 2 Y_3 + (Y_2)^2] = m (1 - m) / 3,

Y being what is left of a change of scores in the pattern: nothing at rank collapse, where all of a row moves, and
nothing at entropy collapse, where the one token stays. The gradient at weights of queries is, in mean square,
`sigma_k^2 sigma_v^2 q (q - p)^2 Y`. Networks come near to all this as `1 / ln n` and `ln n / width` fall: slowly.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rankscope.forecasts.mean_field import expansion, gain_of, mean_square, products, refuse, refuse_parts
from rankscope.nets import ACTIVATIONS, Arithmetic, Block, Half, Linear, Transformer, norm_of, rotary_tables, traverse
from rankscope.nets import mask_matrix as matrix

RANK, ENTROPY, NEITHER = "rank collapse", "entropy collapse", "neither"


@dataclass(frozen=True)
class Phase:
    """What theory says of one layer, for many tokens."""

    layer: int  # The number of the layer, from 1
    q: float  # The mean square of an entry of a token, after the layer
    p: float  # The mean product of the same entry of two tokens, after the layer
    beta: float  # The standard deviation of scores of tokens of mean square 1, over `sqrt(ln n)`
    critical: float  # beta_c, the boundary, for the tokens that attention reads
    participation: float  # `Y_2`, the sum of squares of a row of attention
    angle_exponent: float  # The log of what the layer multiplies `1 - p / q` by, of tokens that are almost alike
    gradient_exponent: float
    """The log of what the layer multiplies the mean square of gradients at tokens by, as far as they differ from token
    to token."""
    shared_exponent: float
    """The same of the mean of gradients over tokens. Attention keeps all of it, so that it outgrows what differs: see
    `log_gradient`."""
    query_gradient: float
    """The mean square of the gradient of `<attention(X), R> / sqrt(n)`, R of normal entries, at an entry of the weights
    of queries."""

    @property
    def cosine(self) -> float:
        """The cosine of two tokens after the layer, `p / q`."""
        return self.p / self.q if self.q else math.nan

    @property
    def distance(self) -> float:
        """`log(beta / beta_c)`: how far the layer is from rank collapse; negative inside."""
        return _log(self.beta) - _log(self.critical)

    @property
    def name(self) -> str:
        """Which phase the layer is in."""
        return RANK if self.distance < 0 else ENTROPY if self.participation > 0.5 else NEITHER


def giorlandino(net: Transformer, q: float, p: float, tokens: int) -> Iterator[Phase]:
    """Yield the phase, moments and exponents of every layer, by the recursion of Giorlandino & Goldt (2026).

    Args:
        net: A network whose weights are random; of them only mean squares are used.
        q: The mean square of an entry of the tokens that the network reads.
        p: The mean product of the same entry of two of them.
        tokens: How many there are. Under a mask theory speaks of the tokens that see most.

    Raises:
        ArchitectureError: A part has no closed form, as a kernel other than softmax or positions that add to scores.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=64, heads=4, norm_place="pre"))
    >>> [phase.name for phase in giorlandino(net, q=1.0, p=0.2, tokens=512)]
    ['rank collapse', 'rank collapse']
    """
    arch = net.arch
    refuse_parts(arch)
    refuse({
        f"the kernel {arch.kernel!r} in closed form": arch.kernel != "softmax",
        f"{arch.positions} positions in closed form": arch.positions in ("bias", "alibi"),
        "a cap of scores in closed form": bool(arch.score_cap),
    })  # fmt: skip
    rules = ClosedForm(net, tokens)
    for block in net.blocks:
        refuse({"tokens without length or without another": not q > 0 or tokens < 2})
        state = traverse(block, rules, Exchangeable(q, p, np.ones(3))).state
        angle, gradient, shared = map(_log, state.changes * [q / (state.q or math.inf), 1.0, 1.0])
        q, p = state.q, state.p
        yield Phase(block.index + 1, q, p, *rules.scores, angle, gradient, shared, rules.query_gradient)


def log_gradient(phases: Iterable[Phase], tokens: int) -> float:
    """Return the log of the mean square of gradients at tokens before some layers, over that after them, for a loss
    whose gradients at the last tokens are independent: their mean then has a share of 1 / n, n the number of tokens.
    """
    gradient, shared = np.sum([[phase.gradient_exponent, phase.shared_exponent] for phase in phases], 0)
    return float(np.logaddexp(gradient + math.log(1 - 1 / tokens), shared - math.log(tokens)))


@dataclass(frozen=True)
class Exchangeable:
    """The second moments of exchangeable tokens, and of small changes of them."""

    q: float  # The mean square of an entry
    p: float  # The mean product of the same entry of two tokens
    changes: Any
    """What small changes at the start of the layer are multiplied by, in mean square: of two tokens that are almost
    alike; of all tokens, independent of each other; of all tokens alike. Gradients go back by the same factors."""

    def __mul__(self, factor: float) -> "Exchangeable":
        return Exchangeable(self.q * factor, self.p * factor, self.changes * factor)

    def __add__(self, other: "Exchangeable") -> "Exchangeable":
        return Exchangeable(self.q + other.q, self.p + other.p, self.changes + other.changes)

    def biased(self, square: float) -> "Exchangeable":
        """Return the tokens with one that all share, of this mean square, added."""
        return Exchangeable(self.q + square, self.p + square, self.changes)


class RowMoments(NamedTuple):
    """What a row of attention does to exchangeable tokens."""

    total: float  # The sum of the row
    squares: float  # The sum of its squares
    own: float  # What squares are once tokens are almost alike: what a token keeps of itself
    response: float  # What changes of scores add to `squares` for changes of tokens


class ClosedForm(Arithmetic):
    """Rules on `Exchangeable` tokens, in the limit of many of them."""

    name = "closed_form"

    def __init__(self, net: Transformer, tokens: int) -> None:
        self.arch, self.tokens = net.arch, tokens
        self.rotary = rotary_tables(net.arch, tokens, torch.empty(0).double()) if net.arch.positions == "rotary" else ()
        self.seen: dict[Any, int] = {}
        self.scores, self.query_gradient = (0.0, math.inf, 0.0), 0.0
        """Of the last layer: beta, beta_c and `Y_2`; and the gradient of queries, as in `Phase`."""

    def norm(self, block: Block, name: str, x: Exchangeable) -> Exchangeable:
        """Divide by the expected length."""
        kind, weights = norm_of(self.arch.norm), getattr(block.weights, name)
        if kind is None:
            return x
        square = x.q * (1 if kind.averaged else self.arch.width) + self.arch.norm_eps or math.inf
        return (x * (mean_square(weights.gain, 1.0) / square)).biased(mean_square(weights.bias))

    def values(self, block: Block, x: Exchangeable) -> Exchangeable:
        """Return the moments of an entry of the values."""
        return through(block.weights.attention.value, x)

    def pattern(self, block: Block, x: Exchangeable) -> RowMoments:
        """Return the moments of a row of attention, by the random energy model."""
        w, arch, n = block.weights.attention, self.arch, self.most_seen(block)
        scale = arch.head_width * ((arch.log_gain * math.log(self.tokens) or 1.0) / arch.divisor) ** 2
        query, key, q, p, read = gain_of(w.query.weight), gain_of(w.key.weight), x.q, x.p, x.q
        if arch.query_norm:
            normed = [mean_square(norm.gain, 1.0) for norm in (w.query_norm, w.key_norm)]
            (query, key), q, p, read = normed, 1.0, x.p / x.q, normed[0] / query
        sigma2, apart = scale * query * key, q - p * self.kept_in_common(block, n)
        beta, critical = math.sqrt(sigma2 / math.log(n)), math.sqrt(2 / (q * apart)) if apart > 0 else math.inf
        m = min(1.0, critical / beta) if beta > 0 else 1.0
        left = m * (1 - m) / 3  # Y of the module's docstring
        self.scores, outward = (beta, critical, 1 - m), gain_of(w.value.weight) * output_gain(block)
        self.query_gradient = scale * key * outward * read * apart * (x.q - x.p) * left
        # A norm of queries divides changes by the length of what it norms; without one q is x.q.
        response = sigma2 * left * (x.q - x.p) * (apart + q) * q / x.q
        return RowMoments(1.0, 1 - m, 0.0, response)

    def mix(self, block: Block, row: RowMoments, x: Exchangeable) -> Exchangeable:
        """Return the moments of the output of a head."""
        common, factors = row.total**2 * x.p, [row.own, row.squares + row.response, row.total**2]
        return Exchangeable(common + row.squares * (x.q - x.p), common, x.changes * factors)

    def gate(self, block: Block, heads: Exchangeable, x: Exchangeable) -> Exchangeable:
        """Return the moments of the outputs of heads times their gates."""
        assert block.weights.attention.gate is not None
        return multiplied(heads, activated(torch.sigmoid, through(block.weights.attention.gate, x)))

    def output(self, block: Block, heads: Exchangeable) -> Exchangeable:
        """Add up the heads, which are independent of each other."""
        return (heads * output_gain(block)).biased(mean_square(block.weights.attention.output.bias))

    def mlp(self, block: Block, x: Exchangeable) -> Exchangeable:
        """`E[phi(u_t) phi(u_s)]`, and `E phi'(u)^2` of changes."""
        w, act = block.weights.mlp, ACTIVATIONS[self.arch.activation]
        assert w is not None
        inner, gate = through(w.up, x), w.gate
        inner = activated(act, inner) if gate is None else multiplied(activated(act, through(gate, x)), inner)
        return through(w.down, inner)

    def add(self, block: Block, half: Half, x: Exchangeable, branches: dict[str, Exchangeable]) -> Exchangeable:
        """Branches are independent of what they are added to, and of each other."""
        return sum(branches.values(), x * half.skip**2)

    def part(self, block: Block, part: Any, x: Any, inside: Any) -> Any:
        """Return x as the part's own rule `closed_form` changes it."""
        refuse({f"{part.name} in closed form": not hasattr(part, self.name)})
        return super().part(block, part, x, inside)

    def most_seen(self, block: Block) -> int:
        """The most tokens that a token sees, at least two."""
        mask = self.arch.mask_of(block.index)
        if mask not in self.seen:
            self.seen[mask] = self.tokens if mask == "complete" else int(matrix(mask, self.tokens).sum(-1).max())
        return max(2, self.seen[mask])

    def kept_in_common(self, block: Block, n: int) -> float:
        """The share of what two keys have in common that rotation leaves, the mean over pairs of n positions."""
        if not self.rotary:
            return 1.0
        cos, sin = (part[:n] for part in self.rotary[block.index % len(self.rotary)])
        pairs = cos.sum(0).square() + sin.sum(0).square() - (cos.square() + sin.square()).sum(0)
        rotated = 2 * cos.shape[1] / self.arch.head_width
        return 1 - rotated + rotated * float(pairs.mean()) / (n * (n - 1))


def through(linear: Linear, x: Exchangeable) -> Exchangeable:
    """Return the moments of an entry of what a linear map makes of tokens."""
    return (x * gain_of(linear.weight)).biased(mean_square(linear.bias))


def output_gain(block: Block) -> float:
    """What the output projection multiplies the mean square of entries of the active heads by, all heads together."""
    weight = block.weights.attention.output.weight[list(block.active_heads)]
    return mean_square(weight) * weight.shape[0] * weight.shape[1] if len(weight) else 0.0


def activated(act: Any, x: Exchangeable) -> Exchangeable:
    """Return the moments of an activation of Gaussian numbers; `E phi'(u_t) phi'(u_s)` is the derivative of
    `E phi(u_t) phi(u_s)` by the covariance."""
    C = torch.tensor([[[x.q, x.p], [x.p, x.q]]], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (q, p), _ = products(act, C)[0]
        (derivative,) = torch.autograd.grad(p, C)
    slope = float(expansion(act, C[0, 0, :1].detach()).slope) / x.q if x.q else 0.0
    return Exchangeable(float(q.detach()), float(p.detach()), x.changes * [slope, slope, float(derivative[0, 0, 1])])


def multiplied(x: Exchangeable, y: Exchangeable) -> Exchangeable:
    """Return the moments of products of independent entries."""
    return Exchangeable(x.q * y.q, x.p * y.p, x.changes * [y.q, y.q, y.p] + y.changes * [x.q, x.q, x.p])


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
