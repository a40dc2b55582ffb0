"""How the calls of a running model are followed: `CallFollower` turns what hooks see into readings.

Hooks of the model, of the modules around its blocks and of the blocks (`block_hooks`), the observer of attention and
the hooks on routers report to one `CallFollower`. `StackWatch` attaches them for a watch; `monitor/inline.py` has its
own, for training batches, which also report out of compiled code.

| event | what happens |
|---|---|
| `begin_call`, `announce_call` | a `ModelCall` (`model_call.py`) is made, unless the call is not to be measured |
| `enter_block` | the layer gets its number; the first block's input is layer 0, read when it is known how |
| `on_attention`, `on_contributions` | `attention_readings.py` reads metrics |
| `on_module_output` | `state_readings.py` reads metrics, if the module is a router |
| `leave_block`, `block_passed` | what the block returned is hidden states: `state_readings.py` reads metrics |
| `end_call`, `end_announced` | what was read of the call is checked and added to the `WatchTotals`, unless it failed |

Layers are numbered by the order of calls within one call of the model, so that one module called twelve times
is twelve layers; a block that is passed over leaves its number out.

A watch measures one call at a time: a call that begins in another thread meanwhile is left out, with all of its
events. Training batches are measured in every thread, `in_passing`: nothing of the model is replaced meanwhile, and a
call whose begin no hook has seen (`model.features(x)` in place of `model(x)`) begins with its first block.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import RLock, Thread, current_thread
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live.attention import AttentionCall, WatchedBlocks
from rankscope.live.attention.head_outputs import OutputProjectionFinder, PartOfSum
from rankscope.live.attention.multihead import attention_call, multihead_modules
from rankscope.live.attention.torch_functions import FunctionTracer
from rankscope.live.attention_readings import AttentionReadings
from rankscope.live.hidden_states import candidates_in, continuation, hidden_states_in, rows_and_columns, sizes_in
from rankscope.live.model_call import CallReadings, FirstInput, ModelCall, WatchTotals, mask_in_doubt
from rankscope.live.modules import BlockListener, own_parameters
from rankscope.live.padding import CallArguments, arguments_of, continues_from_cache
from rankscope.live.plan import WatchPlan
from rankscope.live.processes import TensorParallel, in_trial_of_stage, refuse_context_parallel, token_counts
from rankscope.live.state_readings import (
    RoutingReadings,
    StateReadings,
    TokenBatch,
    arithmetic_of,
    dropout_of,
    routing_in,
)

CACHED = "it went on from a cache"
EVALUATION = "it was in eval mode, as an evaluation"
CHUNK = "its tokens looked at more than themselves, as a chunk that goes on from a cache does"
MEANWHILE = "it ran in another thread while a call was measured"
_CALL = nn.Module._call_impl.__code__  # runs the hooks of a module, and its forward


def event(method: Callable[..., None]) -> Callable[..., None]:
    """A method that hooks call: if errors are contained, the first is kept as `failure`, and no event counts after.
    Other processes that share the model wait for this one: an error is raised when the call ends, in all of them."""

    @wraps(method)
    def contained(self: "CallFollower", *args: Any, **kwargs: Any) -> None:
        try:
            if self.recording and self.failure is None:
                method(self, *args, **kwargs)
        except Exception as error:
            if self.plan.tensor_parallel is not None and self.call is not None:
                self.call.failure = self.call.failure or error
                return
            if not self.contained:
                raise
            self.failure = error
            self._forget_call()

    return contained


def in_backward() -> bool:
    """True inside a backward pass, where activation checkpointing makes forward passes again."""
    return torch._C._current_graph_task_id() != -1


def _times_running(model: nn.Module) -> int:
    """How many calls of a model run in this thread, one inside the other."""
    frame, count = sys._getframe(), 0
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        count += frame.f_code is _CALL and frame.f_locals["self"] is model
    return count


class CallFollower:
    """Follows a model through its calls, and adds up what is read of them in `totals`.

    Args:
        plan: What is read.
        blocks: The model and its blocks.
        modules: All modules in the blocks.
        contained: Whether errors are kept as `failure`, so that the calls of the model do not see them.
        in_passing: Whether calls are measured in all threads, and also where no hook has seen that they begin.
    """

    def __init__(
        self, plan: WatchPlan, blocks: WatchedBlocks, modules: Sequence[nn.Module], contained: bool = False,
        in_passing: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.blocks, self.modules = plan, blocks, modules
        self.contained, self.in_passing = contained, in_passing
        self.projections: OutputProjectionFinder | None = None
        if plan.wants("heads"):  # else not: with the follower it is a cycle, whose tensors Python frees later
            self.projections = OutputProjectionFinder(self.on_contributions, plan.tensor_parallel)
        self.multihead = multihead_modules(modules)
        self.read_before = False  # hidden states were read in the plan's layout before `restart`
        self._turn = RLock()  # held where a call begins or ends: threads count their calls side by side
        self.restart()

    def restart(self, recording: bool = True) -> None:
        """Forget what was read, and follow the calls that begin from now on, if they are to be recorded."""
        self.recording = recording
        self.failure: Exception | None = None  # the first error that was contained
        self.totals = WatchTotals()
        self._trained = False  # a training batch was read in train mode
        # Calls that are being measured, by the thread that they run in; None for one of which nothing more is read.
        self._calls: dict[Thread, ModelCall | None] = {}
        self._made_in = current_thread()
        self._stopping = False  # no call is to begin
        self._depths: Counter[Thread] = Counter()  # by thread: calls of the model and around its blocks that run
        self._weights = own_parameters(self.modules) if recording else []  # of all modules in the blocks

    @property
    def call(self) -> ModelCall | None:
        """The call that is being measured in this thread; None if there is none."""
        return self._calls.get(current_thread())

    @property
    def has_read(self) -> bool:
        """True if something was read, also of a call that has not ended."""
        return bool(self.totals.samples) or any(call and call.readings for call in self._calls.values())

    def runs_elsewhere(self) -> bool:
        """True while a call is measured that runs in another thread."""
        return any(thread is not current_thread() and thread.is_alive() for thread in list(self._calls))

    @event
    def begin_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool) -> None:
        """Begin a call of the model, or, `alone`, of a module around the blocks; a call inside a call is part of it."""
        thread = current_thread()
        arguments = arguments_of(model, args, kwargs)
        arguments.of_encoder_too = model in self.plan.around_both
        with self._turn:
            if self._depths[thread] and not alone and _times_running(model) == 1:
                self._drop_interrupted()
            if not self._depths[thread] and in_backward():  # a backward pass repeats a call
                return
            self._depths[thread] += 1
            if self._depths[thread] > 1:
                if self.call is not None and self.call.readings is None:
                    self.call.arguments.append(arguments)
                return
            self._begin(ModelCall(arguments, alone), model.training, torch.is_grad_enabled())

    @event
    def announce_call(self, arguments: CallArguments, training: bool, grad: bool) -> None:
        """Begin a call whose end no hook will see: the next one of this thread ends it, or `end_announced`. Where hooks
        have seen it begin, nothing happens.

        Args:
            arguments: As much as is known of what a module around the blocks was called with.
            training: Whether it is in train mode.
            grad: Whether it computes gradients.
        """
        if not self._depths[current_thread()] and not in_backward():
            with self._turn:
                self._begin(ModelCall(arguments, alone=False), training, grad)

    def _begin(self, call: ModelCall, training: bool, grad: bool) -> None:
        """Measure a call, in train mode or not, with gradients or not, unless there is a reason to leave it out."""
        thread = current_thread()
        if thread in self._calls:  # that was announced
            self._finish(self._forget_call(), failed=False)
        self.totals.calls += 1
        why, evaluates = None, not training and (self._trained or thread is not self._made_in)
        if continues_from_cache(call.arguments[0]):
            why = CACHED
        elif self.plan.training_only and not grad:
            why = "it computed no gradients"
        elif self.plan.training_only and in_trial_of_stage():
            why = "it was torch's trial of a pipeline stage"
        elif self.plan.training_only and evaluates:
            why = EVALUATION
        elif self._stopping or (not self.in_passing and self.runs_elsewhere()):
            why = MEANWHILE
        if why is not None:
            self.totals.calls_left_out[why] += 1
            call.left_out = True
        else:
            refuse_context_parallel()
        if why is None or self.in_passing:  # in a watch, of calls side by side that is the measured one's
            self._calls[thread] = call
        if why is None and self.projections is not None:
            self.projections.reset()
        if why is None and self.plan.training_only and training and not self._trained:
            # Forget what was read in eval mode: in a step with calls in train mode those are the training batches.
            before, self.totals, self._trained = self.totals, WatchTotals(), True
            self.totals.calls, self.totals.calls_left_out = before.calls, before.calls_left_out
            if before.samples:
                self.totals.calls_left_out[EVALUATION] += 1

    def end_call(self, failed: bool) -> None:
        """End a call. Only the end of the outermost one counts: what was read is added, unless that call failed. If
        none was begun, as where a backward pass repeats one, nothing happens."""
        thread = current_thread()
        with self._turn:
            if not self._depths[thread]:
                return
            self._depths[thread] -= 1
            if self._depths[thread]:
                return
            del self._depths[thread]
        try:
            self._finish(self._forget_call(), failed)
        finally:
            self._calls.pop(thread, None)

    @event
    def guarded(self, read: Callable[[], object]) -> None:
        """Read something else of a call; errors are contained as in the events."""
        read()

    @event
    def end_announced(self) -> None:
        """End all calls whose end no hook has seen."""
        for thread in [thread for thread in self._calls if not self._depths[thread]]:
            self._finish(self._calls.pop(thread), failed=False)

    @event
    def _finish(self, call: ModelCall | None, failed: bool) -> None:
        """Add what was read of a call that has ended."""
        if call is None or call.left_out:  # and counted before
            return
        if failed:
            self.totals.calls_left_out["it failed"] += 1
            return
        readings, together = call.readings, self.plan.tensor_parallel
        if readings is not None and call.failure is None:
            try:
                readings.attention.finish()
            except WatchError as error:
                if together is None:
                    raise
                call.failure = error  # raised in all processes that share the model
        if together is not None:
            self._join_processes(call, together)
        if readings is not None:
            with self._turn:
                self._check_and_add(call, readings)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """A context for attaching hooks one after another: a call that runs in another thread meanwhile is seen by some
        of them only, so it is not measured, and nothing waits for its end."""
        self._stopping = True
        try:
            yield
        finally:
            with self._turn:
                self._depths.clear()
                self._stopping = False

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A context in which no call is measured. A call of another thread is waited for; a call of this thread that
        still counts as running was interrupted (torch calls no hook while KeyboardInterrupt passes) and is left out."""
        self._stopping, waits = True, True
        while waits:
            sleep(0.001 * self.runs_elsewhere())
            with self._turn:  # a call that is just beginning is seen
                waits = self.runs_elsewhere()
        self._drop_interrupted()
        self._depths.clear()
        try:
            yield
        finally:
            self._depths.clear()
            self._stopping = False

    def _drop_interrupted(self) -> None:
        """Forget a call of this thread that was interrupted: its end was not seen."""
        if self.call is not None and not self.call.left_out:
            self.totals.calls_left_out["it was interrupted"] += 1
        self._depths.pop(current_thread(), None)
        self._forget_call()
        self._calls.pop(current_thread(), None)

    def _number_layer(self, call: ModelCall, position: int, block: nn.Module) -> None:
        """Give the layer that begins with this block its number."""
        call.order.append(position)
        call.layer = max(call.layer + 1, position)
        call.blocks[call.layer], self.plan.called[call.layer] = block, position

    @event
    def enter_block(
        self, position: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool = False
    ) -> None:
        """Enter a block: its layer gets a number, and what the first block takes is layer 0.

        Args:
            position: The first place of the block in the plan, from 1.
            block: The block.
            args, kwargs: What it is called with.
            compiled: Whether compiled code reports it, in which nobody sees attention.
        """
        call, unseen = self.call, not self._depths[current_thread()]
        if self.in_passing and unseen:  # no hook has seen that a call begins
            over = call is None or (position == 1 and not call.announced and call.layer >= len(self.plan.blocks))
            if over and current_thread() is self._made_in:  # another thread may be in the midst of an evaluation
                self.announce_call(CallArguments(), block.training, grad=True)
                if (call := self.call) is not None:
                    call.announced = False
        if call is None or call.left_out or (unseen and in_backward()):
            self.totals.blocks_outside += unseen
            return
        self._number_layer(call, position, block)
        taken = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        for x in call.beside:
            if call.readings is not None and any(x is y for y in taken):
                read = f"{call.readings.batch.shape[1]} tokens of each sample were measured, not the {x.shape[-2]}"
                self.plan.remarks[f"Blocks hand on two streams of tokens: {read} of width {x.shape[-1]}"] = None
        before, alone = call.chain.held, not call.open and self.plan.tensor_parallel is None
        if handed_on := alone and bool(taken) and call.chain.handed_on(taken[0]):
            states = [taken[0]]
        else:
            states = self._hidden_states(taken, f"what {type(block).__name__} takes", needed=call.readings is None)
        if self.plan.tensor_parallel is not None:
            if call.first is None:
                self.plan.tensor_parallel.begin_call(states[0], token_counts(call.values()))
            states = self._whole(states)
        call.open.append((call.layer, states[0].shape if states else None))
        if call.readings is not None:
            if not handed_on and len(call.open) == 1 and (settled := call.chain.took(states)) is not None:
                call.readings.states.read(*settled)
        elif call.first is None:
            if (first := candidates_in(taken, self.plan.grid)[0]).ndim == 4:
                self.plan.remarks[rows_and_columns(first.shape, sizes_in(call.values()), block)] = None
            decoder = self.plan.decoder and not call.alone  # called by itself it has no encoder beside it
            calls = [*call.arguments, arguments_of(block, args, kwargs)]
            was_read = self.read_before or bool(self.totals.samples)
            call.first = FirstInput(self.plan, states[0], calls, decoder, was_read)
            self._begin_readings(call)
            if call.left_out:
                call.open.clear()
                return
            self.on_states(0, block, taken[0])
        if len(call.open) == 1:  # an observer may follow attention anyway
            unknown = not (self.multihead or compiled) and (call.readings is None or not self.plan.layout_known)
            followed = any(isinstance(listener, FunctionTracer) for listener in self.blocks.listeners)
            call.tracer = (call.tracer or FunctionTracer(self._take_evidence)) if unknown and not followed else None
        if listeners := self._listeners(call):
            candidates, at = candidates_in(taken, self.plan.grid), continuation(before, states)
            for listener in listeners:
                listener.block_entered(candidates[at] if at < len(candidates) else None)

    @event
    def block_passed(self, position: int, block: nn.Module, hidden: Tensor) -> None:
        """A block has returned hidden states in compiled code, where only the first block was seen to be entered."""
        if (call := self.call) is None or call.left_out or in_backward():
            return
        if not call.open:
            self._number_layer(call, position, block)
            if call.first is None:  # the first block was passed over: nothing shows what this one took
                return
            call.open.append((call.layer, None))
        self.leave_block(position, block, hidden, failed=False)

    @event
    def leave_block(self, position: int, block: nn.Module, output: Any, failed: bool) -> None:
        """Leave the block of this position: what it returned are its layer's hidden states."""
        call = self.call
        if call is None or not call.open:
            return
        for listener in reversed(self._listeners(call)):
            listener.block_left(failed)
        if not failed and call.readings is None:
            self._begin_readings(call, at_any_rate=True)
        layer, taken = call.open.pop()
        if failed or call.readings is None:
            return
        call.left.append(layer)
        states = self._hidden_states(output, f"what {type(block).__name__} returns", self.plan.measures(layer))
        if (hidden := call.chain.gave(layer, self._whole(states), taken)) is not None:
            call.readings.states.read(layer, hidden)
            call.beside = [x for x in candidates_in(output) if x.shape != hidden.shape]
        self.on_states(layer, block, output)
        if self.projections is not None:
            self.projections.block_left(block)

    def on_states(self, layer: int, block: nn.Module, values: Any) -> None:
        """For who wants more of a call than its readings; does nothing here.

        Args:
            layer: The layer, 0 for what the first block takes.
            block: Its block, for layer 0 the first one.
            values: What the block returned, or the first of what it takes, as the model holds it.
        """

    @event
    def on_attention(self, attention: AttentionCall, left_out: bool = False) -> None:
        """Measure attention that an observer reports, if a block of a measured call runs; attention that goes nowhere,
        since it is `left_out`, is noted only."""
        self._take_evidence(attention)
        self._begin_readings(self.call, at_any_rate=True)
        if (running := self._running()) is None:
            return
        layer, readings = running
        if left_out:
            readings.attention.layers.add(layer)
        else:
            readings.attention.read(layer, attention)

    @event
    def on_projection(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look for the output projection in what a module in a block took and returned."""
        if self.projections is not None and self._running() is not None:
            self.projections.module_called(module, args, output)

    @event
    def on_contributions(self, contributions: Tensor, part: PartOfSum | None) -> None:
        """Measure what each head adds, once the output projection was called."""
        if (running := self._running()) is not None:
            running[1].attention.read_heads(running[0], contributions, part)

    @event
    def on_multihead(self, module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check padding that an `nn.MultiheadAttention` in a block is called with."""
        attention = attention_call(module, args, kwargs)
        self._take_evidence(attention)
        if (running := self._running()) is not None:
            running[1].attention.check_padding(attention.hidden_tokens(), "a key_padding_mask")

    @event
    def on_module_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Measure the routing in what a module in a block returned, if it is a router."""
        self._begin_readings(self.call, at_any_rate=routing_in(output) is not None)
        if (running := self._running()) is not None:
            running[1].routing.read(running[0], output)

    def _running(self) -> tuple[int, CallReadings] | None:
        """The layer that runs and what is read of its call; None outside of blocks."""
        call = self.call
        if call is None or call.readings is None or not call.open or call.failure is not None:
            return None
        return call.open[-1][0], call.readings

    def _listeners(self, call: ModelCall) -> list[BlockListener]:
        """Those who follow the run of the blocks in a call, the first of them entered first."""
        return [*self.blocks.listeners] if call.tracer is None else [call.tracer, *self.blocks.listeners]

    @event
    def _take_evidence(self, attention: AttentionCall) -> None:
        """Settle what is open in the first block by what attention of a block's tokens to themselves shows."""
        if (call := self.call) is None or not call.open or call.first is None or attention.unused:
            return
        if attention.self_attention is not False:
            call.first.attention_seen(attention)
            self._begin_readings(call)

    def _begin_readings(self, call: ModelCall | None, at_any_rate: bool = False) -> None:
        """Begin to read a call if it is known how, or `at_any_rate`, with the input of its first block as layer 0."""
        if call is None or (first := call.first) is None or call.readings is not None or call.left_out:
            return
        if at_any_rate:
            first.give_up()
        if not first.settled:
            return
        hidden = first.begin()
        if not len(hidden) or hidden.shape[1] == 1:
            self.totals.calls_left_out["it had a single token" if len(hidden) else "it had no samples"] += 1
            call.left_out = True
            return
        if first.doubtful is not None:
            self.totals.doubtful_masks.add(first.doubtful)
            if self.plan.training_only:  # of a watch, its notes say it
                self.plan.remarks[mask_in_doubt(first.doubtful)] = None
        padding, call.mask = (self.plan.padding, None) if first.mask is None else first.mask[:2]
        self.plan.unmasked |= call.mask is None and self.plan.padding_from_model
        call.open[0] = (call.open[0][0], hidden.shape)
        batch = TokenBatch.of(hidden, padding, self._arithmetic_of(hidden))
        states = StateReadings(self.plan, batch)
        attention = AttentionReadings(self.plan, batch, states.readings, self.projections, call.mask)
        call.readings = CallReadings(batch, states, attention, RoutingReadings(self.plan, batch, states.readings))
        states.read(0, hidden)

    def _arithmetic_of(self, hidden: Tensor) -> torch.dtype:
        """The dtype that a call with these first hidden states runs in; noted, with the modes and dropout of blocks."""
        totals, arithmetic = self.totals, arithmetic_of(self._weights, hidden)
        both = f"{totals.arithmetic} and now in {arithmetic}"
        sentence = f"a watch is of one arithmetic; this model ran in {both}: watch it anew"
        require(totals.arithmetic in (None, arithmetic), sentence, WatchError, "model")
        totals.arithmetic = arithmetic
        training = any(block.training for block in self.plan.blocks)
        totals.modes.add("train" if training else "eval")
        if training:
            totals.dropout = max(totals.dropout, *map(dropout_of, self.plan.blocks))
        return arithmetic

    def _forget_call(self) -> ModelCall | None:
        """Measure no more of this thread's call, also for those who follow the blocks, and return it."""
        if (call := self.call) is not None:
            for listener in reversed(self._listeners(call)):
                listener.call_ended()
            self._calls[current_thread()] = None
        return call

    def _hidden_states(self, values: object, where: str, needed: bool) -> list[Tensor]:
        """What could be hidden states in `values`; empty where there are none and none is needed."""
        try:
            return hidden_states_in(values, self.plan.layout, where, self.plan.grid)
        except WatchError:
            if needed:
                raise
            return []

    def _whole(self, states: list[Tensor]) -> list[Tensor]:
        """These hidden states with the tokens of all processes that share the model."""
        together = self.plan.tensor_parallel
        return states if together is None else [together.whole(x) for x in states]

    def _join_processes(self, call: ModelCall, together: TensorParallel) -> None:
        """Bring together what the processes that share the model have read; if one has failed, raise in all of them."""
        readings = None if call.readings is None else call.readings.attention
        mine = None if readings is None or call.failure is not None else readings.of_own_heads()
        reason = None if call.failure is None else str(call.failure)
        reasons, parts = zip(*together.gathered((reason, mine)), strict=True)
        if call.failure is not None:
            raise call.failure
        for rank, reason in zip(together.ranks, reasons, strict=True):
            sentence = f"rank {rank}, which shares this model, could not measure it: {reason}"
            require(reason is None, sentence, WatchError, "ranks")
        if readings is not None:
            readings.join_heads(parts, call.blocks)

    def _check_and_add(self, call: ModelCall, readings: CallReadings) -> None:
        """Check a call that has returned, and add what was read of it to the totals."""
        if readings.attention.longer and not readings.attention.layers and self.totals.layers_with_attention:
            self.totals.calls_left_out[CHUNK] += 1
            return
        readings.attention.check()
        readings.routing.check()
        if (settled := call.chain.ended()) is not None:
            readings.states.read(*settled)
        call.chain.check("blocks named" if self.plan.blocks_named else "blocks found in it")
        if sorted(set(call.order)) != call.order and sorted(call.left) != [*range(1, len(call.left) + 1)]:
            received = f"the blocks called are number {', '.join(map(str, call.order))}: list them so in blocks="
            sentence = f"layers= counts blocks in the order of their calls; {received}"
            require(self.plan.layers is None, sentence, WatchError, "layers")
            readings.states.numbers = {layer: k for k, layer in enumerate(sorted(call.left), start=1)}
            self.totals.orders.add(tuple(call.order))
        self.totals.add(call, readings)


def modules_around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that hold a block, from the outside in, without the model itself and without mere lists."""
    return [part for part in _holders(model, block) or () if not isinstance(part, (nn.ModuleList, nn.ModuleDict))]


def _holders(module: nn.Module, block: nn.Module) -> list[nn.Module] | None:
    """The modules between a module and a block in it, from the outside in; None if the block is not in it."""
    for part in module._modules.values():
        if part is block:
            return []
        if part is not None and (inside := _holders(part, block)) is not None:
            return [part, *inside]
    return None


def has_listed_parts(blocks: Sequence[nn.Module]) -> bool:
    """True if some layer is a `ModuleList` of parts, which is never called itself."""
    return any(isinstance(block, nn.ModuleList) for block in blocks)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The block, or the modules in a list and in lists in it that are called; entries may be None."""
    if not isinstance(block, nn.ModuleList):
        return [block]
    return [part for inner in block if inner is not None for part in parts_of(inner)]
