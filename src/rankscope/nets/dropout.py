"""The plain arithmetic with dropout, as BERT has it in training.

Entries are set to zero with chance p and the others divided by 1 - p: of the embedding, of the attention
pattern, and of the output of each branch. Rows of attention then no longer sum to one and tokens no longer
see the same average, so every layer pulls tokens apart anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.pass_settings import PassSettings, Valid
from rankscope.nets.plain import HeadOutputs, Plain, Square, Tokens
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block
from rankscope.shapes import Float


@dataclass(frozen=True)
class Dropout:
    """Zeros with chance p, drawn from a generator of its own: a seed gives the same pass again."""

    p: float  # The chance that an entry becomes zero
    generator: torch.Generator  # What zeros are drawn from

    @classmethod
    def seeded(cls, p: float, seed: int, device: torch.device | str) -> "Dropout":
        """Return dropout with a generator of that seed, on that device."""
        return cls(p, torch.Generator(device=device).manual_seed(seed))

    def __call__(self, x: Tensor) -> Tensor:
        """Set some entries of x to zero and make the others larger, so that its mean stays."""
        if not self.p:
            return x
        drawn = torch.rand(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)
        return x * (drawn >= self.p) / (1 - self.p)


class DropoutRules(Plain):
    """The plain rules, with dropout on attention and on each branch."""

    def __init__(self, arch: Architecture, settings: PassSettings, drop: Dropout) -> None:
        super().__init__(arch, settings)
        self.drop = drop

    def pattern(self, block: Block, X: Tokens) -> Square:
        """P with some entries set to zero."""
        return self.drop(super().pattern(block, X))

    def cross_pattern(self, block: Block, X: Tokens) -> Float[Tensor, "batch head token source"]:
        """P of cross-attention with some entries set to zero."""
        return self.drop(super().cross_pattern(block, X))

    def output(self, block: Block, heads: HeadOutputs) -> Tokens:
        """The output of attention with some entries set to zero."""
        return self.drop(super().output(block, heads))

    def mlp(self, block: Block, X: Tokens) -> Tokens:
        """The output of the MLP with some entries set to zero."""
        return self.drop(super().mlp(block, X))


def training_states(net: Transformer, X: Tokens, drop: Dropout, padding: Valid | None = None) -> Iterator[Tokens]:
    """Tokens at layer 0, 1, ...: `net.steps` with dropout. At p = 0 they are the same."""
    X, valid, order = net.prepared(X, padding)
    rules = DropoutRules(net.arch, net.settings(X, valid), drop)
    X = drop(X)
    yield X if order is None else order.restored(X)
    for step in net.traversed(X, valid, rules):
        yield step.state if order is None else order.restored(step.state)
