"""What is known of one call of a model while it runs, and what all calls of a watch add up to.

`recorder.py` makes a `ModelCall` for each call, gives it `CallReadings` when its first block is entered, and
adds it to the `WatchTotals` when it ended well. `watch.py` and `notes.py` read the totals.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.live.attention_readings import AttentionReadings
from rankscope.live.chain import BlockChain
from rankscope.live.routing import RoutingReadings
from rankscope.live.state_norms import StateNorms
from rankscope.live.state_readings import StateReadings, TokenBatch
from rankscope.metrics import Metric
from rankscope.profiles.readings import Readings

WAITING = 2**20
"""Entries of small states of calls that ended, some megabytes, up to which they wait to be read together."""


class OpenBlock(NamedTuple):
    """A block that was entered and not yet left."""

    layer: int
    shape: torch.Size | None  # the shape of the hidden states that it took


class CallReadings(NamedTuple):
    """What is read of one call, made when its first hidden states are known."""

    batch: TokenBatch
    states: StateReadings
    attention: AttentionReadings
    routing: RoutingReadings


class ModelCall:
    """One call of the model, or, `alone`, of a module around the blocks by itself, while it runs."""

    def __init__(self, arguments: Mapping[str, Any], alone: bool) -> None:
        self.arguments = [arguments]  # of the model and of the modules around the blocks, from the outside in
        self.alone = alone
        self.layer = 0  # the layer entered last
        self.open: list[OpenBlock] = []
        self.left: list[int] = []  # layers whose block has returned
        self.chain = BlockChain()
        self.mask: str | None = None  # the argument that said which tokens are padding
        self.readings: CallReadings | None = None


class WatchTotals:
    """What was measured in all calls of a watch that ended well, and what was noticed."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self.calls = self.samples = 0
        self.calls_left_out: Counter[str] = Counter()  # by the reason
        self.calls_per_layer: Counter[int] = Counter()
        self.blocks_outside = 0  # calls of blocks outside a call of the model
        self.layers_with_attention: set[int] = set()
        self.later_attention = 0  # after the first of a block
        self.other_attention = 0  # not of a block's tokens to themselves
        self.row_sum_defects: list[Tensor] = []
        self.float32_inside = False  # a model in float64 computed attention in float32
        self.padded_tokens: list[Tensor] = []
        self.masks: set[str | None] = set()  # the arguments that said which tokens are padding
        self.broken_links: set[int] = set()  # layers that the next block did not take as they were
        self.unsure_layers: set[int] = set()  # layers of which several tensors could be the hidden states
        self.modes: set[str] = set()
        self.dropout = 0.0
        self.arithmetic: torch.dtype | None = None
        self.kept: dict[str, dict[int, list[Tensor]]] = {
            "states": defaultdict(list),
            "attention": defaultdict(list),
        }
        self._readings: list[tuple[int, int, Readings]] = []
        self._broken: list[tuple[int, Tensor]] = []
        # With the first sample of their call: states, and norms, from which nothing was read yet.
        self._ended: list[tuple[int, StateReadings]] = []
        self._norms: list[tuple[int, StateNorms]] = []

    @property
    def readings(self) -> list[tuple[int, int, Readings]]:
        """(layer, first sample, readings) of all calls."""
        self._flush()
        norms, self._norms = self._norms, []
        for start, call_norms in norms:
            self._readings += [(layer, start, rows) for layer, rows in call_norms.readings(self.metrics)]
        return self._readings

    @property
    def broken_states(self) -> list[tuple[int, Tensor]]:
        """(layer, whether some entry of its hidden states was NaN or infinite)"""
        self._flush()
        return self._broken

    def add(self, call: ModelCall, readings: CallReadings) -> None:
        """Count a call that ended well."""
        attention = readings.attention
        self.broken_links.update(call.chain.broken)
        self.unsure_layers.update(call.chain.unsure)
        self.masks.add(call.mask)
        self.calls_per_layer.update(call.left)
        self.row_sum_defects += attention.defects
        self.layers_with_attention.update(attention.layers)
        self.later_attention += attention.later
        self.other_attention += len(attention.left_out)
        self.float32_inside |= attention.float32_inside
        self._ended.append((self.samples, readings.states))
        if sum(states.waiting_entries for _, states in self._ended) >= WAITING:
            self._flush()
        self.samples += readings.batch.shape[0]
        if not readings.batch.all_valid:
            self.padded_tokens.append(readings.batch.padded_tokens)
        for name, kept in (("states", readings.states.kept), ("attention", attention.kept)):
            for layer, x in kept:
                self.kept[name][layer].append(x)

    def _flush(self) -> None:
        """Read the hidden states that wait."""
        ended, self._ended = self._ended, []
        for start, states in ended:
            states.flush()
            self._readings += [(layer, start, rows) for layer, rows in states.readings]
            if states.norms is not None:
                states.norms.buffer = None
                self._norms.append((start, states.norms))
            self._broken += states.broken
