"""Gradients otherwise: by autograd through the whole network at once, and by differences in hundreds of digits."""

import math
import re
from collections.abc import Iterator
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

from rankscope.forecasts.gradients import kind_of
from rankscope.lab import Trainable
from rankscope.nets import Transformer
from tests.deviation.reference import Network, dot, exact

Logs = dict[str, list[float]]


def by_autograd(net: Transformer, X: Tensor, R: Tensor) -> Logs:
    """log10 of the norms of gradients of `<output, R>` by layer: at tokens and at each kind of weight."""
    module = Trainable(net)
    states = list(module.states(X.clone().requires_grad_()))
    for state in states:
        state.retain_grad()
    (module.current().finish(states[-1]) * R).sum().backward()
    logs: Logs = {"tokens": [_log10(_squares(state.grad)) for state in states]}
    for layer in range(net.arch.layers):
        squares: dict[str, float] = {}
        for name, parameter in module.layers[layer].named_parameters():
            if (kind := kind_of(name)) is not None:
                squares[kind] = squares.get(kind, 0.0) + _squares(parameter.grad)
        for kind, square in squares.items():
            logs.setdefault(kind, []).append(_log10(square))
    return logs


def by_differences(net: Transformer, X: Tensor, R: Tensor, kinds: tuple[str, ...], digits: int) -> Logs:
    """The same of one sample [token, width], by differences of the loss at steps of a third of the digits; of tokens
    those at layer 0 alone."""
    with mp.workdps(digits):
        network, rows, weights, step = Network(net), exact(X), exact(R), mp.mpf(10) ** (-digits // 3)

        def loss() -> Any:
            states = [list(row) for row in rows]
            for layer in range(net.arch.layers):
                states = network.layer(layer, states)
            return mp.fsum(dot(a, b) for a, b in zip(states, weights, strict=True))

        def square(tensor: list[Any]) -> Any:
            total = mp.mpf(0)
            for row, k in _places(tensor):
                before = row[k]
                row[k] = before + step
                total += ((loss() - start) / step) ** 2
                row[k] = before
            return total

        start, squares = loss(), {kind: [mp.mpf(0)] * net.arch.layers for kind in kinds if kind != "tokens"}
        for name, tensor in network.tensors.items():
            layer = re.match(r"layers\.(\d+)\.(.*)", name)
            if layer is not None and (kind := kind_of(layer[2])) in squares and kind is not None:
                squares[kind][int(layer[1])] += square(tensor)
        if "tokens" in kinds:
            squares["tokens"] = [square(rows)]
        return {kind: [float(mp.log10(each) / 2) for each in of_layers] for kind, of_layers in squares.items()}


def _places(tensor: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Every number of nested lists, as the list that it stands in and its index."""
    for k, item in enumerate(tensor):
        if isinstance(item, list):
            yield from _places(item)
        else:
            yield tensor, k


def _squares(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.square().sum())


def _log10(square: float) -> float:
    return math.log10(square) / 2 if square else -math.inf


def farthest(ours: Tensor, reference: list[float]) -> float:
    """The largest difference of two rows of logs; zero where both are -inf."""
    other = torch.tensor(reference, dtype=torch.float64)
    return float((ours - other).abs().masked_fill(ours == other, 0.0).max())
