"""Small networks with a remedy, and how they are compared with the independent transformer of `reference.py`."""

import math
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

from rankscope import decompose
from rankscope.deviation import propagate
from rankscope.metrics import composite_norm
from rankscope.nets import Architecture, Transformer
from tests.builders import awake, normal
from tests.deviation.reference import Network, Rows, log10_residual

PADDING = torch.tensor([[False] * 5, [True, False, False, False, True]])
SMALL: dict[str, Any] = {"layers": 3, "width": 4, "heads": 2, "mlp_width": 6, "norm_eps": 1e-6}


def times(number: Any, X: Rows) -> Rows:
    return [[mp.mpf(number) * u for u in row] for row in X]


def plus(X: Rows, Y: Rows) -> Rows:
    return [[u + v for u, v in zip(*rows, strict=True)] for rows in zip(X, Y, strict=True)]


def small(**fields: Any) -> Transformer:
    """With biases and gains, and numbers of parts, that are not where they start."""
    return awake(Architecture(**{**SMALL, **fields}), seed=5)


def stirred(net: Transformer, size: float = 0.3) -> Transformer:
    """The numbers that its parts train, moved."""
    state = net.state_dict()
    for place, (name, tensor) in enumerate(state.items()):
        if ".parts." in name:
            state[name] = tensor + size * normal(*tensor.shape, seed=place)
    return Transformer.from_weights(net.arch, state)


def check(net: Transformer, exact: Network) -> None:
    """States in plain and in deviation arithmetic, of a whole sample and of one with padding on both sides,
    are those of its real tokens alone in 40 digits."""
    X = normal(2, 5, net.arch.width, seed=7)
    plain = [step.state for step in net.steps(X, PADDING)]
    deviation = [step.state.tokens() for step in propagate(net, X, PADDING)]
    for sample in range(2):
        real = ~PADDING[sample]
        with mp.workdps(40):
            states = exact.states(X[sample, real])
        for mine, fine, rows in zip(plain, deviation, states, strict=True):
            true = torch.tensor([[float(u) for u in row] for row in rows], dtype=torch.float64)
            size = float(true.abs().max())
            assert torch.allclose(mine[sample, real], true, rtol=0, atol=1e-13 * size)
            assert torch.allclose(fine[sample, real], true, rtol=0, atol=1e-12 * size)
            assert not mine[sample, ~real].any() and not fine[sample, ~real].any()


def check_digits(net: Transformer, exact: Network, X: Tensor, digits: int = 400) -> float:
    """log10 of the residual in deviation arithmetic, within 1e-10 of that in hundreds of digits; answers with
    the lowest."""
    with mp.workdps(digits):
        logs = [log10_residual(rows) for rows in exact.states(X[0])]
    for step, true in zip(propagate(net, X), logs, strict=True):
        residual = step.state.centred()[1]
        mine = math.log10(float(composite_norm(residual.value)[0])) + float(residual.log[0]) / math.log(10)
        assert abs(mine - float(true)) < 1e-10, (step.layer, mine, float(true))
    return float(min(logs))


def check_paths(net: Transformer) -> None:
    """All paths by length add up to what the network gives, and so do the paths one by one."""
    X, rows = normal(2, 5, net.arch.width, seed=7), ~PADDING[..., None]
    found = decompose(net, X, PADDING)
    lengths = found.by_length()
    assert found.closure < 1e-12
    torch.testing.assert_close(found.output, net.run(X, PADDING).output * rows)
    torch.testing.assert_close((lengths.embedding + lengths.bias).sum(0), found.output, rtol=1e-9, atol=1e-11)
    paths = [path for length, count in enumerate(lengths.counts) for path in found.sample(length, count)]
    torch.testing.assert_close(found.keep(paths=paths), lengths.embedding.sum(0), rtol=1e-9, atol=1e-11)
