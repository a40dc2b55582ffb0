"""Measures training batches inline, as they pass through the model: what `Monitor` does without a probe.

`TrainingBatches` chooses one of two ways for each stack of blocks. It calls `record(True)` before a step that may be
measured, the loop calls the model, and after the step it takes `values()` or, if the step is not measured, calls
`record` again, which drops them.

- `OperatorMeasurement` reads metrics of tokens. A hook after each block calls a custom operator (`rankscope::passed`)
  that hands the tokens over and returns nothing. In compiled code that is one node of the graph, without a graph break.
  Whether the step is recorded is decided inside the operator when it runs, so there is no second graph.
- `WatchMeasurement` enters a `StackWatch` for the steps that are recorded. Metrics of attention and heads need
  that, and so do blocks that are lists of parts and never called themselves. Compiled code cannot be watched.

A training batch is a call of the model with gradients, in train mode; or in eval mode, as some fine-tune, if the step
has none in train mode and the thread is that of `Monitor.step`. An evaluation between two steps, or in another thread
beside them, is not read, nor are forward passes that activation checkpointing repeats inside the backward pass, nor the
trials that torch's pipeline schedules make of a stage.

Once a measurement has succeeded (`contained`), an error in a hook no longer reaches the model's call: the rest of the
step is not read, and `values()` raises it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError, WatchError, require
from rankscope.live import (
    AttentionCall,
    CallArguments,
    FunctionTracer,
    Hook,
    Hooks,
    StackWatch,
    StateReadings,
    TokenBatch,
    TokenCounts,
    WatchPlan,
    arithmetic_of,
    find_padding,
    has_listed_parts,
    hidden_states_in,
    in_trial_of_stage,
    is_compiled,
    layout_in_attention,
    library_of,
    local_tokens,
    mask_arguments_of,
    modules_around,
    own_parameters,
    refuse_context_parallel,
    rows_and_columns,
    sizes_in,
    submodules,
    times_changed,
    token_counts,
)
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.probe import GRADIENT_METRIC, beside_plugins, gradient_norms, join_gradients, values_of
from rankscope.monitor.running_sums import MetricValues

# The measurements that operators hand tokens to: an operator's arguments can be no Python object.
_by_id: WeakValueDictionary[int, "OperatorMeasurement"] = WeakValueDictionary()


@torch.library.custom_op("rankscope::called", mutates_args=("seen",))
def _called(
    mask: Tensor | None, name: str, whole: Sequence[int], floating: Sequence[int], sizes: Sequence[int], seen: Tensor,
    of: int, training: bool, grad: bool,
) -> None:  # fmt: skip
    """Announce that a call of the model begins: its mode, the padding mask and the name of that argument, the numbers
    of tokens in arguments of whole and of floating numbers, and the `sizes_in` the arguments."""
    if (measurement := _by_id.get(of)) is not None and measurement.recording:
        arguments = {} if mask is None else {name: mask}
        pairs = [*zip(sizes[::2], sizes[1::2], strict=True)]
        measurement.guarded(measurement.begin_call, arguments, training, grad, (list(whole), list(floating)), pairs)


@torch.library.custom_op("rankscope::passed", mutates_args=("seen",))
def _passed(x: Tensor, seen: Tensor, of: int, position: int, training: bool) -> None:
    """Hand over what the block of this position returned or, at position 0, what the first block takes."""
    if (measurement := _by_id.get(of)) is not None and measurement.recording:
        measurement.guarded(measurement.read_layer, position, x, training)


@dataclass
class TrainingCall:
    """One call of the model in a training step."""

    arguments: CallArguments  # that may say what is padding
    training: bool  # in train mode
    sizes: Sequence[tuple[int, int]]  # `sizes_in` its arguments
    counts: TokenCounts | None  # of tokens in its arguments; None if no hook around the blocks has said that it begins
    layer: int = 0  # read last
    position: int = 0  # of the block read last
    blocks: int = 0  # how many were read
    again: bool = False  # a block came again
    states: StateReadings | None = None  # None before the first block

    @property
    def announced(self) -> bool:
        """True if a hook around the blocks has said that it begins: blocks that come again are further layers."""
        return self.counts is not None

    def number(self, position: int) -> int:
        """The layer of the block that comes now: its position or, once a block has come again, its turn, as `watch`
        counts."""
        again = self.states is not None and position <= self.position
        if again and (position == 0 or self.layer != self.blocks):
            came = "one came again, or before its turn: list them so in blocks=, one as often as it is called"
            raise MonitorError(f"blocks must be listed in the order in which they are called; {came}", subject="blocks")
        self.again |= again
        self.layer = self.layer + 1 if self.again else position
        self.position, self.blocks = position, self.blocks + (position > 0)
        return self.layer


class OperatorMeasurement:
    """Reads metrics of tokens through operators, and gradients at the tokens if the model is not compiled."""

    def __init__(self, model: nn.Module, plan: WatchPlan) -> None:
        self.plan, blocks, self.contained = plan, plan.blocks, False
        self.record(False)
        # Operators write to this tensor, so that the compiler neither removes nor moves them.
        self.seen = torch.zeros(1, device="cpu")
        self.called_once = len({*map(id, blocks)}) == len(blocks)  # as far as the list of blocks says
        self.places = [blocks.index(block) + 1 for block in dict.fromkeys(blocks)]
        _by_id[id(self)] = self
        open_layout = not plan.layout_known and plan.tensor_parallel is None
        self.layout = LayoutFinder(plan, self.guarded) if open_layout else None
        self._hooks = Hooks()
        # Hooks of the outermost module run outside of compiled code: take the next one inside, if there is.
        outer = next(iter(modules_around(model, blocks[0])), model)
        self.of_encoder_too, self.library = outer in plan.around_both, library_of(outer)
        self.masks = mask_arguments_of(outer, plan.decoder, self.of_encoder_too)
        on_call = self._on_call
        if outer is model:  # not compiled by themselves
            torch._dynamo.decorators.skip_code(Hook.__call__.__code__)  # type: ignore[attr-defined]
            on_call = torch._dynamo.disable(on_call)  # type: ignore[no-untyped-call]
        self._hooks.attach(outer, on_call, before=True, with_kwargs=True)
        self._hooks.attach(blocks[0], self._on_input, before=True, with_kwargs=True)
        if self.layout is not None:
            self._hooks.attach(blocks[0], self._on_first_left, always_call=True)
        for k, block in enumerate(dict.fromkeys(blocks)):
            self._hooks.attach(block, partial(self._on_output, k + 1))

    @property
    def has_recorded(self) -> bool:
        """True if something was read since `record`."""
        return bool(self.recorded) or any(call is not None for call in self._calls.values())

    def record(self, on: bool) -> None:
        """Drop what was read, and read the next step or not."""
        self.recording, self.recorded, self._thread = on, MetricValues(), get_ident()
        self._calls: dict[int, TrainingCall | None] = {}  # by thread; None for one that is no training batch
        self.trained = False  # a call in train mode was read
        self.failure: Exception | None = None  # of a hook, after which nothing is read

    def values(self) -> MetricValues:
        """What was read since `record`; raises if the model was not called, or if a hook failed."""
        for thread in list(self._calls):
            self.guarded(self._end_call, thread)
        if self.failure is not None:
            raise self.failure
        values, self.recorded = self.recorded, MetricValues()
        if not values:
            expected = "training batches are measured while the model is called with gradients, through its hooks"
            what = f"its {self.plan.name}" if self.plan.name else "it"
            raise MonitorError(f"{expected}; in this step {what} was not: call model(...)", subject="model")
        return values

    def guarded(self, read: Callable[..., None], *args: Any) -> None:
        """Read something; an error is kept for `values` if it is to be contained, and then nothing more is read."""
        try:
            if self.failure is None:
                read(*args)
        except Exception as error:
            if not self.contained:
                raise
            self.failure = error

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.recording = False
        _by_id.pop(id(self), None)
        self._hooks.close()

    def begin_call(
        self, arguments: dict[str, Any], training: bool, grad: bool, counts: TokenCounts | None = None,
        sizes: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Begin to read a call of the model, with these arguments that may say what is padding, in train mode or not,
        with gradients or not; `counts` and `sizes` are those of tokens in its arguments, if a hook around the blocks
        has announced it. The first call in train mode drops what was read in eval mode: that was an evaluation."""
        if _in_backward():
            return
        thread = get_ident()
        self._end_call(thread)
        evaluates = not training and (self.trained or thread != self._thread)
        if not grad or evaluates or in_trial_of_stage():
            self._calls[thread] = None
            return
        refuse_context_parallel()
        if training and not self.trained:
            self.trained, self.recorded = True, MetricValues()
        call = self._calls[thread] = TrainingCall(CallArguments(arguments), training, sizes, counts)
        call.arguments.library, call.arguments.of_encoder_too = self.library, self.of_encoder_too

    def read_layer(self, position: int, x: Tensor, training: bool) -> None:
        """Read the metrics of the tokens that the block of this position returned; 0: that the first block takes."""
        thread = get_ident()
        if _in_backward() or self._is_left_out(thread):
            return
        call = self._calls.get(thread)
        ended = call is None or (position == 0 and not call.announced and call.layer == len(self.plan.blocks))
        if ended and thread == self._thread:  # another thread may be in the midst of an evaluation
            self.begin_call({}, training, True)  # no hook around the blocks has said that a call begins
        if (call := self._calls.get(thread)) is None:
            return
        if position == 0 and call.states is not None and (call.announced or not self.called_once):
            return  # the first block comes again: what it takes was read as the last layer
        layer = call.number(position)
        self.plan.called |= {layer: self.places[position - 1]} if position else {}
        hidden = hidden_states_in(x, self.plan.layout, f"layer {layer}", self.plan.grid)[0]
        if (together := self.plan.tensor_parallel) is not None:
            if call.states is None:
                together.begin_call(hidden, call.counts or ((), ()))
            hidden = together.whole(hidden)
        if call.states is None and x.ndim == 4 and self.plan.grid:
            self.plan.remarks[rows_and_columns(x.shape, call.sizes, self.plan.blocks[0])] = None
        if call.states is None:
            padding = self.plan.padding
            if self.plan.padding_from_model:
                mask = find_padding([call.arguments], call.arguments, hidden.shape[:2], self.plan.decoder)
                padding = None if mask is None else mask.padding
                self.plan.unmasked |= mask is None
            batch = TokenBatch.of(hidden, padding, arithmetic_of(own_parameters(submodules(*self.plan.blocks)), hidden))
            call.states = StateReadings(self.plan, batch)
        call.states.read(layer, hidden)

    def _is_left_out(self, thread: int) -> bool:
        """True if the call that runs in this thread is no training batch."""
        return self._calls.get(thread, self) is None

    def _end_call(self, thread: int) -> None:
        """Add what was read of a thread's last call to what was recorded, unless it is known to be an evaluation."""
        call = self._calls.pop(thread, None)
        if call is not None and call.states is not None and (call.training or not self.trained):
            for layer, readings in call.states.all_readings():
                self.recorded.add_readings(layer, readings)

    def _on_call(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # A graph must not depend on whether a step is recorded; on the two modes it depends anyway.
        if torch.compiler.is_compiling() or self.recording:
            named: tuple[str, Tensor | None] = ("", None)
            for name, position in reversed(self.masks):
                mask = kwargs.get(name, args[position] if position < len(args) else None)
                named = (name, mask) if isinstance(mask, Tensor) else named
            integers, floating = token_counts((*args, *kwargs.values()))
            sizes = [size for pair in sizes_in((*args, *kwargs.values())) for size in pair]
            modes = (model.training, torch.is_grad_enabled())
            _called(named[1], named[0], integers, floating, sizes, self.seen, id(self), *modes)

    def _on_input(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        first = args[0] if args else next(iter(kwargs.values()), ())
        hidden = kwargs.get("hidden_states", first)
        follows = not torch.compiler.is_compiling() and self.recording and not _in_backward()
        follows = follows and not self._is_left_out(get_ident())
        layout = self.layout  # another thread may find it in between, and need it no more
        if follows and layout is not None and isinstance(hidden, Tensor) and layout.follow(hidden):
            return  # it is read when the block is left, and attention has shown its layout
        self._take(0, block, hidden)

    def _on_first_left(self, block: nn.Module, args: Any, output: Any) -> None:
        layout = self.layout
        if torch.compiler.is_compiling() or layout is None:
            return
        hidden = layout.ended(failed=output is None)
        if hidden is not None:
            self._take(0, block, hidden)
        if self.plan.layout_known and layout.hidden is None:  # else the thread that has shown it is still to leave
            self.layout = None

    def _on_output(self, position: int, block: nn.Module, args: Any, output: Any) -> None:
        self._take(position, block, output)

    def _take(self, position: int, block: nn.Module, values: Any) -> None:
        """Hand over what a block took or returned; an error in compiled code is one of its compilation."""
        if torch.compiler.is_compiling():
            self._hand_over(position, block, values)
        elif self.recording:
            self.guarded(self._hand_over, position, block, values)

    def _hand_over(self, position: int, block: nn.Module, values: Any) -> None:
        """Hand tokens to the operator and, if autograd is there to call it, a hook to the backward pass."""
        states = [values]
        if not isinstance(values, Tensor):
            states = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3]
        if len(states) != 1:  # several tensors could be its tokens
            came = f"{type(block).__name__} returns {len(states)} tensors [batch, token, width]: give a probe"
            raise MonitorError(f"of training batches a block's output must be its tokens; {came}", subject="blocks")
        x: Tensor = states[0]
        _passed(local_tokens(x.detach()), self.seen, id(self), position, block.training)
        compiling = torch.compiler.is_compiling()
        call = None if compiling else self._calls.get(get_ident())
        if call is not None and x.requires_grad and not _in_backward():
            layer, recorded = call.layer, self.recorded
            if self.plan.measures(layer) and call.position == position:
                x.register_hook(lambda gradient: self._on_gradient(layer, recorded, gradient))  # type: ignore[no-untyped-call]

    def _on_gradient(self, layer: int, recorded: MetricValues, gradient: Tensor) -> None:
        if self.recording and recorded is self.recorded:
            self.guarded(lambda: recorded.add(layer, GRADIENT_METRIC, gradient_norms(self.plan, gradient)))


class LayoutFinder:
    """Finds which axis of the hidden states counts tokens, where blocks do not say it, from attention in the first
    block, and writes it to the plan, as `model_call.py` does for a watch. What the block takes waits until then.
    `guarded` calls a function so that its errors do not end a training."""

    def __init__(self, plan: WatchPlan, guarded: Callable[..., None]) -> None:
        self.plan = plan
        self.hidden: Tensor | None = None  # what the first block took; None outside of it
        self.thread = 0  # the thread in which it did
        self._of_thread = Lock()  # held from then on until the thread has left the block
        self.assumed = False  # some were read in the plan's layout, which nothing had shown
        self.tracer = FunctionTracer(lambda attention: guarded(self._on_attention, attention))

    def follow(self, hidden: Tensor) -> bool:
        """Follow these hidden states through the first block; False if their layout is known, or cannot be shown."""
        if self.plan.layout_known or hidden.ndim != 3 or not self._of_thread.acquire(blocking=False):
            return False
        self.thread = get_ident()
        self.hidden, self.version = hidden, times_changed(hidden)
        self.kept = hidden.detach().clone()  # the block may change them in place
        self.tracer.block_entered(hidden)
        return True

    def ended(self, failed: bool) -> Tensor | None:
        """The hidden states that were followed, to be read now; None if none were, or if the block failed."""
        if self.hidden is None or self.thread != get_ident():
            return None
        hidden, self.hidden = self.hidden, None
        self.tracer.block_left(failed=True)
        self._of_thread.release()
        if failed:
            return None
        self.assumed |= not self.plan.layout_known
        return hidden if self.version == times_changed(hidden) else self.kept

    def _on_attention(self, attention: AttentionCall) -> None:
        plan = self.plan
        if plan.layout_known or attention.self_attention is False or attention.unused:
            return
        if (layout := layout_in_attention(self.kept.shape, attention.sizes)) is None:
            return
        if self.assumed and layout != plan.layout:
            came = f"attention shows that they are {layout}: give layout={layout!r}"
            raise WatchError(f"hidden states were read as {plan.layout}; {came}", subject="layout")
        plan.layout, plan.layout_known = layout, True


class WatchMeasurement:
    """Reads any metric through a `StackWatch`, which is entered for the steps that are recorded."""

    def __init__(self, model: nn.Module, plan: WatchPlan) -> None:
        self.model, self.plan, self.contained = model, plan, False
        self.watch: StackWatch | None = None

    @property
    def recording(self) -> bool:
        """True while the model is watched."""
        return self.watch is not None

    @property
    def has_recorded(self) -> bool:
        """True if something was read since `record`."""
        return self.watch is not None and bool(self.watch.readings)

    def record(self, on: bool) -> None:
        """Drop what was read, and read the next step or not."""
        self.close()
        if on:
            watch = partial(StackWatch, self.model, self.plan, contained=self.contained)
            self.watch = beside_plugins([self.plan], lambda: watch().__enter__())

    def values(self) -> MetricValues:
        """What was read since `record`; raises if the model was not called, or if a hook failed."""
        watch = self.watch
        self.close()
        if watch is not None and watch.failure is not None:
            raise watch.failure
        return MetricValues() if watch is None else values_of(watch)

    def close(self) -> None:
        """Remove the hooks from the model."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.__exit__(None, None, None)


class TrainingBatches(Instrument):
    """Measures training batches: each stack in the way in which it can be read, through operators if possible."""

    name, subject, must_work = "batches", "training batches are", True

    def attach(self) -> None:
        """Attach hooks, or refuse a compiled model whose batches cannot show what is asked for."""
        compiled, what = is_compiled(submodules(self.monitor.wrapped)), type(self.monitor.wrapped).__name__
        shows = f"of training batches a compiled {what} shows"
        self.stacks: dict[str, OperatorMeasurement | WatchMeasurement] = {}
        for stack, plan in self.monitor.plans.items():
            plan.training_only = True
            metric = next((metric.name for metric in plan.metrics if metric.of != "tokens"), None)
            alone = f"{shows} its tokens alone, not {metric}: give a probe"
            require(not (compiled and metric), alone, MonitorError, "metrics")
            listed = has_listed_parts(plan.blocks)
            called = f"{shows} blocks that are called, not lists of parts: give a probe"
            require(not (compiled and listed), called, MonitorError, "blocks")
            kind = OperatorMeasurement if metric is None and not listed else WatchMeasurement
            self.stacks[stack] = kind(self.monitor.model, plan)
        if compiled:
            torch.compiler.reset()  # graphs of earlier calls have no hooks
        self.metrics = (GRADIENT_METRIC,) * any(isinstance(part, OperatorMeasurement) for part in self.stacks.values())

    @property
    def recording(self) -> bool:  # type: ignore[override]
        """True if the batches of the step that comes next are read."""
        return all(part.recording for part in self.stacks.values())

    def record(self, on: bool) -> None:
        """Drop what was read, and read the next step or not."""
        for part in self.stacks.values():
            part.contained = self.monitor.measured
            part.record(on)

    def read_stack(self, plan: WatchPlan) -> MetricValues:
        """What was read of the batches of this step."""
        values = self.stacks[plan.name].values()
        join_gradients(values, plan.tensor_parallel)
        return values

    def close(self) -> None:
        """Remove the hooks from the model."""
        for part in self.stacks.values():
            part.close()


def _in_backward() -> bool:
    """True inside a backward pass: what runs there is a forward pass made again."""
    return torch._C._current_graph_task_id() != -1
