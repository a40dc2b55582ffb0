"""The theorems a second time: small, slow and differentiable, from their formulas alone.

Nothing of `rankscope.theory` is used. A network here is a handful of tensors, a run the list of what every
layer did; a bound is (log of the bound, log of what it bounds) at the last layer, so that its slack can be
climbed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer, mask_matrix

Logs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plain:
    """A network of attention, perhaps with a skip, a norm that scales, and a tanh MLP; and its tokens."""

    X: Tensor  # [token, width]
    query: Tensor  # [layer, head, width, head_width]
    key: Tensor
    value: Tensor
    output: Tensor  # [layer, head, head_width, width]
    bias: Tensor  # [layer, head, head_width], of queries
    up: Tensor | None = None  # [layer, width, mlp_width]
    down: Tensor | None = None
    mask: str = "complete"
    skip: float = 0.0
    norm: bool = False

    @classmethod
    def random(cls, seed: int, n: int = 4, d: int = 3, k: int = 3, heads: int = 2, layers: int = 2) -> "Plain":
        g = torch.Generator().manual_seed(seed)
        inward = (layers, heads, d, k)
        shapes = ((n, d), inward, inward, inward, (layers, heads, k, d), (layers, heads, k))
        drawn: list[Any] = [0.7 * torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
        return cls(*drawn)

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def net(self) -> Transformer:
        """The same as a network of ours."""
        layers, heads, d, k = self.query.shape
        arch = Architecture(
            layers=layers, width=d, heads=heads, head_width=k, mask=self.mask, attention_skip=self.skip,
            norm="scale" if self.norm else "none", norm_eps=0.0, mlp="none" if self.up is None else "plain",
            mlp_width=d if self.up is None else self.up.shape[-1], mlp_skip=0.0, activation="tanh",
            biases=("query",),
        )  # fmt: skip
        tensors = {}
        for layer in range(layers):
            at = f"layers.{layer}"
            for name in ("query", "key", "value"):
                weight = getattr(self, name)[layer].transpose(0, 1)
                tensors[f"{at}.attention.{name}.weight"] = weight.contiguous()
            tensors[f"{at}.attention.output.weight"] = self.output[layer]
            tensors[f"{at}.attention.query.bias"] = self.bias[layer]
            if self.up is not None and self.down is not None:
                tensors[f"{at}.mlp.up.weight"] = self.up[layer]
                tensors[f"{at}.mlp.down.weight"] = self.down[layer]
        return Transformer.from_weights(arch, {name: value.detach() for name, value in tensors.items()})


@dataclass
class Layer:
    """What a layer did: tokens before and after, scores E about the mean, attention, what it added."""

    before: Tensor
    E: Tensor  # [head, token, token]
    p: Tensor  # [head, token]: attention of the mean
    P: Tensor  # [head, token, token]
    QK: Tensor  # [head, width, width]
    W: Tensor
    branch: Tensor
    after: Tensor


def run(plain: Plain) -> list[Layer]:
    X, seen = plain.X, mask_matrix(plain.mask, len(plain.X))
    found = []
    for layer in range(len(plain.query)):
        Q, K, V, Out, b = (getattr(plain, name)[layer] for name in ("query", "key", "value", "output", "bias"))
        root = math.sqrt(Q.shape[-1])
        scores = (X @ Q + b[:, None]) @ (X @ K).mT / root
        P = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        R = X - X.mean(0)
        E = R @ Q @ (R @ K).mT / root
        reference = ((X.mean(0) @ Q + b)[:, None] @ (R @ K).mT / root)[:, 0]
        W, before = V @ Out, X
        branch = (P @ X @ W).sum(0)
        X = plain.skip * X + branch
        if plain.norm:
            X = X / X.norm(dim=-1, keepdim=True)
        if plain.up is not None and plain.down is not None:
            X = (X @ plain.up[layer]).tanh() @ plain.down[layer]
        found.append(Layer(before, E, reference.softmax(-1), P, Q @ K.mT, W, branch, X))
    return found


def columns(A: Tensor) -> Tensor:
    return A.abs().sum(-2).amax(-1)


def rows(A: Tensor) -> Tensor:
    return A.abs().sum(-1).amax(-1)


def composite(A: Tensor) -> Tensor:
    return (columns(A) * rows(A)).sqrt()


def residual(X: Tensor) -> Tensor:
    return composite(X - X.mean(0))


def mu(X: Tensor) -> Tensor:
    return (X - X.mean(0)).norm()


def apart(X: Tensor) -> Tensor:
    """The largest distance of two rows."""
    i, j = torch.triu_indices(len(X), len(X), 1)
    return (X[i] - X[j]).norm(dim=-1).amax()


def spectral(W: Tensor) -> Tensor:
    return torch.linalg.svdvals(W)[..., 0]


def kappa(plain: Plain) -> float:
    return 2 * (1 - 1 / len(plain.X))


def oscillation(layer: Layer) -> Tensor:
    return (layer.E.amax(-1) - layer.E.amin(-1)).amax()


def gamma(layer: Layer) -> Tensor:
    o = oscillation(layer)
    return (torch.expm1(o) / (2 * o)).clamp(min=1.0)


def cubic(plain: Plain, layer: Layer, gamma_of: Callable[[Layer], Tensor]) -> Tensor:
    """`4 kappa gamma beta H / sqrt d_qk`."""
    q = columns(layer.QK)
    beta = ((q * columns(layer.W)).amax() * (q * rows(layer.W)).amax()).sqrt()
    return 4 * kappa(plain) * gamma_of(layer) * beta * len(q) / math.sqrt(plain.query.shape[-1])


def stretch(plain: Plain, layer: int) -> Tensor:
    """lambda of a tanh MLP."""
    if plain.up is None or plain.down is None:
        return torch.ones((), dtype=torch.float64)
    up, down = plain.up[layer], plain.down[layer]
    return (columns(up) * columns(down) * rows(up) * rows(down)).sqrt()


def closed(plain: Plain, gamma_of: Callable[[Layer], Tensor] = gamma) -> Logs:
    """Thm 2.2, Thm 2.3, Cor 3.2."""
    layers = run(plain)
    bases = [cubic(plain, layer, gamma_of) * stretch(plain, at) for at, layer in enumerate(layers)]
    power = 3 ** len(layers)
    bound = (power - 1) / 2 * torch.stack(bases).amax().log() + power * residual(plain.X).log()
    return bound, residual(layers[-1].after).log()


def with_gamma_one(plain: Plain) -> Logs:
    return closed(plain, lambda layer: torch.ones((), dtype=torch.float64))


def with_skip(plain: Plain) -> Logs:
    layers, r = run(plain), residual(plain.X)
    for layer in layers:
        wide = (columns(layer.QK) * torch.maximum(columns(layer.W), rows(layer.W))).amax()
        c = 4 * kappa(plain) * gamma(layer) * wide * len(layer.W) / math.sqrt(plain.query.shape[-1])
        r = abs(plain.skip) * r + c * r**3
    return r.log(), residual(layers[-1].after).log()


def by_oscillation(plain: Plain) -> Logs:
    layers, bound = run(plain), residual(plain.X).log()
    for layer in layers:
        grown = torch.expm1(layer.E.amax(-1) - layer.E.amin(-1))
        first = (layer.p.amax(-1) * grown.sum(-1) * columns(layer.W)).sum()
        second = (grown.amax(-1) * rows(layer.W)).sum()
        bound = bound + 0.5 * (first.log() + second.log()) + math.log(kappa(plain))
    return bound, residual(layers[-1].after).log()


def by_attention(plain: Plain) -> Logs:
    layers, bound = run(plain), residual(plain.X).log()
    for layer in layers:
        M = layer.P - layer.P.mean(-2, keepdim=True)
        first, second = (columns(M) * columns(layer.W)).sum(), (rows(M) * rows(layer.W)).sum()
        bound = bound + 0.5 * (first.log() + second.log())
    return bound, residual(layers[-1].after).log()


def by_dobrushin(plain: Plain) -> Logs:
    layers, bound = run(plain), apart(plain.X).log()
    for layer in layers:
        total = torch.as_tensor(abs(plain.skip), dtype=torch.float64)
        for P, W in zip(layer.P, layer.W, strict=True):
            tau = (P[:, None] - P[None]).abs().sum(-1).amax() / 2
            total = total + tau * spectral(W)
        bound = bound + total.log()
    return bound, apart(layers[-1].after).log()


def distances(mask: str, n: int) -> list[list[float]]:
    """Floyd and Warshall: steps from j to i, information running along (j, i) where i attends to j."""
    M = mask_matrix(mask, n)
    found = [[0.0 if i == j else 1.0 if M[i, j] else math.inf for i in range(n)] for j in range(n)]
    for k in range(n):
        for j in range(n):
            for i in range(n):
                found[j][i] = min(found[j][i], found[j][k] + found[k][i])
    return found


def reach(mask: str, n: int) -> tuple[int, int]:
    """(radius, how many tokens reach all within it)."""
    far = [max(row) for row in distances(mask, n)]
    return int(min(far)), sum(each == min(far) for each in far)


def smallest(layers: list[Layer], mask: str) -> Tensor:
    seen = mask_matrix(mask, len(layers[0].before))
    return torch.stack([layer.P.masked_fill(~seen, torch.inf).amin() for layer in layers]).amin()


def masked(plain: Plain) -> Logs:
    layers = run(plain)
    radius, _ = reach(plain.mask, len(plain.X))
    bound = 0.5 * math.log(len(plain.X)) - math.log(2) + (plain.X.amax(0) - plain.X.amin(0)).norm().log()
    for layer in layers:
        bound = bound + spectral(layer.W).sum().log()
    rounds = len(layers) // radius
    return bound + rounds * torch.log1p(-(smallest(layers, plain.mask) ** radius)), mu(layers[-1].after).log()


def cosines(plain: Plain) -> Logs:
    """Cor 1, whose directions are followed from layer 1 on."""
    layers, n = run(plain), len(plain.X)
    radius, count = reach(plain.mask, n)
    y = layers[0].after
    rounds = (len(layers) - 1) // radius
    shrink = torch.log1p(-count * smallest(layers[1:], plain.mask) ** (2 * radius))
    gap = 1 - (y @ y.mT).amin()
    return 0.5 * (math.log(n - 1) + gap.log() + rounds * shrink), mu(layers[-1].after).log()


def in_a_hemisphere(plain: Plain) -> Logs:
    """With the sum of the directions for w: a bound as good as any other, though not the best."""
    layers, n = run(plain), len(plain.X)
    radius, _ = reach(plain.mask, n)
    lengths = plain.X.norm(dim=-1)
    y = plain.X / lengths[:, None]
    w = y.sum(0) / y.sum(0).norm()
    heights = y @ w
    share = torch.minimum(heights.amin(), (lengths * heights).amin() / (lengths * heights).amax())
    shrink = torch.log1p(-((share * smallest(layers, plain.mask)) ** radius))
    start = 0.5 * math.log((n - 1) / 2) + apart(y / heights[:, None]).log()
    return start + len(layers) // radius * shrink, mu(layers[-1].after).log()


def elementary(plain: Plain) -> Logs:
    layers, bound = run(plain), mu(plain.X).log()
    for layer in layers:
        bound = bound + (abs(plain.skip) - mu(layer.branch) / mu(layer.before)).clamp(min=0.0).log()
    return bound, mu(layers[-1].after).log()


def aligned(plain: Plain) -> Logs:
    layers, bound = run(plain), mu(plain.X).log()
    for layer in layers:
        R, F = layer.before - layer.before.mean(0), layer.branch - layer.branch.mean(0)
        bound = bound + (plain.skip + (R * F).sum() / R.square().sum()).abs().log()
    return bound, mu(layers[-1].after).log()


def untouched(plain: Plain) -> Logs:
    layers, R = run(plain), plain.X - plain.X.mean(0)
    written = plain.output.flatten(0, 2)
    rest = R - R @ torch.linalg.pinv(written, rtol=1e-10) @ written
    return rest.norm().log() + len(layers) * math.log(abs(plain.skip)), mu(layers[-1].after).log()


def lambda_skip(plain: Plain) -> Logs:
    layers, w = run(plain), abs(plain.skip)
    bound = mu(layers[0].after).log()
    for layer in layers[1:]:
        s, c = layer.branch.norm(dim=-1).amax(), mu(layer.branch) / mu(layer.before)
        lengths = (w * s + (w + s) * c) / (w - s)
        square = ((w - c).square() - lengths.square()).clamp(min=0.0)
        bound = bound + 0.5 * square.log() - (w + s).log()
    return bound, mu(layers[-1].after).log()
