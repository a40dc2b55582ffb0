"""What a forward pass gives: a layer at a time, or all that is kept of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rankscope.nets.padding import TokenOrder
from rankscope.shapes import Float


class Step(NamedTuple):
    """What one layer gives: its number (0 is the input, which has no attention and no heads), its tokens,
    its attention, and the values that each head mixed, before the output projection."""

    layer: int
    state: Float[Tensor, "batch token width"]
    attention: Float[Tensor, "batch head token token"] | None
    heads: Float[Tensor, "batch token head head_width"] | None = None
    routing: Float[Tensor, "batch token expert"] | None = None
    """The weight of each expert for each token, of a layer that is a mixture of experts."""
    cross: Float[Tensor, "batch head token source"] | None = None
    """Attention to the memory, of a layer that has cross-attention."""

    def restored(self, order: TokenOrder) -> "Step":
        """Tokens back where they stood before padding was moved to the end."""
        moves = (order.restored_square, order.restored, order.restored, order.restored_rows)
        parts = (None if part is None else move(part) for move, part in zip(moves, self[2:], strict=True))
        return Step(self.layer, order.restored(self.state), *parts)


@dataclass(frozen=True, repr=False)
class ForwardPass:
    """The tokens after every layer of a forward pass, and its attention patterns if asked for."""

    states: tuple[Tensor, ...]  # Tokens before layer 1 and after each layer, `[batch, token, width]`
    attention: tuple[Tensor, ...]  # Of layer 1, 2, ...: `[batch, head, token, token]`; empty unless asked for
    output: Tensor  # The last state, through the final norm where there is one
    cross: tuple[Tensor, ...] = ()
    """Of a decoder its attention to the memory, `[batch, head, token, source]`, where attention is kept."""

    @classmethod
    def of(cls, steps: Iterable[Step], attention: bool, finish: Callable[[Tensor], Tensor]) -> "ForwardPass":
        """What is kept of steps, with their attention if so asked; `finish` makes the output of the last."""
        dropped: dict[str, Any] = dict.fromkeys(("heads", "routing") + (() if attention else ("attention", "cross")))
        kept = [step._replace(**dropped) for step in steps]
        return cls(
            states=tuple(step.state for step in kept),
            attention=tuple(step.attention for step in kept if step.attention is not None),
            output=finish(kept[-1].state),
            cross=tuple(step.cross for step in kept if step.cross is not None),
        )

    def __repr__(self) -> str:
        kept = "attention kept" if self.attention else "attention not kept"
        return f"ForwardPass({len(self.states) - 1} layers, output {tuple(self.output.shape)}, {kept})"
