"""Mean-field theory: the second moments of tokens, layer by layer, of a network whose weights are random.

`forecast.py` calls `mean_field`, which takes the traversal of a block (`nets/traversal.py`) with rules of its own. A
state is the covariance of the tokens of each sample,

    C_ts = E x_t . x_s / d,        q = C_tt,  p = C_ts (t != s),

the average over weights of zero mean and independent entries, d the width. A rule says what a part does to C:

| part            | C becomes                                                                                           |
|-----------------|-----------------------------------------------------------------------------------------------------|
| norm            | `C_ts / sqrt((C_tt + eps)(C_ss + eps))`, times the mean square of the gain                          |
| attention       | `s^2 E[P C P^T]`, s^2 the gain of values and output together                                        |
| MLP             | `s^2 E[phi(u_t) phi(u_s)]`, (u_t, u_s) Gaussian with covariance `g^2 C` (Gauss-Hermite)              |
| gated MLP       | the same times `E[v_t v_s]`, v Gaussian and independent of u                                        |
| skip of weight a | `a^2 C` and the branches, which are independent of what they are added to                          |

Attention is where theories differ. Here queries and keys are **drawn**, Gaussian with covariance C and as wide as a head
is, and go through everything that the architecture does to them (norms of queries, rotation, ALiBi, caps, masks,
kernels): P is then the network's own, at any temperature, any number of tokens and any mask, and its average over draws
is all that is left to chance. Giorlandino & Goldt (2026) take the limit of many tokens instead (`phases.py`).

What this leaves out is of the order of `layers / width`: correlations of a layer's weights with what it reads, and what
single networks differ by. Weights that were trained are not independent of each other: theory says nothing of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Transformer
from rankscope.nets.mlp import ACTIVATIONS
from rankscope.nets.norms import norm_of
from rankscope.nets.order import Half
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, traverse
from rankscope.nets.weights import Latent, Linear
from rankscope.shapes import Float

Covariance = Float[Tensor, "batch token token"]
NODES = (
    24  # Points of the Gauss-Hermite rule along each axis: E phi(u) phi(v) to 1e-6 for the kinks of ReLU, else 1e-12
)
DRAWS = 16  # Sets of queries and keys that each pattern is averaged over
FLOOR = 1e-7
"""Below this share, what tells tokens apart is rounding of C: the relative residual is not carried further."""


@dataclass(frozen=True)
class Moments:
    """The second moments of tokens after a layer, in theory.

    Args:
        layer: The number of the layer; 0 is the input.
        covariance: C of each sample.
    """

    layer: int
    covariance: Covariance

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
    for name, there in {
        "experts": arch.mlp == "experts",
        "cross_attention": arch.cross_attention,
        "latents": bool(arch.query_latent or arch.key_latent),
        "disentangled positions": arch.positions in ("disentangled", "relative"),
        "a norm of one's own": not isinstance(arch.norm, str),
    }.items():
        if there:
            raise ArchitectureError(
                f"mean-field theory has no recursion for {name} here: measure instead", subject=name
            )
    X, valid, _ = net.prepared(X.double(), None)
    settings = net.settings(X, valid)
    rules = MeanField(net, settings, draws, torch.Generator(device=X.device).manual_seed(seed))
    C = X @ X.mT / arch.width
    yield Moments(0, C)
    for block in net.blocks:
        C = traverse(block, rules, C).state
        yield Moments(block.index + 1, C)


class MeanField(Plain):
    """Rules on covariances of tokens `[batch, token, token]`; the module's table has them."""

    name = "mean_field"

    def __init__(self, net: Transformer, settings: PassSettings, draws: int, generator: torch.Generator) -> None:
        arch = net.arch
        visible = {mask: _repeated(matrix, draws) for mask, matrix in settings.visible.items()}
        super().__init__(arch, replace(settings, visible=visible, valid=_repeated(settings.valid, draws)))
        self.draws, self.generator = draws, generator

    def norm(self, block: Block, name: str, C: Covariance) -> Covariance:
        """Divide by the expected length of each token."""
        kind, weights = norm_of(self.arch.norm), getattr(block.weights, name)
        if kind is None:
            return C
        C = C * (1 - 1 / self.arch.width) if kind.centred else C
        square = C.diagonal(dim1=-2, dim2=-1) * (1 if kind.averaged else self.arch.width) + self.arch.norm_eps
        length = square.sqrt()
        gain = 1.0 if weights.gain is None else float(weights.gain.double().square().mean())
        return gain * C / (length[..., None] * length[..., None, :])

    def latent(self, C: Covariance, w: Latent | None, *, alone: bool = False) -> Covariance:
        """Tokens themselves: networks with latents are refused before."""
        return C

    def heads(self, C: Covariance, linear: Linear) -> Float[Tensor, "draw head token head_width"]:
        """Draw queries or keys of every head: Gaussian, their covariance over tokens `fan_in var(W) C`."""
        count, width = linear.weight.shape[1:]
        shape = (self.draws * len(C), count, C.shape[-1], width)
        noise = torch.randn(shape, generator=self.generator, dtype=C.dtype, device=C.device)
        drawn = _repeated(_root(_gain(linear) * C), self.draws)[:, None] @ noise
        return drawn if linear.bias is None else drawn + linear.bias.to(C)[:, None]

    def values(self, block: Block, C: Covariance) -> Covariance:
        """The covariance of an entry of the values."""
        value = block.weights.attention.value
        return _gain(value) * C + _bias(value)

    def mix(self, block: Block, P: Tensor, V: Covariance) -> Float[Tensor, "batch head token token"]:
        """`E[P C P^T]` of every head, zero of one that is not active."""
        mixed = P @ _repeated(V, self.draws)[:, None] @ P.mT
        active = torch.zeros(self.arch.heads, 1, 1, dtype=V.dtype, device=V.device)
        active[list(self.active_heads(block))] = 1.0
        return mixed.unflatten(0, (len(V), self.draws)).mean(1) * active

    def gate(self, block: Block, heads: Tensor, C: Covariance) -> Tensor:
        """Times `E[sigmoid(u_t) sigmoid(u_s)]`, u the gates before the sigmoid."""
        gate = block.weights.attention.gate
        assert gate is not None
        return heads * products(torch.sigmoid, _gain(gate) * C + _bias(gate))[:, None]

    def output(self, block: Block, heads: Tensor) -> Covariance:
        """Heads add up: their outputs are independent of each other."""
        output = block.weights.attention.output
        weight = output.weight.double().square().mean((1, 2)) * output.weight.shape[1]  # of each head
        return (heads * weight.to(heads)[:, None, None]).sum(1) + _bias(output)

    def mlp(self, block: Block, C: Covariance) -> Covariance:
        """`E[phi(u_t) phi(u_s)]`, of a gated MLP times the products of what is gated."""
        w = block.weights.mlp
        assert w is not None
        act = ACTIVATIONS[self.arch.activation]
        hidden = _gain(w.up) * C + _bias(w.up)
        inner = products(act, hidden) if w.gate is None else products(act, _gain(w.gate) * C + _bias(w.gate)) * hidden
        return _gain(w.down) * inner + _bias(w.down)

    def add(self, block: Block, half: Half, C: Covariance, branches: dict[str, Covariance]) -> Covariance:
        """Branches are independent of what they are added to, and of each other."""
        return half.skip**2 * C + sum(branches.values(), torch.zeros_like(C))

    def part(self, block: Block, part: Any, x: Any, inside: Any) -> Any:
        """Of patterns, the plain rule does; of others the part's own rule, if it has one."""
        if part.place == "pattern" and not hasattr(part, self.name):
            try:
                return part.plain(x, block, self, inside)
            except (AttributeError, RuntimeError, IndexError) as error:
                sentence = f"mean-field theory has no recursion for {part.name}: measure instead"
                raise ArchitectureError(sentence, subject=part.name) from error
        return super().part(block, part, x, inside)


def products(act: Any, C: Covariance) -> Covariance:
    """`E[act(u_t) act(u_s)]` of Gaussian u with covariance C, by Gauss-Hermite quadrature in two dimensions.

    >>> C = torch.tensor([[[1.0, 0.5], [0.5, 2.0]]], dtype=torch.float64)
    >>> torch.allclose(products(lambda u: u, C), C)
    True
    """
    nodes, weights = _hermite(NODES, C)
    variance = C.diagonal(dim1=-2, dim2=-1)
    std = variance.clamp(min=0.0).sqrt()
    both = (std[..., None] * std[..., None, :]).clamp(min=1e-300)
    rho = (C / both).clamp(-1.0, 1.0)
    first = act(std[..., None] * nodes)  # [batch, token, node]
    # u_s = std_s (rho z + sqrt(1 - rho^2) z'), z that of u_t
    other = rho[..., None, None] * nodes[:, None] + (1 - rho * rho).sqrt()[..., None, None] * nodes
    inner = (act(std[:, None, :, None, None] * other) * weights).sum(-1)  # [batch, t, s, node]
    result = (first[:, :, None] * inner * weights).sum(-1)
    return (result + result.mT) / 2  # the rule treats t and s differently, by rounding and by the rule's own error


def _hermite(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of `E f(z)`, z a normal number."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    tensors = (torch.from_numpy(part).to(like) for part in (nodes, weights / math.sqrt(2 * math.pi)))
    first, second = tensors
    return first, second


def _gain(linear: Linear) -> float:
    """What a linear map multiplies the mean square of entries by: inputs times the mean square of its weights."""
    return float(linear.weight.double().square().mean()) * linear.weight.shape[0]


def _bias(linear: Linear) -> float:
    return 0.0 if linear.bias is None else float(linear.bias.double().square().mean())


def _repeated(x: Tensor, draws: int) -> Tensor:
    """Samples repeated, all draws of the first one first; what is the same for all samples stays."""
    return x if len(x) == 1 and x.ndim == 4 else x.repeat_interleave(draws, 0)


def _root(C: Covariance) -> Covariance:
    """A matrix R with `R R^T = C`; eigenvalues that rounding made negative are zero."""
    values, vectors = torch.linalg.eigh(C)
    return vectors * values.clamp(min=0.0).sqrt()[..., None, :]
