"""Many paths at once: what they have in common at the start is computed once."""

from collections.abc import Callable, Iterable, Iterator

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
    whole = torch.zeros_like(frozen.X)
    for _, term in terms(frozen, paths, step):
        whole = whole + term
    return whole


def _sortable(path: Path) -> tuple[int, ...]:
    return tuple(-1 if head is None else head for head in path)
