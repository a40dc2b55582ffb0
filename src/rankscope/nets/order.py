"""The order of a block, written once: which norms, branches and skips a layer has, and what follows what.

    half:    X <- norm(skip * X + branch(X) + ...)
    branch:  X -> norm -> attention or MLP -> norm

Every norm may be missing. A block has one half for attention and one for the MLP, and where it attends to a
memory one between them; in a parallel block both are branches of one half.

| norm_place | a branch reads through | what it adds goes through | the sum goes through |
|------------|------------------------|---------------------------|----------------------|
| post       |                        |                           | its norm             |
| pre        | its norm               |                           |                      |
| sandwich   | its norm               | a second norm             |                      |
| output     |                        | its norm                  |                      |
"""

from dataclasses import dataclass
from typing import Literal

from rankscope.nets.architecture import Architecture

Branching = Literal["attention", "cross", "mlp"]


@dataclass(frozen=True)
class Branch:
    """Attention, cross-attention or the MLP, with the names of the norm on its input and on its output."""

    part: Branching
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Half:
    """A skip, the branches that are added to it, and the name of the norm on the sum."""

    skip: float
    branches: tuple[Branch, ...]
    after: str | None

    @property
    def attends(self) -> bool:
        """Whether attention is one of its branches."""
        return any(branch.part == "attention" for branch in self.branches)


def order(arch: Architecture, index: int = 0) -> tuple[Half, ...]:
    """The halves of layer `index` (0-based).

    >>> order(Architecture(layers=1, width=8, heads=2, norm_place="post"))[0].after
    'attention_norm'
    """
    norm_place = "none" if arch.norm == "none" else arch.norm_place
    bare = index in arch.bare_layers

    def branch(part: Branching) -> Branch:
        reads = norm_place in ("pre", "sandwich") and not (bare and part == "attention")
        after = f"{part}_after" if norm_place in ("sandwich", "output") else None
        return Branch(part, f"{part}_norm" if reads else None, after)

    def half(skip: float, *parts: Branching) -> Half:
        norm = f"{parts[0]}_norm" if norm_place == "post" else None
        return Half(skip, tuple(branch(part) for part in parts), norm)

    if arch.parallel and arch.mlp != "none":
        return (half(arch.attention_skip, "attention", "mlp"),)
    cross = (half(arch.attention_skip, "cross"),) if arch.cross_attention else ()
    mlp = (half(arch.mlp_skip, "mlp"),) if arch.mlp != "none" else ()
    return half(arch.attention_skip, "attention"), *cross, *mlp


def active_heads(arch: Architecture, index: int) -> tuple[int, ...]:
    """Return the active heads of layer `index` (0-based)."""
    return tuple(range(arch.heads)) if arch.kept_heads is None else tuple(sorted(set(arch.kept_heads[index])))


def norms(arch: Architecture, index: int = 0) -> list[str]:
    """Return the names of the norms of layer `index`."""
    halves = order(arch, index)
    names = [name for half in halves for branch in half.branches for name in (branch.before, branch.after)]
    return [name for name in [*names, *(half.after for half in halves)] if name is not None]
