"""Do the blocks follow one another? Block l + 1 must take what block l gave.

Blocks that were named or found wrongly, branches of a block whose outputs are added to a stream that nobody
looks at, give states that are no layers. So what every block gave is held until the next one is called: it
settles which of several tensors was the state, and whether anything stands between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.live.states import alike, same

ALIKE = 0.9
"""Cosine of what a block gives with what the next one takes, above which something small stands between."""


@dataclass
class Chain:
    """Of one call."""

    given: tuple[int, list[Tensor], list[int]] | None = None
    """A layer, what could be its state, and the version of each."""
    place: int | None = None
    """Which of what a block returns was the state, as the blocks so far have shown."""
    linked: int = 0
    broken: dict[int, float] = field(default_factory=dict)
    """Layers whose state the next block did not take as it was, and how alike the two are."""
    unsure: list[int] = field(default_factory=list)
    """Layers of which nothing said which tensor is the state."""

    def gives(self, layer: int, states: Sequence[Tensor], took: torch.Size | None) -> Tensor | None:
        """A block returned these: its state, or None where the next block must say."""
        fitting = [x for x in states if x.shape == took] or list(states)
        self.given = (layer, fitting, [_version(x) for x in fitting]) if fitting else None
        return fitting[0] if len(fitting) == 1 else None

    def takes(self, states: Sequence[Tensor]) -> tuple[int, Tensor] | None:
        """The next block is called with these: the layer that waited for it, and its state."""
        if self.given is None:
            return None
        (layer, fitting, versions), self.given = self.given, None
        for place, (x, version) in enumerate(zip(fitting, versions, strict=True)):
            if version == _version(x) and any(same(x, y) for y in states):
                self.linked += 1
                self.place = place if len(fitting) > 1 else self.place
                return (layer, x) if len(fitting) > 1 else None
        x = fitting[self._usual(layer, fitting)]
        self.broken[layer] = max((alike(x, y) for y in states), default=0.0)
        return (layer, x) if len(fitting) > 1 else None

    def continues(self, states: Sequence[Tensor]) -> int:
        """Which of these, that the next block takes, is what was given; the first, if none is."""
        given = self.given[1] if self.given is not None else []
        return next((k for k, y in enumerate(states) if any(same(x, y) for x in given)), 0)

    def ends(self) -> tuple[int, Tensor] | None:
        """No block comes after: the last layer and its state, if that was open."""
        if self.given is None:
            return None
        (layer, fitting, _), self.given = self.given, None
        return (layer, fitting[self._usual(layer, fitting)]) if len(fitting) > 1 else None

    def _usual(self, layer: int, fitting: Sequence[Tensor]) -> int:
        if len(fitting) > 1 and (self.place is None or self.place >= len(fitting)):
            self.unsure.append(layer)
        return min(self.place or 0, len(fitting) - 1)

    def check(self, blocks: str) -> None:
        """Refuse blocks of which none takes what the one before gave."""
        if self.broken and not self.linked and min(self.broken.values()) < ALIKE:
            raise WatchError(
                f"every block must take what the one before it gave; of the {len(self.broken) + 1} {blocks} "
                "that were called none does: they are branches inside a layer, or stand apart: name the "
                "whole layers with blocks="
            )


def _version(x: Tensor) -> int:
    """How often it was changed in place; a tensor of inference mode does not count."""
    return 0 if x.is_inference() else x._version
