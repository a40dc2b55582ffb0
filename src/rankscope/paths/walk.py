"""Many paths at once: what they have in common at the start is computed once."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen
from rankscope.paths.own import OwnPaths

Step = Callable[[int, Tensor, int | None], Tensor]
"""(layer, tokens, head or None) -> tokens."""


def shared_step(frozen: Frozen) -> Step:
    """Attention from the full network: the theorem's paths."""

    def step(index: int, Y: Tensor, head: int | None) -> Tensor:
        layer = frozen.layers[index]
        gone = layer.past(Y[None]) if head is None else layer.through(Y[None], [head])
        return layer.close(gone)[0]

    return step


def own_step(frozen: Frozen) -> Step:
    """Attention recomputed along each path."""
    return OwnPaths(frozen.net, frozen.X, frozen.real).step


@torch.no_grad()
def total(frozen: Frozen, paths: Iterable[Path], step: Step) -> Tensor:
    """The sum of the terms of some paths, `[batch, token, width]`, before the final norm."""
    return _below(sorted(set(paths), key=_sortable), 0, frozen.X, step, torch.zeros_like(frozen.X))


def _below(paths: list[Path], index: int, Y: Tensor, step: Step, sum_so_far: Tensor) -> Tensor:
    """Add the terms of paths that agree up to layer `index`, where they stand at Y."""
    if not paths:
        return sum_so_far
    if index == len(paths[0]):
        return sum_so_far + Y
    for head in dict.fromkeys(path[index] for path in paths):
        along = [path for path in paths if path[index] == head]
        sum_so_far = _below(along, index + 1, step(index, Y, head), step, sum_so_far)
    return sum_so_far


def _sortable(path: Path) -> tuple[int, ...]:
    return tuple(-1 if head is None else head for head in path)
