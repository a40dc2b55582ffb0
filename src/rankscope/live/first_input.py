"""The input of the first block of a call, held until it is known how to read it.

Two things may be open when the first block is entered: which axis of its hidden states counts tokens (`layout`), if
neither torch nor transformers wrote the blocks, and which way round a mask is meant. Attention in the block shows both:
it mixes tokens, and hides padding. `recorder.py` makes a `FirstInput` when the first block of a call is entered, calls
`attention_seen` with every attention, and begins to read when `settled`, at the latest when the block is left.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rankscope.errors import WatchError
from rankscope.live.attention import AttentionCall
from rankscope.live.hidden_states import exchanged, layout_in_attention
from rankscope.live.padding import PaddingArgument, find_padding
from rankscope.live.plan import WatchPlan


class FirstInput:
    """What the first block of a call took. `calls` are the arguments of the model, of the modules around the blocks and
    of the block; a `decoder` has masks of its own; `was_read` says that some were read in the plan's layout."""

    def __init__(
        self, plan: WatchPlan, hidden: Tensor, calls: Sequence[Mapping[str, Any]], decoder: bool, was_read: bool
    ) -> None:
        self.plan, self.calls, self.decoder, self.was_read = plan, calls, decoder, was_read
        self.hidden = hidden if plan.layout_known else hidden.clone()  # the block may change them in place
        self.assumes_layout = plan.layout_known
        self.mask: PaddingArgument | None = None  # the argument that says which tokens are padding
        self.doubtful: str | None = None  # the name of a mask that may be meant either way
        self._find_mask()

    @property
    def settled(self) -> bool:
        """True if the layout is known, and the mask is found and means one thing."""
        return self.assumes_layout and (self.mask is None or self.mask.opposite is None)

    def attention_seen(self, attention: AttentionCall) -> None:
        """Take what attention of a block's tokens to themselves shows."""
        plan = self.plan
        raw = None if plan.layout_known else exchanged(self.hidden, plan.layout)
        if raw is not None and (layout := layout_in_attention(raw.shape, attention.sizes)) is not None:
            if layout != plan.layout and self.was_read:
                came = f"attention shows that they are {layout}: give layout={layout!r}"
                raise WatchError(f"hidden states were read as {plan.layout}; {came}", subject="layout")
            plan.layout, plan.layout_known, self.assumes_layout = layout, True, True
            self.hidden = exchanged(raw, layout)
            self._find_mask()
        if self.mask is not None and self.mask.opposite is not None:
            hidden = attention.hidden_tokens()
            if hidden is None or hidden.shape == self.mask.padding.shape:
                self.mask = self.mask.settled_by(hidden) or self.mask

    def give_up(self) -> None:
        """Take the layout to be as assumed, and a mask that may mean either for none."""
        self.assumes_layout = True
        self._find_mask()
        if self.mask is not None and self.mask.opposite is not None:
            self.doubtful, self.mask = self.mask.name, None

    def begin(self) -> Tensor:
        """Give the hidden states away, to be read: their shape is what may still be asked for, to learn the layout."""
        hidden, self.was_read = self.hidden, True
        if not self.plan.layout_known:
            self.hidden = hidden.new_empty(()).expand(hidden.shape)
        else:
            del self.hidden
        return hidden

    def _find_mask(self) -> None:
        single = not len(self.hidden) or self.hidden.shape[1] == 1
        if self.mask is None and self.assumes_layout and self.plan.padding_from_model and not single:
            self.mask = find_padding(self.calls[:-1], self.calls[-1], self.hidden.shape[:2], self.decoder)
            if not self.settled:
                self.hidden = self.hidden.clone()
