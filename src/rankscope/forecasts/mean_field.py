"""Mean-field theory: the second moments of tokens, layer by layer, of a network whose weights are random.

`mean_field` takes the traversal of a block (`nets/traversal.py`) with rules of its own. A state is the covariance of
the tokens of each sample,

    C_ts = E x_t . x_s / d,        q = C_tt,  p = C_ts (t != s),

the average over weights of zero mean and independent entries, d the width. A rule says what a part does to C:

| part             | C becomes                                                                                     |
|------------------|-----------------------------------------------------------------------------------------------|
| norm             | `C_ts / sqrt((C_tt + eps)(C_ss + eps))`, times the mean square of the gain                    |
| attention        | `s^2 E[P C P^T]`, s^2 the gain of values and output together                                  |
| MLP              | `s^2 E[phi(u_t) phi(u_s)]`, (u_t, u_s) Gaussian with covariance `g^2 C` (Hermite polynomials) |
| gated MLP        | the same times `E[v_t v_s]`, v Gaussian and independent of u                                  |
| skip of weight a | `a^2 C` and the branches, which are independent of what they are added to                     |
| remedy           | its own rule `mean_field` (`remedies/`); parts of the user's own without one are refused      |

Attention is where theories differ. Here queries and keys are **drawn**, Gaussian with covariance C and as wide as a
head is, and go through everything that the architecture does to them (norms of queries, rotation, ALiBi, caps, masks,
kernels): P is then the network's own, at any temperature, any number of tokens and any mask, and its average over draws
is all that is left to chance. Giorlandino & Goldt (2026) take the limit of many tokens instead (`phases.py`).

What this leaves out is of the order of `layers / width`: correlations of a layer's weights with what it reads, and what
single networks differ by. Weights that were trained are not independent of each other: theory says nothing of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, require
from rankscope.nets import (
    ACTIVATIONS,
    Architecture,
    Block,
    Half,
    Latent,
    Linear,
    PassSettings,
    Plain,
    Transformer,
    norm_of,
    traverse,
)
from rankscope.shapes import Float

Covariance = Float[Tensor, "batch token token"]
HeadCovariance = Float[Tensor, "batch draw head token token"]
TERMS = 48  # Hermite polynomials of an activation; what is left of it is one term more (`products`)
DRAWS = 16  # Sets of queries and keys that each pattern is averaged over
FLOOR = 1e-7
"""Below this share, what tells tokens apart is rounding of C: the relative residual is not carried further."""


@dataclass(frozen=True)
class Moments:
    """The second moments of tokens after a layer, in theory."""

    layer: int  # The number of the layer; 0 is the input
    covariance: Covariance  # C of each sample

    @property
    def q(self) -> float:
        """The mean square of an entry, over tokens and samples."""
        return float(self.covariance.diagonal(dim1=-2, dim2=-1).mean())

    @property
    def p(self) -> float:
        """The mean product of the same entry of two different tokens."""
        n = self.covariance.shape[-1]
        off = self.covariance.sum((-2, -1)) - self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        return float((off / max(1, n * (n - 1))).mean())

    @property
    def relative_residual(self) -> float:
        """The share of the tokens' length that they do not have in common: `sqrt(1 - 1^T C 1 / (n tr C))`, the mean
        over samples; 0 where it is below what float64 leaves of C."""
        n = self.covariance.shape[-1]
        total = self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        share = 1 - self.covariance.sum((-2, -1)) / (n * total)
        value = float(share.clamp(min=0.0).sqrt().mean())
        return value if value > FLOOR else 0.0


def mean_field(
    net: Transformer, X: Float[Tensor, "batch token width"], *, draws: int = DRAWS, seed: int = 0
) -> Iterator[Moments]:
    """Yield the second moments after every layer, from those of given tokens.

    Args:
        net: A network whose weights are random; of them only mean squares are used.
        X: The tokens that it reads, without padding.
        draws: Sets of queries and keys that attention is averaged over.
        seed: What they are drawn from.

    Raises:
        ArchitectureError: A part has no recursion here: experts, cross-attention, latents, a remedy without a rule.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=4, width=64, heads=4, mlp="none", norm="none", attention_skip=0.0))
    >>> X = torch.randn(2, 8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> residuals = [moments.relative_residual for moments in mean_field(net, X)]
    >>> residuals[0] > 0.9, residuals[-1] < 1e-2
    (True, True)
    """
    arch = net.arch
    refuse_parts(arch)
    X, valid, _ = net.prepared(X.double(), None)
    settings = net.settings(X, valid)
    rules = MeanField(net, settings, draws, torch.Generator(device=X.device).manual_seed(seed))
    C = X @ X.mT / arch.width
    yield Moments(0, C)
    for block in net.blocks:
        C = traverse(block, rules, C).state
        yield Moments(block.index + 1, C)


def refuse_parts(arch: Architecture) -> None:
    """Raise an `ArchitectureError` for a network that neither the recursion nor closed forms have rules for."""
    refuse({
        "experts": arch.mlp == "experts", "cross_attention": arch.cross_attention,
        "latents": bool(arch.query_latent or arch.key_latent),
        "disentangled positions": arch.positions in ("disentangled", "relative"),
        "a norm of one's own": not isinstance(arch.norm, str),
        "layers that share their weights": arch.shared and arch.layers > 1,
    })  # fmt: skip


def refuse(parts: dict[str, bool]) -> None:
    """Raise an `ArchitectureError` for the first part, by its name, that a network has and theory has no rule for."""
    for name, present in parts.items():
        sentence = f"mean-field theory has no recursion for {name} here: measure instead"
        require(not present, sentence, ArchitectureError, name)


class MeanField(Plain):
    """Rules on covariances of tokens `[batch, token, token]`; the module's table has them."""

    name = "mean_field"

    def __init__(self, net: Transformer, settings: PassSettings, draws: int, generator: torch.Generator) -> None:
        arch = net.arch
        visible = {mask: _repeated(matrix, draws) for mask, matrix in settings.visible.items()}
        super().__init__(arch, replace(settings, visible=visible, valid=_repeated(settings.valid, draws)))
        self.draws, self.generator = draws, generator
        self.patterns = torch.empty(0)
        """P of the last layer, `[batch, draw, head, token, token]`, zero of heads that are not active."""

    def norm(self, block: Block, name: str, C: Covariance) -> Covariance:
        """Divide by the expected length of each token."""
        kind, weights = norm_of(self.arch.norm), getattr(block.weights, name)
        if kind is None:
            return C
        C = C * (1 - 1 / self.arch.width) if kind.centred else C
        square = C.diagonal(dim1=-2, dim2=-1) * (1 if kind.averaged else self.arch.width) + self.arch.norm_eps
        scale = mean_square(weights.gain, 1.0) / (square.sqrt()[..., None] * square.sqrt()[..., None, :])
        return scale * C + mean_square(weights.bias)

    def latent(self, C: Covariance, w: Latent | None, *, alone: bool = False) -> Covariance:
        """Tokens themselves: networks with latents are refused before."""
        return C

    def heads(self, C: Covariance, linear: Linear) -> Float[Tensor, "draw head token head_width"]:
        """Draw queries or keys of every head: Gaussian, their covariance over tokens `fan_in var(W) C`."""
        return self.drawn(C, linear.weight, linear.bias)

    def drawn(
        self, C: Covariance, weight: Float[Tensor, "width head entry"], bias: Tensor | None
    ) -> Float[Tensor, "draw head token entry"]:
        """Draw what a linear map of tokens may be, at every head."""
        shape = (self.draws * len(C), weight.shape[1], C.shape[-1], weight.shape[2])
        noise = torch.randn(shape, generator=self.generator, dtype=C.dtype, device=C.device)
        values, vectors = torch.linalg.eigh(gain_of(weight) * C)  # eigenvalues that rounding made negative are zero
        root = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
        numbers = _repeated(root, self.draws)[:, None] @ noise
        return numbers if bias is None else numbers + bias.to(C)[:, None]

    def values(self, block: Block, C: Covariance) -> Covariance:
        """The covariance of an entry of the values."""
        return through(block.weights.attention.value, C)

    def mix(self, block: Block, P: Tensor, V: Covariance) -> HeadCovariance:
        """`P C P^T` of every draw and head, zero of a head that is not active."""
        active = torch.zeros(self.arch.heads, 1, 1, dtype=V.dtype, device=V.device)
        active[list(self.active_heads(block))] = 1.0
        P = self.patterns = (active * P).view(len(V), self.draws, *P.shape[1:])
        return P @ V[:, None, None] @ P.mT

    def gate(self, block: Block, heads: HeadCovariance, C: Covariance) -> HeadCovariance:
        """Times `E[sigmoid(u_t) sigmoid(u_s)]`, u the gates before the sigmoid."""
        gate = block.weights.attention.gate
        assert gate is not None
        return heads * self.gate_products(C, gate.weight, gate.bias)

    def gate_products(
        self, C: Covariance, weight: Tensor, bias: Tensor | None
    ) -> Float[Tensor, "batch 1 1 token token"]:
        """Return `E[sigmoid(u_t) sigmoid(u_s)]`, u a linear map of tokens."""
        return products(torch.sigmoid, gain_of(weight) * C + mean_square(bias))[:, None, None]

    def output(self, block: Block, heads: HeadCovariance) -> Covariance:
        """Heads add up: their outputs are independent of each other. Here draws are averaged over."""
        output = block.weights.attention.output
        weight = output.weight.double().square().mean((1, 2)) * output.weight.shape[1]  # of each head
        return (heads.mean(1) * weight.to(heads)[:, None, None]).sum(1) + mean_square(output.bias)

    def mlp(self, block: Block, C: Covariance) -> Covariance:
        """`E[phi(u_t) phi(u_s)]`, of a gated MLP times the products of what is gated."""
        w = block.weights.mlp
        assert w is not None
        act = ACTIVATIONS[self.arch.activation]
        inner = through(w.up, C)
        return through(w.down, products(act, inner) if w.gate is None else products(act, through(w.gate, C)) * inner)

    def add(self, block: Block, half: Half, C: Covariance, branches: dict[str, Covariance]) -> Covariance:
        """Branches are independent of what they are added to, and of each other."""
        return half.skip**2 * C + sum(branches.values(), torch.zeros_like(C))

    def part(self, block: Block, part: Any, x: Any, inside: Any) -> Any:
        """Return x as the part's own rule `mean_field` changes it."""
        refuse({part.name: not hasattr(part, self.name)})
        return super().part(block, part, x, inside)


class Expansion(NamedTuple):
    """An activation phi of Gaussian numbers u of mean zero, as `phi(u) = sum_k a_k h_k(u / std)`, h_k the Hermite
    polynomials of mean square one."""

    coefficients: Float[Tensor, "*token term"]  # a_k, k = 0, 1, ..., TERMS
    square: Float[Tensor, "*token"]  # E phi(u)^2, the sum of all a_k^2
    slope: Float[Tensor, "*token"]  # E phi'(u)^2 times the variance of u, the sum of all k a_k^2


def expansion(act: Any, variance: Float[Tensor, "*token"]) -> Expansion:
    """Expand an activation of Gaussian numbers of given variances.

    >>> torch.allclose(expansion(torch.relu, torch.tensor([1.0, 4.0])).slope, torch.tensor([0.5, 2.0]))
    True
    """
    nodes, weights, polynomials = (torch.from_numpy(part).to(variance) for part in _quadrature())
    with torch.enable_grad():
        u = (variance.clamp(min=0.0).sqrt()[..., None] * nodes).detach().requires_grad_()
        phi = act(u)
        (derivative,) = torch.autograd.grad(phi.sum(), u)
    phi = phi.detach()
    return Expansion(phi @ polynomials, phi.square() @ weights, variance * (derivative.square() @ weights))


def products(act: Any, C: Covariance) -> Covariance:
    """Return `E[act(u_t) act(u_s)]` of Gaussian u with covariance C.

    It is `sum_k a_k(t) a_k(s) rho^k`, rho the correlation (Mehler's formula). What the terms beyond the last add is
    taken as one more, `b rho^m`, with b and m such that value and slope at rho = 1 are right: so tokens that are almost
    alike stay apart by as much as they should, at kinks too.

    >>> C = torch.tensor([[[1.0, 0.5], [0.5, 2.0]]], dtype=torch.float64)
    >>> torch.allclose(products(lambda u: u, C), C)
    True
    """
    a, square, slope = expansion(act, C.diagonal(dim1=-2, dim2=-1))
    rho = (C / _outer(C.diagonal(dim1=-2, dim2=-1)).clamp(min=1e-300)).clamp(-1.0, 1.0)
    result = torch.zeros_like(C)
    for k in reversed(range(TERMS + 1)):
        result = result * rho + a[..., k, None] * a[..., None, :, k]
    order = torch.arange(TERMS + 1).to(a)
    left, left_slope = square - a.square().sum(-1), slope - (order * a.square()).sum(-1)
    power = _outer(left_slope) / _outer(left).clamp(min=1e-300)
    return result + _outer(left) * rho.clamp(min=0.0) ** power.clamp(min=TERMS + 1)


def _outer(x: Float[Tensor, "batch token"]) -> Covariance:
    """`sqrt(x_t x_s)`, of numbers that rounding may have made negative."""
    root = x.clamp(min=0.0).sqrt()
    return root[..., None] * root[..., None, :]


@lru_cache
def _quadrature() -> tuple[Any, Any, Any]:
    """Nodes z and weights of `E f(z)`, z a normal number, and the weights times each Hermite polynomial: Gauss-Legendre
    on panels that begin at 0, where activations have their kinks and bends."""
    points, masses = np.polynomial.legendre.leggauss(16)
    edges = np.array([0.0, 0.25, 0.75, 1.5, 3.0, 5.5, 10.0])
    half = np.diff(edges)[:, None] / 2
    positive, mass = (half * (points + 1) + edges[:-1, None]).ravel(), (half * masses).ravel()
    nodes, weights = np.concatenate([-positive, positive]), np.concatenate([mass, mass])
    weights = weights * np.exp(-nodes * nodes / 2) / math.sqrt(2 * math.pi)
    hermite = [np.ones_like(nodes), nodes]
    for k in range(1, TERMS):
        hermite.append((nodes * hermite[k] - math.sqrt(k) * hermite[k - 1]) / math.sqrt(k + 1))
    return nodes, weights, np.stack(hermite, -1) * weights[:, None]


def gain_of(weight: Tensor) -> float:
    """What a linear map multiplies the mean square of entries by: inputs times the mean square of its weights."""
    return mean_square(weight) * weight.shape[0]


def mean_square(x: Tensor | None, missing: float = 0.0) -> float:
    """Return the mean square of the entries of a tensor, or what stands for one that is missing."""
    return missing if x is None else float(x.detach().double().square().mean())


def through(linear: Linear, C: Covariance) -> Covariance:
    """Return the covariance of an entry of what a linear map makes of tokens."""
    return gain_of(linear.weight) * C + mean_square(linear.bias)


def _repeated(x: Tensor, draws: int) -> Tensor:
    """Samples repeated, all draws of the first one first; what is the same for all samples stays."""
    return x if len(x) == 1 and x.ndim == 4 else x.repeat_interleave(draws, 0)
