"""Measures training batches inline, as they pass through the model: what `Monitor` does without a probe.

`TrainingBatches` chooses one of two ways for each stack of blocks. It calls `record(True)` before a step that may be
measured, the loop calls the model, and after the step it takes `values()` or, if the step is not measured, calls
`record` again, which drops them. In both a `CallFollower` (`live/call_follower.py`) follows the calls of the model.

- `PassingMeasurement` reads metrics of tokens, and gradients at the tokens. It is a follower itself, whose hooks stay
  attached, and follow the calls of a step that is recorded. In compiled code they call custom operators
  (`rankscope::passed`) that hand the tokens over and return nothing: each is one node of the graph, without a graph
  break. Whether the step is recorded is decided inside the operator when it runs, so there is no second graph.
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
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rankscope.errors import MonitorError, require
from rankscope.live import (
    CallArguments,
    CallFollower,
    Hook,
    Hooks,
    StackWatch,
    WatchedBlocks,
    WatchPlan,
    WatchTotals,
    has_listed_parts,
    is_compiled,
    library_of,
    local_tokens,
    mask_arguments_of,
    modules_around,
    on_return,
    submodules,
)
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues
from rankscope.monitor.probe import GRADIENT_METRIC, beside_plugins, gradient_norms, join_gradients, values_of

# The measurements that operators hand tokens to: an operator's arguments can be no Python object.
_by_id: WeakValueDictionary[int, "PassingMeasurement"] = WeakValueDictionary()


@torch.library.custom_op("rankscope::called", mutates_args=("seen",))
def _called(mask: Tensor | None, name: str, shapes: Sequence[int], grad: bool, seen: Tensor, of: int) -> None:
    """Announce in compiled code that a call of the model begins.

    Args:
        mask: The padding mask among its arguments, if there is one.
        name: The name of that argument.
        shapes: Of each tensor among its arguments whether it is floating, its number of axes, and their lengths.
        grad: Whether it computes gradients.
        seen: The tensor that operators write to, so that the compiler neither removes nor moves them.
        of: The id of the measurement.
    """
    if (measurement := _by_id.get(of)) is None or not measurement.recording:
        return
    arguments, sizes = CallArguments() if mask is None else CallArguments({name: mask}), iter(shapes)
    for floating in sizes:
        shape = [next(sizes) for _ in range(next(sizes))]
        dtype = torch.float32 if floating else torch.int64
        arguments[f"argument {len(arguments)}"] = torch.empty(shape, dtype=dtype, device="meta")
    arguments.library = library_of(measurement.announcer)
    arguments.of_encoder_too = measurement.announcer in measurement.plan.around_both
    measurement.announce_call(arguments, measurement.announcer.training, grad)


@torch.library.custom_op("rankscope::passed", mutates_args=("seen",))
def _passed(x: Tensor, seen: Tensor, of: int, position: int) -> None:
    """Hand over from compiled code what the block of this position returned or, at position 0, what the first takes."""
    if (measurement := _by_id.get(of)) is None:
        return
    block = measurement.plan.blocks[max(position, 1) - 1]
    if position:
        measurement.block_passed(position, block, x)
    else:
        measurement.enter_block(1, block, (x,), {}, compiled=True)


def tokens_in(block: nn.Module, values: Any) -> Tensor:
    """The one tensor that a block returned as its tokens; raises where several could be."""
    states = [values] if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    states = [x for x in states if isinstance(x, Tensor) and (x is values or (x.is_floating_point() and x.ndim == 3))]
    if len(states) != 1:
        received = f"{type(block).__name__} returns {len(states)} tensors [batch, token, width]: give a probe"
        raise MonitorError(f"of training batches a block's output must be its tokens; {received}", subject="blocks")
    return states[0]


class PassingMeasurement(CallFollower):
    """Follows training batches: reads metrics of tokens, and gradients at the tokens if the model is not compiled."""

    def __init__(self, model: nn.Module, plan: WatchPlan) -> None:
        blocks = WatchedBlocks(model, plan.blocks)
        super().__init__(plan, blocks, blocks.modules()[0], in_passing=True)
        self.record(False)
        self.seen = torch.zeros(1, device="cpu")
        _by_id[id(self)] = self
        outer = [model, *modules_around(model, plan.blocks[0])]
        # Hooks of the outermost module run outside of compiled code: the next one inside announces, if there is one.
        self.announcer = outer[1] if outer[1:] else model
        self.masks = mask_arguments_of(self.announcer, plan.decoder, self.announcer in plan.around_both)
        self._hooks = Hooks()
        before, after = partial(self._attach, before=True, with_kwargs=True), partial(self._attach, always_call=True)
        for module in outer:
            announce = self._announce if module is self.announcer else None
            before(module, partial(self.begin_call, alone=module is not model), announce, beside=True)
        for block in blocks:
            position = plan.blocks.index(block) + 1
            before(block, partial(self.enter_block, position), self._hand_over_input if position == 1 else None)
            after(block, on_return(partial(self.leave_block, position)), partial(self._hand_over, position))
        for module in self.multihead:
            before(module, partial(self.on_multihead))
        for module in outer:
            after(module, on_return(lambda module, output, failed: self.end_call(failed)), beside=True)

    def _attach(
        self, module: nn.Module, hook: Callable[..., None], compiled: Callable[..., None] | None = None,
        beside: bool = False, **options: bool,
    ) -> None:  # fmt: skip
        """Attach a hook that runs while a step is recorded, and another that is `compiled` in its place, where it calls
        an operator. A hook of a module around the blocks runs `beside` compiled code, unless it is traced with it."""
        direct = _disable_dynamo(hook)

        def inside(*args: Any) -> None:
            if not torch.compiler.is_compiling():
                if self.recording:
                    hook(*args)
            elif compiled is not None:
                compiled(*args)

        def outside(*args: Any) -> None:
            if not torch.compiler.is_compiling():
                if self.recording:
                    direct(*args)
            elif compiled is not None:
                compiled(*args)

        for function in (outside, Hook.__call__):  # not compiled by themselves
            torch._dynamo.decorators.skip_code(function.__code__)  # type: ignore[attr-defined]
        self._hooks.attach(module, outside if beside else inside, **options)

    def record(self, on: bool) -> None:
        """Drop what was read, and read the next step or not."""
        self.gradients: list[tuple[WatchTotals, int, Tensor]] = []  # with the totals of that time: layer, norms
        self.restart(recording=on)

    def values(self) -> MetricValues:
        """What was read since `record`; raises if the model was not called, or if a hook failed."""
        self.end_announced()
        if self.failure is not None:
            raise self.failure
        if self.totals.orders:
            received = "one came again, or before its turn: list them so in blocks=, one as often as it is called"
            sentence = f"blocks must be listed in the order in which they are called; {received}"
            raise MonitorError(sentence, subject="blocks")
        if not self.totals.samples:
            expected = "training batches are measured while the model is called with gradients, through its hooks"
            what = f"its {self.plan.name}" if self.plan.name else "it"
            raise MonitorError(f"{expected}; in this step {what} was not: call model(...)", subject="model")
        values, self.read_before = MetricValues(), True
        for totals, layer, norms in self.gradients:
            if totals is self.totals:  # else of an evaluation
                values.add(layer, GRADIENT_METRIC, norms)
        for layer, _, readings in self.totals.readings:
            values.add_readings(layer, readings)
        return values

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.recording = False
        _by_id.pop(id(self), None)
        self._hooks.close()

    def on_states(self, layer: int, block: nn.Module, values: Any) -> None:
        """Have the backward pass note the gradient at the tokens of a layer."""
        x = values if layer == 0 else tokens_in(block, values)
        if not isinstance(x, Tensor) or not x.requires_grad or not self.plan.measures(layer):
            return
        totals = self.totals

        def on_gradient(gradient: Tensor) -> None:
            handle.remove()
            if self.recording:
                self.guarded(lambda: self.gradients.append((totals, layer, gradient_norms(self.plan, gradient))))

        handle = x.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _announce(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Announce a call in compiled code: its padding mask, the shapes of its arguments, and its mode."""
        named: tuple[str, Tensor | None] = ("", None)
        for name, position in reversed(self.masks):
            mask = kwargs.get(name, args[position] if position < len(args) else None)
            named = (name, mask) if isinstance(mask, Tensor) else named
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shapes = [size for x in tensors for size in (int(x.is_floating_point()), x.ndim, *x.shape)]
        _called(named[1], named[0], shapes, torch.is_grad_enabled(), self.seen, id(self))

    def _hand_over_input(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hand over in compiled code what the first block takes."""
        values = kwargs.get("hidden_states", args[0] if args else next(iter(kwargs.values()), ()))
        self._hand_over(0, block, args, values)

    def _hand_over(self, position: int, block: nn.Module, args: Any, values: Any) -> None:
        """Hand over in compiled code what a block returned; an error is one of the compilation."""
        _passed(local_tokens(tokens_in(block, values).detach()), self.seen, id(self), position)


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
    def has_read(self) -> bool:
        """True if something was read since `record`."""
        return self.watch is not None and bool(self.watch.totals.samples)

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
        self.stacks: dict[str, PassingMeasurement | WatchMeasurement] = {}
        for stack, plan in self.monitor.plans.items():
            plan.training_only = True
            metric = next((metric.name for metric in plan.metrics if metric.of != "tokens"), None)
            alone = f"{shows} its tokens alone, not {metric}: give a probe"
            require(not (compiled and metric), alone, MonitorError, "metrics")
            listed = has_listed_parts(plan.blocks)
            called = f"{shows} blocks that are called, not lists of parts: give a probe"
            require(not (compiled and listed), called, MonitorError, "blocks")
            kind = PassingMeasurement if metric is None and not listed else WatchMeasurement
            self.stacks[stack] = kind(self.monitor.model, plan)
        if compiled:
            torch.compiler.reset()  # graphs of earlier calls have no hooks
        self.metrics = (GRADIENT_METRIC,) * any(isinstance(part, PassingMeasurement) for part in self.stacks.values())

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
