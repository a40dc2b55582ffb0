"""`Model`: a canonical network for a task, between an embedding and a head.

| a token is           | embedding               |
|----------------------|-------------------------|
| a symbol             | a row of a table        |
| a point of the plane | `relu(x A + a) B + b`   |
| a patch of an image  | `x A + a`               |

Where its blocks have a norm after them, the embedding goes through one too, without gain and bias. Positions
are the architecture's, none of the embedding's. The head is linear, of each token, or of their average where
the label is the whole sample's.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.lab.module import Trainable
from rankscope.nets import Transformer
from rankscope.nets.dropout import Dropout
from rankscope.shapes import Bool, Float


@dataclass(frozen=True)
class Interface:
    """What a task asks of a network: what a token is, and what is said of it."""

    classes: int
    symbols: int = 0
    """How many there are, where a token is one."""
    coordinates: int = 0
    """Of a point, where a token is one."""
    patch: int = 0
    """Numbers of a patch, where a token is one."""
    per: str = "token"
    """What has a label: each "token", or the "sample"."""


def normal(*shape: int, spread: float, draw: torch.Generator) -> nn.Parameter:
    """Drawn in float64."""
    return nn.Parameter(spread * torch.randn(shape, generator=draw, dtype=torch.float64))


class Affine(nn.Module):
    """`x W + b`; entries of W have the size `spread / sqrt(inputs)` at first, those of b `shift`."""

    def __init__(
        self, inputs: int, outputs: int, draw: torch.Generator, spread: float = 1.0, shift: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = normal(inputs, outputs, spread=spread / math.sqrt(inputs), draw=draw)
        self.bias = normal(outputs, spread=shift, draw=draw)

    def forward(self, x: Float[Tensor, "*rest inputs"]) -> Float[Tensor, "*rest outputs"]:
        """Of every row."""
        return x @ self.weight + self.bias


class Embedding(nn.Module):
    """Layer 0, before positions."""

    def __init__(self, task: Interface, width: int, spread: float, draw: torch.Generator) -> None:
        super().__init__()
        if task.symbols:
            self.table = normal(task.symbols, width, spread=spread, draw=draw)
        elif task.patch:
            self.first = Affine(task.patch, width, draw, spread)
        else:
            self.first = Affine(task.coordinates, width, draw, shift=1.0)
            self.second = Affine(width, width, draw, spread * math.sqrt(2))
        self.task = task

    def forward(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of symbols `[batch, token]` or of numbers `[batch, token, number]`."""
        if self.task.symbols:
            return F.embedding(inputs, self.table)
        X: Tensor = self.first(inputs.to(self.first.weight.dtype))
        return X if self.task.patch else self.second(F.relu(X))


class Model(nn.Module):
    """An embedding, a network, a head. `spread` is the size of the entries of embedding and positions at
    first, `1 / sqrt(width)` where it is left out. They are drawn in float64, and then as the network is.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> Model(net, Interface(classes=5, symbols=5))(torch.tensor([[0, 3, 1]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, net: Transformer, task: Interface, spread: float | None = None, seed: int = 0) -> None:
        super().__init__()
        draw, arch = torch.Generator().manual_seed(seed), net.arch
        spread = 1 / math.sqrt(arch.width) if spread is None else spread
        self.per = task.per
        self.embed = Embedding(task, arch.width, spread, draw).to(net.dtype)
        self.net = Trainable(net)
        self.head = Affine(arch.width, task.classes, draw).to(net.dtype)
        self.normed = arch.norm_place == "post" and arch.norm != "none"
        if arch.positions == "absolute":
            table: Any = self.net.positions
            drawn = spread * torch.randn(table.shape, generator=draw, dtype=torch.float64)
            table.data = drawn.to(table)
        self.to(net.device)

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """What the network is given."""
        X: Tensor = self.embed(inputs)
        return F.layer_norm(X, X.shape[-1:], eps=self.net.arch.norm_eps) if self.normed else X

    def forward(
        self,
        inputs: Tensor,
        padding: Bool[Tensor, "batch token"] | None = None,
        drop: Dropout | None = None,
    ) -> Tensor:
        """Logits `[batch, token, class]`, or `[batch, class]` where samples have the labels."""
        Y: Tensor = self.net(self.tokens(inputs), padding, drop)
        Y = Y if drop is None else drop(Y)
        if self.per == "token":
            return self.head(Y)
        if padding is None:
            return self.head(Y.mean(1))
        real = (~padding).to(Y.dtype)[..., None]
        return self.head((Y * real).sum(1) / real.sum(1))

    def network(self) -> Transformer:
        """What the network in it has learnt."""
        return self.net.network()
