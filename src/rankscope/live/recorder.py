"""What is seen of a running model, reduced to numbers where it is seen.

The hooks tell the recorder what happens, in order: a call of the model begins; a block is entered and left;
inside it attention happens; the call ends. The recorder numbers layers and samples, reads the metrics on the
device where the tensors are, and keeps only the readings; copies of small states wait until they are asked
about, since reading many is cheaper in one go. Layers are numbered by the order of calls within
one call of the model, so that one module called twelve times is twelve layers. Nothing of a call that failed
is kept.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attending import Attending
from rankscope.live.call import Call, Plan
from rankscope.live.chain import Chain
from rankscope.live.functions import Functions
from rankscope.live.mask import arguments_of, continues_from_cache, find_padding
from rankscope.live.reading import arithmetic_of, dropout_of, read_state, read_waiting
from rankscope.live.routing import Routing
from rankscope.live.sizes import Sizes
from rankscope.live.states import fitting_in, states_in
from rankscope.metrics.tokens import real_tokens, unit_of
from rankscope.profiles.rows import Found

CACHED = "it went on from a cache"
WAITING = 2**20
"""Entries of small states that wait, some megabytes, until they are asked about or so many have come."""
CHUNK = "its tokens looked at more than themselves, as a chunk that goes on from a cache does"


class Recorder(Attending, Routing):
    """Follows a model through its calls."""

    def __init__(self, plan: Plan, blocks: Sequence[nn.Module]) -> None:
        self.plan = plan
        self.blocks = blocks
        self.position = {id(block): k for k, block in reversed(list(enumerate(blocks)))}
        self.call: Call | None = None
        self.functions: Functions | None = None
        """On while a block runs, where attention is seen through torch's functions."""
        self.depth = 0
        self.calls = 0
        self.samples = 0
        self._found: list[tuple[int, int, Found]] = []
        self._sizes: list[tuple[int, Sizes]] = []
        """(first sample, sizes of states from which nothing was read yet)"""
        self._ended: list[tuple[int, Call]] = []
        """(first sample, a call that ended well and whose last states wait to be read)"""
        self._broken: list[tuple[int, Tensor]] = []
        self.defects: list[Tensor] = []
        self.padded: list[Tensor] = []
        self.fired: Counter[int] = Counter()
        self.attended: set[int] = set()
        self.left_out: Counter[str] = Counter()
        self.others = 0
        self.elsewhere = 0
        self.outside = 0
        self.between: set[int] = set()
        """Layers whose state the next block did not take as it was."""
        self.unsure: set[int] = set()
        """Layers of which nothing said which of several tensors is the state."""
        self.masks: set[str | None] = set()
        """The arguments that said which tokens are padding."""
        self.modes: set[str] = set()
        self.dropout = 0.0
        self.arithmetic: torch.dtype | None = None
        self.narrow = False
        """Whether a model in float64 computed attention in float32."""
        self.kept: defaultdict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    @property
    def found(self) -> list[tuple[int, int, Found]]:
        """(layer, first sample, readings)"""
        self._read_ended()
        sizes, self._sizes = self._sizes, []
        for start, each in sizes:
            self._found += [(layer, start, found) for layer, found in each.read(self.plan.metrics)]
        return self._found

    @property
    def broken(self) -> list[tuple[int, Tensor]]:
        """(layer, whether some entry was no number)"""
        self._read_ended()
        return self._broken

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool = False
    ) -> None:
        """A call begins, of the model or, `alone`, of a part of it around the blocks (an encoder, in
        generation). A call inside a call belongs to it; one in a backward pass is made again, and not new."""
        if not self.depth and torch._C._current_graph_task_id() != -1:
            return
        self.depth += 1
        arguments = arguments_of(model, args, kwargs)
        if self.depth > 1:
            if self.call is not None and self.call.shape is None:
                self.call.around.append(arguments)
            return
        self.calls += 1
        if continues_from_cache(arguments):
            self.left_out[CACHED] += 1
        elif self.plan.trained and not model.training:
            self.left_out["it was not in train mode"] += 1
        else:
            self.call = Call(arguments, alone)

    def end(self, failed: bool) -> None:
        """The call ended: what was read of it counts."""
        if not self.depth:
            return
        self.depth -= 1
        if self.depth:
            return
        self._off()
        call, self.call = self.call, None
        if failed:
            self.left_out["it failed"] += 1
        elif call is not None:
            self._take(call)

    def reset(self) -> None:
        """Forget a call that was interrupted: torch calls no hook while KeyboardInterrupt passes."""
        if self.depth:
            self.left_out["it was interrupted"] += 1
        self.depth, self.call = 0, None
        self._off()

    def _off(self) -> None:
        if self.functions is not None:
            self.functions.close()

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is called: the first block's input is layer 0."""
        if self.call is None:
            self.outside += not self.depth
            return
        call = self.call
        call.layer = max(call.layer + 1, self.position[id(block)] + 1)
        given = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        states = self._states(given, f"what {type(block).__name__} takes", call.shape is None)
        call.inside.append(call.layer)
        call.took.append(states[0].shape if states else None)
        if call.shape is not None:
            place = call.chain.continues(states)
            if len(call.inside) == 1:
                self._settle(call, call.chain.takes(states))
            self._follow(given, place)
            return
        state = states[0]
        if not len(state) or state.shape[1] == 1:
            self.left_out["it had a single token" if len(state) else "it had no samples"] += 1
            self.call = None
            return
        self._start(call, state, arguments_of(block, args, kwargs))
        read_state(self.plan, call, 0, state)
        self._follow(given, 0)

    def _follow(self, given: tuple[Any, ...], place: int) -> None:
        """The block's state, through what it calls."""
        if self.functions is not None:
            self.functions.start(fitting_in(given, self.plan.grid)[place : place + 1])

    def leave(self, block: nn.Module, output: Any, failed: bool) -> None:
        """A block has returned: its output is its layer's state."""
        if self.call is None or not self.call.inside:
            return
        call = self.call
        unused = [] if self.functions is None else self.functions.stop()
        if not failed and call.shape is not None:
            self.unused(unused)
        layer, took = call.inside.pop(), call.took.pop()
        if failed:
            return
        call.fired.append(layer)
        call.projection = None
        if call.spoken is not None:
            raise WatchError(
                f"what each head adds needs the output projection; no Linear or Conv1D of "
                f"{type(block).__name__} was called on the heads' outputs as they are: watch metrics of "
                "tokens or attention"
            )
        states = self._states(output, f"what {type(block).__name__} returns", self.plan.measures(layer))
        state = call.chain.gives(layer, states, took)
        if state is not None:
            read_state(self.plan, call, layer, state)

    def _states(self, found: object, where: str, needed: bool) -> list[Tensor]:
        """What could be a state; none where that does not matter."""
        try:
            return states_in(found, self.plan.layout, where, self.plan.grid)
        except WatchError:
            if needed:
                raise
            return []

    def _settle(self, call: Call, open_one: tuple[int, Tensor] | None) -> None:
        """Read a state that waited for the next block to say which tensor it is."""
        if open_one is not None:
            read_state(self.plan, call, *open_one)

    def _start(self, call: Call, state: Tensor, block_arguments: dict[str, Any]) -> None:
        """The first state of a call says its samples, its padding and its arithmetic."""
        call.shape = state.shape[:2]
        padding = self.plan.padding
        if padding is None and self.plan.own_padding:
            calls = [call.arguments, *call.around]
            decoder = self.plan.decoder and not call.alone  # called by itself it has no other side
            found = find_padding(calls, block_arguments, call.shape, decoder)
            padding, call.mask = (None, None) if found is None else found
        call.real[state.device] = real_tokens(call.shape, padding, state.device)
        call.whole = padding is None
        arithmetic = arithmetic_of(self.blocks, state)
        if self.arithmetic not in (None, arithmetic):
            raise WatchError(
                f"a watch measures in one arithmetic; the model ran in {self.arithmetic} and now in "
                f"{arithmetic}: use a second watch"
            )
        self.arithmetic = arithmetic
        call.unit = unit_of(arithmetic)
        training = any(block.training for block in self.blocks)
        self.modes.add("train" if training else "eval")
        if training:
            self.dropout = max(self.dropout, *map(dropout_of, self.blocks))

    def _take(self, call: Call) -> None:
        """Count a call that ended well."""
        if call.shape is None:
            return
        if call.longer and not call.attended and self.attended:
            self.left_out[CHUNK] += 1
            return
        if (self.plan.wants("attention") or self.plan.wants("heads")) and not call.attended:
            came = call.elsewhere or [f"attention of shape {each}" for each in call.unfit] or ["none"]
            where = ""
            if self.functions is not None and not call.elsewhere:
                where = (
                    ": it is seen in Hugging Face models, nn.MultiheadAttention, a softmax written out and "
                    "torch's own functions, not in kernels of other packages"
                )
            raise WatchError(
                f"attention of the blocks' {tuple(call.shape)} tokens to themselves was asked for; {came[0]} "
                f"came through{where}: watch metrics of tokens"
            )
        self.check_routed(call)
        self._settle(call, call.chain.ends())
        call.chain.check("blocks found in it" if self.plan.found else "blocks named")
        self.between.update(call.chain.broken)
        self.unsure.update(call.chain.unsure)
        self.masks.add(call.mask)
        call.arguments, call.around, call.chain = {}, [], Chain()  # which hold tensors of the model
        self._ended.append((self.samples, call))
        if sum(state.numel() for _, each in self._ended for _, state in each.waiting) >= WAITING:
            self._read_ended()
        self.defects += call.defects
        self.fired.update(call.fired)
        self.attended.update(call.attended)
        self.others += call.others
        self.elsewhere += len(call.elsewhere)
        self.samples += call.shape[0]
        if not call.whole:
            self.padded.append((~next(iter(call.real.values()))).sum())
        for what, layer, x in call.kept:
            self.kept[what][layer].append(x)

    def _read_ended(self) -> None:
        """Read what waits."""
        ended, self._ended = self._ended, []
        for start, call in ended:
            read_waiting(self.plan, call)
            self._found += [(layer, start, found) for layer, found in call.found]
            if call.sizes is not None:
                call.sizes.room = None
                self._sizes.append((start, call.sizes))
            self._broken += call.broken
