"""One call of a model while it is measured, and the totals of all calls of a watch.

`call_follower.py` makes a `ModelCall` when a call begins. Two things may be open when its first block is entered: which
axis of the hidden states counts tokens (`layout`), if neither torch nor transformers wrote the blocks, and which way
round a mask is meant. Attention in the block shows both: it mixes tokens, and hides padding. So what the first block
takes is held as a `FirstInput` until `settled`, at the latest until the block is left. Then `CallReadings` are made,
and when the call has ended well, the `WatchTotals` take them: `stack_watch.py`, `notes.py` and `monitor/inline.py` read
those.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attention import AttentionCall
from rankscope.live.attention.torch_functions import FunctionTracer
from rankscope.live.attention_readings import AttentionReadings
from rankscope.live.hidden_states import BlockChain, exchanged, layout_in_attention
from rankscope.live.padding import PaddingArgument, find_padding
from rankscope.live.plan import KEPT, WatchPlan
from rankscope.live.state_readings import RoutingReadings, StateReadings, TokenBatch
from rankscope.metrics import Metric, Reading
from rankscope.profiles import Readings

TOGETHER = 2**8  # calls whose readings are packed together
WAITING = 2**20  # entries of small states, some megabytes, that wait to be read together after their calls


def mask_in_doubt(name: str) -> str:
    """The sentence on a mask of this name that was left out, since it may be meant either way."""
    either = f"{name} may be True at tokens or at padding, and nothing showed which"
    return f"{either}: every token counts; padding= or attention_mask= says it"


class CallReadings(NamedTuple):
    """What is read of one call, made when its first hidden states are known."""

    batch: TokenBatch
    states: StateReadings
    attention: AttentionReadings
    routing: RoutingReadings


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
                received = f"attention shows that they are {layout}: give layout={layout!r}"
                raise WatchError(f"hidden states were read as {plan.layout}; {received}", subject="layout")
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


class ModelCall:
    """One call of the model, or, `alone`, of a module around the blocks by itself, while it runs."""

    def __init__(self, arguments: Mapping[str, Any], alone: bool) -> None:
        self.arguments = [arguments]  # of the model and of the modules around the blocks, from the outside in
        self.announced = True  # a hook around the blocks has seen that it begins: blocks that come again are layers
        self.alone = alone  # a module around the blocks was called by itself, not by the model
        self.layer = 0  # the layer entered last
        self.order: list[int] = []  # the blocks that were called, by their places in the plan, from 1
        self.first: FirstInput | None = None  # what the first block took
        self.left_out = False  # found to be a call that is not measured, after its first block was entered
        self.open: list[tuple[int, torch.Size | None]] = []  # layers entered and not left, shapes they took
        self.beside: list[Tensor] = []  # of other shapes than the hidden states, returned by the last block
        self.left: list[int] = []  # layers whose block has returned
        self.chain = BlockChain()  # follows the hidden states from block to block
        self.mask: str | None = None  # the argument that said which tokens are padding
        self.readings: CallReadings | None = None  # until the first block is entered
        self.blocks: dict[int, nn.Module] = {}  # by layer, those that were entered
        self.failure: Exception | None = None  # the first error, where it has to wait for the end of the call
        # Follows attention while something is open that it shows; `nn.MultiheadAttention` is hooked anyway.
        self.tracer: FunctionTracer | None = None

    def values(self) -> list[Any]:
        """All arguments of the model and of the modules around the blocks."""
        return [value for arguments in self.arguments for value in arguments.values()]


class PackedReadings:
    """The readings of many calls as one tensor of numbers on the CPU; each small tensor would take a kilobyte."""

    def __init__(self, readings: Sequence[tuple[int, int, Readings]]) -> None:
        layouts: dict[Any, Any] = {}  # each is kept once
        self._rows: list[tuple[int, int, tuple[tuple[Metric, torch.Size], ...]]] = []
        parts: list[Tensor] = []
        for layer, start, rows in readings:
            layout = tuple((metric, reading.value.shape) for metric, reading in rows)
            self._rows.append((layer, start, layouts.setdefault(layout, layout)))
            parts += [x.flatten() for _, of in rows for x in (of.value, of.log10, of.floor)]
        alike = len({x.device for x in parts}) == 1  # then one copy brings all of them
        self._numbers = torch.cat(parts if alike else [x.cpu() for x in parts]).cpu() if parts else torch.zeros(0)

    def rows(self) -> Iterator[tuple[int, int, Readings]]:
        """(layer, first sample, readings) of all calls, as they were."""
        at = 0
        for layer, start, layout in self._rows:
            readings: Readings = []
            for metric, shape in layout:
                numbers = self._numbers[at : at + 3 * shape.numel()].view(3, *shape)
                readings.append((metric, Reading(*numbers.unbind())))
                at += numbers.numel()
            yield layer, start, readings


class WatchTotals:
    """What was measured in all calls of a watch that ended well, and what was noticed."""

    def __init__(self) -> None:
        self.calls = self.samples = 0
        self.calls_left_out: Counter[str] = Counter()  # by reason
        self.calls_per_layer: Counter[int] = Counter()
        self.blocks_outside = 0  # calls of blocks outside a call of the model
        self.layers_with_attention: set[int] = set()
        self.later_attention = 0  # after the first of a block
        self.other_attention = 0  # not of a block's tokens to themselves
        self.row_sum_defects: list[Tensor] = []  # how far rows of attention are from summing to one, at most
        self.float32_inside = False  # a model in float64 computed attention in float32
        self.last_batch: TokenBatch | None = None  # the tokens of the last call
        self.padded_tokens: list[Tensor] = []  # their numbers, which are to be added up
        self.masks: set[str | None] = set()  # the arguments that said which tokens are padding
        self.broken_links: set[int] = set()  # layers whose output is not the input of the next block
        self.unsure_layers: set[int] = set()  # layers of which several tensors could be the hidden states
        self.doubtful_masks: set[str] = set()  # arguments that may be True at tokens or at padding
        self.orders: set[tuple[int, ...]] = set()  # of the blocks, where they were called in another than the plan's
        self.modes: set[str] = set()  # train or eval
        self.dropout = 0.0  # the largest rate that was active
        self.arithmetic: torch.dtype | None = None
        self.kept: dict[str, dict[int, list[Tensor]]] = {of: defaultdict(list) for of in KEPT}
        self._readings: list[tuple[int, int, Readings]] = []  # (layer, first sample, readings)
        self._packed: list[PackedReadings] = []  # those of earlier calls
        self._broken: list[tuple[int, Tensor]] = []  # (layer, whether its states hold NaN or infinity)
        self._ended: list[tuple[int, StateReadings]] = []  # (first sample of a call, its states, not read yet)
        self._waiting_entries = 0  # of these states

    @property
    def valid(self) -> Tensor:
        """`[batch, token]` of the last call, False at padding; of no call, no token."""
        batch = self.last_batch
        return torch.zeros(0, 0, dtype=torch.bool) if batch is None else batch.valid_on(batch.device)

    @property
    def readings(self) -> list[tuple[int, int, Readings]]:
        """(layer, first sample, readings) of all calls."""
        self._read_ended()
        return [row for packed in self._packed for row in packed.rows()] + self._readings

    @property
    def broken_states(self) -> list[tuple[int, Tensor]]:
        """(layer, whether some entry of its hidden states was NaN or infinite)"""
        self._read_ended()
        return self._broken

    def add(self, call: ModelCall, readings: CallReadings) -> None:
        """Count a call that ended well."""
        attention, states, layer_number = readings.attention, readings.states, readings.states.number
        self.broken_links.update(map(layer_number, call.chain.broken))
        self.unsure_layers.update(map(layer_number, call.chain.unsure))
        self.masks.add(call.mask)
        self.calls_per_layer.update(map(layer_number, call.left))
        self.row_sum_defects += attention.defects
        self.layers_with_attention.update(map(layer_number, attention.layers))
        self.later_attention += attention.later
        self.other_attention += len(attention.left_out)
        self.float32_inside |= attention.float32_inside
        self._ended.append((self.samples, states))
        self._waiting_entries += states.waiting_entries
        if self._waiting_entries >= WAITING or len(self._ended) >= TOGETHER:
            self._read_ended()
        self.samples += readings.batch.shape[0]
        self.last_batch = readings.batch
        if not readings.batch.all_valid:
            self.padded_tokens.append((~self.valid).sum())
        for name, kept in (("states", states.kept), ("attention", attention.kept), ("embeddings", states.means)):
            for layer, x in kept:
                self.kept[name][layer_number(layer)].append(x)

    def _read_ended(self) -> None:
        """Read the hidden states that wait."""
        ended, self._ended, self._waiting_entries = self._ended, [], 0
        for start, states in ended:
            self._readings += [(layer, start, rows) for layer, rows in states.all_readings()]
            self._broken += [(states.number(layer), broken) for layer, broken in states.broken]
        if len(ended) >= TOGETHER or len(self._readings) >= TOGETHER * max(1, len(self.calls_per_layer)):
            self._pack()

    def _pack(self) -> None:
        """Keep what was read so far in fewer and smaller objects."""
        if self._readings:
            self._packed.append(PackedReadings(self._readings))
        self._readings = []
        broken: dict[int, Tensor] = {}
        for layer, x in self._broken:
            broken[layer] = x | broken[layer].to(x.device) if layer in broken else x
        self._broken = list(broken.items())
        for numbers, joined in ((self.row_sum_defects, torch.amax), (self.padded_tokens, torch.sum)):
            if numbers:
                numbers[:] = [joined(torch.stack([x.to(numbers[0].device) for x in numbers]), 0)]
