"""Where the last token of a causal network with uniform attention comes from (Chowdhury 2026, arXiv 2603.10123).

A layer of weight a takes the stream x to `(1 - a) x + a C x`, where row i of C averages the first i tokens. Over layers
the last of n tokens is a sum of all, with weights that add up to one. With x the source position over the last, in
(0, 1], and n without end their density is the published

    rho(x) = (1-a)^H delta(1-x) + sum_{k=1}^H C(H,k) a^k (1-a)^{H-k} (ln 1/x)^{k-1} / (k-1)!.

At finite n the weights are known too. C is a Hausdorff matrix (of moments 1 / (m+1)) and so is every product of layers,
of the moments `prod_l (1 - a_l + a_l / (m+1))`, which are those of rho. Hence the weight of source j of n is

    w_j = C(n-1, j-1) int t^{j-1} (1-t)^{n-j} rho(t) dt:

j - 1 is binomial of n - 1 trials whose chance t has the published density. The density is exact as the law of t, and
`w_j` is that law seen through n - 1 trials. Here `w_j` is computed by n steps per layer, all of them sums of positive
numbers; the integral, and the alternating sum that it is equal to, are in the tests.

All functions take a weight for each layer, where the paper has one a: `C(H,k) a^k (1-a)^{H-k}` is then the chance of k
successes in H trials of these chances.

In a network values go through matrices W_l, and paths add up as rho says only where these agree. Where they are drawn
anew in each layer, paths through different layers have terms at right angles, and their squares add up:
`independent_sizes`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.paths import Frozen
from rankscope.shapes import Float

Numbers = Float[np.ndarray, " number"]


def length_weights(a: Sequence[float]) -> Float[np.ndarray, " length"]:
    """Return the weight of all paths of each length: coefficient k of `prod_l (1 - a_l + a_l z)`.

    Args:
        a: The weight of attention in each layer.

    >>> length_weights([0.5, 0.5]).tolist()
    [0.25, 0.5, 0.25]
    """
    return _product([1 - weight for weight in a], a)


def density(x: Numbers, a: Sequence[float]) -> Numbers:
    """Return the published density at positions x in (0, 1), without the point mass `prod_l (1 - a_l)` at 1.

    Args:
        x: Source positions over the last.
        a: The weight of attention in each layer.
    """
    logs, terms = _logs(x, len(a))
    return length_weights(a)[1:] @ terms if len(a) else np.zeros_like(logs)


def cumulative(x: Numbers, a: Sequence[float]) -> Numbers:
    """Return the weight of positions up to x in (0, 1] by the published density; at 1 with its point mass, so 1.

    Args:
        x: Source positions over the last.
        a: The weight of attention in each layer.
    """
    x = np.asarray(x, dtype=float)
    _, terms = _logs(x, len(a))
    below = length_weights(a)[1:] @ (x * np.cumsum(terms, 0)) if len(a) else np.zeros_like(x)
    return np.where(x >= 1, 1.0, below)


def exact_weights(tokens: int, a: Sequence[float]) -> Float[np.ndarray, " source"]:
    """Return the weight of each source token in the last one, exactly up to rounding.

    Args:
        tokens: How many tokens there are.
        a: The weight of attention in each layer.

    >>> exact_weights(2, [1.0]).tolist()
    [0.5, 0.5]
    """
    return length_weights(a) @ averages(tokens, len(a))


def independent_sizes(tokens: int, a: Sequence[float]) -> Float[np.ndarray, " source"]:
    """Return the root of the mean square of each source's term, where every layer has random values of its own.

    Terms of paths through different layers are at right angles on average, so that their squares add up. Sources have
    unit size.

    Args:
        tokens: How many tokens there are.
        a: The weight of attention in each layer: a layer gives what it reads the size a, and the stream is `1 - a`.
    """
    squares = _product([(1 - weight) ** 2 for weight in a], [weight**2 for weight in a])
    return np.sqrt(squares @ averages(tokens, len(a)) ** 2)


def averages(tokens: int, layers: int) -> Float[np.ndarray, "length source"]:
    """Return the last row of the powers 0, 1, ... of C, the matrix whose row i averages the first i tokens.

    Args:
        tokens: How many tokens there are.
        layers: The largest power.
    """
    row = np.zeros(tokens)
    row[-1] = 1.0
    rows = [row]
    for _ in range(layers):
        rows.append(np.cumsum((rows[-1] / np.arange(1, tokens + 1))[::-1])[::-1])
    return np.stack(rows)


def uniform_network(layers: int, a: float) -> Transformer:
    """Return the network of the theory: causal, uniform attention on tokens of width 1, layers `(1-a) x + a C x`.

    On tokens that are all 1, the share of a source token in the output is its weight.

    Args:
        layers: How many layers it has.
        a: The weight of attention in each of them.
    """
    arch = Architecture(
        layers=layers, width=1, heads=1, kernel="uniform", mask="causal", mlp="none", norm="none", biases=False,
        attention_skip=1 - a,
    )  # fmt: skip
    unit = torch.ones(1, 1, 1, dtype=torch.float64)
    parts = {"query": unit, "key": unit, "value": unit, "output": a * unit}
    prefixes = [f"layers.{layer}.attention" for layer in range(layers)]
    tensors = {f"{prefix}.{part}.weight": tensor for prefix in prefixes for part, tensor in parts.items()}
    return Transformer.from_weights(arch, tensors)


def attention_weights(frozen: Frozen) -> list[float]:
    """Return the weight a of attention against the skip in each layer of a frozen network, by the sizes of its maps.

    It is `b / (skip + b)`, with b the factor by which attention that looks at one token alone changes the size of a
    random token: the scale of the norm, its root mean square over tokens, times `|diag(gain) W|_F / sqrt(width)`, where
    W is the sum over heads of value times output weights.

    Args:
        frozen: A network on its input (`decompose(net, X).frozen`), its norms before the branches or none.
    """
    weights = []
    for layer in frozen.layers:
        attention, arch = layer.block.weights.attention, layer.block.arch
        values = attention.value.weight.repeat_interleave(arch.heads // arch.key_heads, 1)
        W = torch.einsum("dhc,hce->de", values, attention.output.weight)
        norm = layer.norms.get("attention_norm")
        scale = 1.0
        if norm is not None:
            scale = float(norm.scale[frozen.valid].square().mean().sqrt())
            W = W if norm.weights.gain is None else norm.weights.gain[:, None] * W
        b = scale * float(torch.linalg.matrix_norm(W)) / math.sqrt(len(W))
        weights.append(b / (arch.attention_skip + b))
    return weights


def _product(constant: Sequence[float], slope: Sequence[float]) -> np.ndarray:
    """The coefficients of `prod_l (constant_l + slope_l z)`."""
    coefficients = np.ones(1)
    for c, s in zip(constant, slope, strict=True):
        coefficients = np.append(c * coefficients, 0.0) + np.append(0.0, s * coefficients)
    return coefficients


def _logs(x: Numbers, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """`ln 1/x`, and its powers 0 to layers - 1 over their factorials."""
    logs = -np.log(np.asarray(x, dtype=float))
    terms = [np.ones_like(logs)]
    for k in range(1, layers):
        terms.append(terms[-1] * logs / k)
    return logs, np.stack(terms)
