"""Many paths at once: what they have in common at the start is computed once.

The theorem's path takes attention from the full network (`shared`). The code of Dong et al. 2021 runs the
path as a network of its own: one head, or the skip, in every layer, with attention, norms, MLPs and biases
computed from what the path itself has come to (`own`). Those terms do not add up to the output.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain, Tokens
from rankscope.nets.traversal import traverse
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen
from rankscope.paths.terms import OnePath, PathRules

Step = Callable[[int, Tensor, int | None], Tensor]
"""(layer, tokens, head or None) -> tokens."""


class OwnAttention(OnePath, Plain):
    """The plain rules along one path, one layer at a time."""

    def __init__(self, frozen: Frozen) -> None:
        net = frozen.net
        super().__init__(net.arch, PassSettings.of(net.arch, net.weights, frozen.X, frozen.valid))
        self.frozen = frozen

    def step(self, index: int, X: Tokens, head: int | None) -> Tokens:
        """Tokens after layer `index`, through that head or past all."""
        self.head = head
        state: Tokens = traverse(self.frozen.layers[index].block, self, X).state
        return state * self.frozen.valid[..., None]

    def matrices(self, path: Path) -> dict[int, Tensor]:
        """By layer in which the path takes a head: that head's attention `[batch, token, token]`."""
        patterns, X = {}, self.frozen.X
        for index, self.head in enumerate(path):
            output = traverse(self.frozen.layers[index].block, self, X)
            if self.head is not None:
                patterns[index] = output.pattern[:, self.head]
            X = output.state * self.frozen.valid[..., None]
        return patterns


def shared_step(frozen: Frozen) -> Step:
    """Attention from the full network: the theorem's paths."""
    return PathRules(frozen).step


def own_step(frozen: Frozen) -> Step:
    """Attention recomputed along each path."""
    return OwnAttention(frozen).step


def terms(frozen: Frozen, paths: Iterable[Path], step: Step) -> Iterator[tuple[Path, Tensor]]:
    """Each path once, with its term `[batch, token, width]` before the final norm."""
    last = Path()
    walked = [frozen.X]  # where the last path stood before each layer, and at its end
    for path in sorted(set(paths), key=_sortable):
        common = next((at for at, (a, b) in enumerate(zip(last, path, strict=False)) if a != b), len(last))
        del walked[common + 1 :]
        for index in range(common, len(path)):
            walked.append(step(index, walked[-1], path[index]))
        last = path
        yield path, walked[-1]


@torch.no_grad()
def total(frozen: Frozen, paths: Iterable[Path], step: Step) -> Tensor:
    """The sum of the terms of some paths, `[batch, token, width]`, before the final norm."""
    total_term = torch.zeros_like(frozen.X)
    for _, term in terms(frozen, paths, step):
        total_term = total_term + term
    return total_term


def _sortable(path: Path) -> tuple[int, ...]:
    return tuple(-1 if head is None else head for head in path)
