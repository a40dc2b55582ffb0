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

Whoever needs to know where a norm stands asks here; whoever computes goes through `traversal.py`.
"""

from dataclasses import dataclass
from typing import Literal

from rankscope.nets.architecture import Architecture

Branching = Literal["attention", "cross", "mlp"]


@dataclass(frozen=True)
class Branch:
    """Attention, of either kind, or the MLP on its way from the tokens to the sum; norms by their names in
    the weights."""

    part: Branching
    before: str | None
    """The norm that it reads through."""
    after: str | None
    """The norm on what it adds."""


@dataclass(frozen=True)
class Half:
    """A skip and what is added to it."""

    skip: float
    branches: tuple[Branch, ...]
    after: str | None
    """The norm on the sum."""

    @property
    def attends(self) -> bool:
        """Whether attention is one of its branches."""
        return any(branch.part == "attention" for branch in self.branches)


def order(arch: Architecture, index: int = 0) -> tuple[Half, ...]:
    """The halves of layer `index` (0-based).

    >>> order(Architecture(layers=1, width=8, heads=2, norm_place="post"))[0].after
    'attention_norm'
    """
    place = "none" if arch.norm == "none" else arch.norm_place
    bare = index in arch.bare_layers

    def branch(part: Branching) -> Branch:
        reads = place in ("pre", "sandwich") and not (bare and part == "attention")
        after = f"{part}_after" if place == "sandwich" else None
        return Branch(part, f"{part}_norm" if reads else None, after)

    def half(skip: float, *parts: Branching) -> Half:
        norm = f"{parts[0]}_norm" if place == "post" else None
        return Half(skip, tuple(branch(part) for part in parts), norm)

    if arch.parallel and arch.mlp != "none":
        return (half(arch.attention_skip, "attention", "mlp"),)
    cross = (half(arch.attention_skip, "cross"),) if arch.cross_attention else ()
    mlp = (half(arch.mlp_skip, "mlp"),) if arch.mlp != "none" else ()
    return half(arch.attention_skip, "attention"), *cross, *mlp


def active_heads(arch: Architecture, index: int) -> tuple[int, ...]:
    """The heads of layer `index` that speak."""
    return tuple(range(arch.heads)) if arch.kept_heads is None else tuple(sorted(set(arch.kept_heads[index])))


def norms(arch: Architecture, index: int = 0) -> list[str]:
    """The names of the norms of layer `index`, in the order they are met."""
    halves = order(arch, index)
    met = [name for half in halves for branch in half.branches for name in (branch.before, branch.after)]
    return [name for name in [*met, *(half.after for half in halves)] if name is not None]
