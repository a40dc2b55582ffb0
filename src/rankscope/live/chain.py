"""Do the blocks follow one another? Block l + 1 must take what block l gave.

Blocks that were named or found wrongly, such as branches whose outputs are added to hidden states that no
block shows, give tensors that are no layers. So what every block gave is held until the next one is called,
which settles which of several tensors was the layer's hidden states, and whether anything stands between the
two. `recorder.py` makes a `BlockChain` for each call, and calls `gave` when a block is left, `took` when the
next is entered, `ended` after the last, and `check`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.live.hidden_states import alike, same

ALIKE = 0.9
"""Cosine of what a block gives with what the next one takes, above which something small stands between."""


class BlockChain:
    """Follows the hidden states of one call from block to block."""

    def __init__(self) -> None:
        self.held: tuple[int, list[Tensor], list[int]] | None = None
        """A layer, the tensors that could be its hidden states, and how often each was changed in place."""
        self.position: int | None = None
        """Which of the tensors that a block returns the next one took, as far as blocks have shown."""
        self.linked = 0  # blocks that took what the one before gave
        self.broken: dict[int, float] = {}
        """Layers whose hidden states the next block did not take as they were, and how alike the two are."""
        self.unsure: list[int] = []  # layers of which nothing said which tensor is the hidden states

    def gave(self, layer: int, states: Sequence[Tensor], taken: torch.Size | None) -> Tensor | None:
        """Hold what a block returned, one tensor or several that could be its hidden states.

        They come back if it is one of the shape that was `taken`; None where the next block must say.
        """
        fitting = [x for x in states if x.shape == taken] or list(states)
        self.held = (layer, fitting, [_version(x) for x in fitting]) if fitting else None
        return fitting[0] if len(fitting) == 1 else None

    def took(self, states: Sequence[Tensor]) -> tuple[int, Tensor] | None:
        """Compare what the next block takes with what was held; (layer, hidden states) if that was open."""
        if self.held is None:
            return None
        (layer, fitting, versions), self.held = self.held, None
        for k, (x, version) in enumerate(zip(fitting, versions, strict=True)):
            if version == _version(x) and any(same(x, y) for y in states):
                self.linked += 1
                self.position = k if len(fitting) > 1 else self.position
                return (layer, x) if len(fitting) > 1 else None
        x = fitting[self._usual_position(layer, fitting)]
        self.broken[layer] = max((alike(x, y) for y in states), default=0.0)
        return (layer, x) if len(fitting) > 1 else None

    def continuation(self, states: Sequence[Tensor]) -> int:
        """Which of the tensors that the next block takes is what was held; 0 if none is."""
        held = self.held[1] if self.held is not None else []
        return next((k for k, y in enumerate(states) if any(same(x, y) for x in held)), 0)

    def ended(self) -> tuple[int, Tensor] | None:
        """No block comes after: (last layer, its hidden states) if that was open."""
        if self.held is None:
            return None
        (layer, fitting, _), self.held = self.held, None
        return (layer, fitting[self._usual_position(layer, fitting)]) if len(fitting) > 1 else None

    def check(self, blocks: str) -> None:
        """Refuse blocks of which none takes what the one before gave; `blocks` says how they were chosen."""
        if self.broken and not self.linked and min(self.broken.values()) < ALIKE:
            raise WatchError(
                f"every block must take what the one before it gave; of the {len(self.broken) + 1} {blocks} "
                "that were called none does: they are branches inside a layer, or stand apart: name the "
                "whole layers with blocks=",
                subject="blocks",
            )

    def _usual_position(self, layer: int, fitting: Sequence[Tensor]) -> int:
        """Which of several tensors to take if the next block took none: as before, or the first."""
        if len(fitting) > 1 and (self.position is None or self.position >= len(fitting)):
            self.unsure.append(layer)
        return min(self.position or 0, len(fitting) - 1)


def _version(x: Tensor) -> int:
    """How often x was changed in place; tensors of inference mode do not count it."""
    return 0 if x.is_inference() else x._version
