"""How far rounding may have moved a path's term: measured by following the path again, perturbed.

After every product the numbers are off by some units of rounding, each its own way; so are attention, gates
and the scales of norms. What that changes in the term, its residual included, is what rounding can change:
also where a matrix takes out the main direction, and what is left is small beside what it came from.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.metrics.tokens import unit_of
from rankscope.nets.order import Half
from rankscope.nets.traversal import Block
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen, FrozenLayer
from rankscope.paths.terms import FrozenRules, HeadTerms, PathRules, Terms

UNITS = 4.0
"""By how many units of rounding a number is perturbed: a sum of products rounds more than once."""
COPIES = 3
SAFETY = 2.0
"""The factor by which the largest change among the copies is enlarged."""


class PerturbedPath(PathRules):
    """Rules along one path, with every intermediate result perturbed by a few units of rounding."""

    def __init__(self, frozen: Frozen, seed: int) -> None:
        super().__init__(frozen)
        self.generator = torch.Generator(frozen.X.device).manual_seed(seed)
        self.layers = [self._perturbed_layer(layer) for layer in frozen.layers]

    def _perturb(self, x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=self.generator, device=x.device, dtype=torch.int8)
        return x * (1 + UNITS * unit_of(x.dtype) * (2 * sign - 1).to(x.dtype))

    def _perturbed_layer(self, layer: FrozenLayer) -> FrozenLayer:
        norms = {name: replace(norm, scale=self._perturb(norm.scale)) for name, norm in layer.norms.items()}
        gate = None if layer.gate is None else self._perturb(layer.gate)
        head_gate = None if layer.head_gate is None else self._perturb(layer.head_gate)
        kept = {name: self._perturb(kept_tensor) for name, kept_tensor in layer.kept.items()}
        perturbed = FrozenLayer(layer.block, norms, gate, head_gate, kept)
        perturbed.P = self._perturb(layer.P)
        return perturbed

    def layer(self, block: Block) -> FrozenLayer:
        """The measured quantities of a block, perturbed."""
        return self.layers[block.index]

    def norm(self, block: Block, name: str, terms: Terms) -> Terms:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb_terms(super().norm(block, name, terms))

    def values(self, block: Block, terms: Terms) -> Tensor:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb(super().values(block, terms))

    def mix(self, block: Block, P: Any, V: Tensor) -> HeadTerms:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb(super().mix(block, P, V))

    def output(self, block: Block, spoken: HeadTerms) -> Terms:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb_terms(super().output(block, spoken))

    def mlp(self, block: Block, terms: Terms) -> Terms:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb_terms(super().mlp(block, terms))

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """The rule's result, perturbed by some units of rounding."""
        return self._perturb_terms(super().add(block, half, terms, branches))

    def _perturb_terms(self, terms: Terms) -> Terms:
        return terms._replace(parts=self._perturb(terms.parts))

    def walk(self, path: Path) -> Tensor:
        """The path's term at the output, perturbed."""
        Y = self._perturb(self.frozen.X)
        for index, head in enumerate(path):
            Y = self.step(index, Y, head)
        return self._perturb(self.end(Terms(Y[None]))[0])


def noise_of(frozen: Frozen, paths: list[Path], weigh: Callable[[Tensor], float]) -> list[float]:
    """For each path, by how much rounding may have moved its weight, `weigh` of its term at the output."""
    perturbed = [PerturbedPath(frozen, seed) for seed in range(COPIES)]
    along = PathRules(frozen)
    noise = []
    for path in paths:
        Y = frozen.X
        for index, head in enumerate(path):
            Y = along.step(index, Y, head)
        term = FrozenRules(frozen).end(Terms(Y[None]))[0]
        # Of the difference, not between weights: two noises may happen to weigh the same.
        noise.append(SAFETY * max(weigh(copy.walk(path) - term) for copy in perturbed))
    return noise
