"""Leaves parts out of a live model: hooks that are attached when a watch is entered, and removed when it is left.

    layer l                x_l = x_{l-1}: what the block took goes on in place of what it gave
    norm                   gives what it takes
    branch f of x + f(x)   gives 0 (`branches.py`)
    skip of x + f(x)       the sum is f(x) (`branches.py`)
    head h                 P_h V_h = 0 (`heads.py`)

Modules still run, and what they return is replaced, so that caches and what else they return stay as they are. `Watch`
calls `attach` before its own hooks, which then see what goes on, and `attach_last` after those of observers.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from rankscope.errors import WatchError
from rankscope.live.attention import AttentionCall
from rankscope.live.block_hooks import modules_around
from rankscope.live.hidden_states import candidates_in, floating_tensors
from rankscope.live.hooks import Hooks
from rankscope.live.left_out import several_layers
from rankscope.live.plan import WatchPlan
from rankscope.live.without.branches import SkipTracer
from rankscope.live.without.heads import HeadsRemoval


class Removal:
    """Leaves the parts in `plan.left_out` out of a model, while the hooks of this removal are attached."""

    def __init__(self, model: nn.Module, plan: WatchPlan) -> None:
        self.model, self.plan, out = model, plan, plan.left_out
        if out and plan.tensor_parallel is not None:
            sentence = "parts are left out of a model in one process"
            raise WatchError(f"{sentence}; {plan.tensor_parallel.size} share this one: watch it whole", subject="ranks")
        self.layers = {layer: plan.blocks[layer - 1] for layer in sorted(out.layers)}
        self.heads = HeadsRemoval(out.heads, {layer: plan.blocks[layer - 1] for layer in out.heads})
        self.tracer = SkipTracer()
        self._depth = 0  # calls of the model, and of modules around the blocks, that have not returned
        self._thread = 0  # the thread that called the model
        self._running = 0  # layers and branches that run and are left out
        self._calls: Counter[int] = Counter()  # of layers, in this call of the model
        self._called: set[str] = set()  # what was left out at least once, in words
        self._model_ran = False
        self._taken: dict[nn.Module, list[Tensor]] = {}  # copies of what layers and norms that run have taken

    @property
    def running(self) -> bool:
        """True while a layer or a branch runs that is left out: what it attends to goes nowhere."""
        return self._running > 0

    def attach(self, hooks: Hooks) -> None:
        """Hook the model, until `hooks` are closed."""
        out, hooks = self.plan.left_out, hooks.enter_context(Hooks(if_traced=True))
        hooks.callback(self._end)
        for module in [self.model, *modules_around(self.model, self.plan.blocks[0])]:
            self._hook(hooks, module, self._call_begins, self._call_ends)
            hooks.attach(module, self._call_unwinds, always_call=True)
        if out.branches or out.skips:
            hooks.enter_context(self.tracer)
        for name, norm in out.norms.items():
            self._pass_on(hooks, norm, lambda name=name: self._entered(f"norm {name}"), self._norm_output)
        for name, branch in out.branches.items():
            self._leave_out_branch(hooks, name, branch)
        for name, branch in out.skips.items():
            self._leave_out_skip(hooks, name, branch)
        self.heads.attach(hooks, lambda layer: self._layer_entered("heads", layer))
        for module in (*self.layers.values(), *out.branches.values()):
            self._hook(hooks, module, lambda *_: self._count(1), None)
        for layer, block in self.layers.items():
            self._pass_on(hooks, block, lambda layer=layer: self._layer_entered("layer", layer), self._layer_output)

    def attach_last(self, hooks: Hooks) -> None:
        """Hook what must come after the hooks of observers, which may look at a module when it has returned."""
        hooks = hooks.enter_context(Hooks(if_traced=True))
        self.heads.attach_last(hooks)
        for module in (*self.layers.values(), *self.plan.left_out.branches.values()):
            hooks.attach(module, lambda *_: self._count(-1), always_call=True)

    def _count(self, by: int) -> None:
        self._running += by

    def on_attention(self, attention: AttentionCall) -> None:
        """Pass attention that an observer reports to the removal of heads."""
        self.heads.on_attention(attention)

    def check(self) -> None:
        """Raise if the model was called and never came to a part that was to be left out."""
        out = self.plan.left_out
        expected = [f"layer {layer}" for layer in sorted(out.layers)] + [f"heads {layer}" for layer in out.heads]
        for what, names in (("norm", out.norms), ("branch", out.branches), ("skip", out.skips)):
            expected += [f"{what} {name}" for name in names]
        missing = [words for words in expected if words not in self._called]
        if self._model_ran and missing:
            what, _, name = missing[0].partition(" ")
            came = f"{'layer ' * (what in ('layer', 'heads'))}{name} was never called: name a module that is called"
            raise WatchError(f"what is left out must run, or nothing changes; {came}", subject="without")

    def _hook(
        self, hooks: Hooks, module: nn.Module, before: Callable[..., Any] | None, after: Callable[..., Any] | None
    ) -> None:
        if before is not None:
            hooks.attach(module, before, before=True, with_kwargs=True)
        if after is not None:
            hooks.attach(module, after)

    def _call_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth and self._thread != get_ident():
            came = f"a second called this {type(self.model).__name__} before the first call had ended"
            raise WatchError(f"a model runs without some of its parts in one thread at a time; {came}", subject="model")
        self._depth, self._thread = self._depth + 1, get_ident()
        if self._depth == 1:
            self._calls.clear()
            self._taken.clear()
            self._running, self._model_ran, self.tracer.active = 0, True, True

    def _call_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._depth == 1:
            self.tracer.active = False
            self.tracer.check()

    def _call_unwinds(self, module: nn.Module, args: Any, output: Any) -> None:
        """A call has returned or failed."""
        if self._depth and self._thread != get_ident():  # a call from a second thread, which was refused
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._end()

    def _end(self) -> None:
        """Forget a call of the model."""
        self._depth, self.tracer.active = 0, False
        self.tracer.clear()
        self._taken.clear()

    def _entered(self, words: str) -> None:
        """A part that is left out is called; not inside a checkpoint, which would call it again without hooks."""
        self._called.add(words)
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == checkpoint.__file__:
                came = f"{words} runs in torch.utils.checkpoint, which runs it again for gradients: switch that off"
                raise WatchError(f"what is left out must stay out in the backward pass; {came}", subject="without")
            frame = frame.f_back

    def _layer_entered(self, what: str, layer: int) -> None:
        self._entered(f"{what} {layer}")
        self._calls[layer] += self._depth > 0 and (what == "layer" or layer not in self.layers)
        if self._calls[layer] > 1:
            raise WatchError(several_layers(layer, self.plan.blocks[layer - 1]), subject="layers")

    def _pass_on(
        self, hooks: Hooks, module: nn.Module, entered: Callable[[], None], output_of: Callable[..., Any]
    ) -> None:
        """Make a module give what it takes. That is copied, as the module may write into it."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            entered()
            taken = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
            states = candidates_in(taken, self.plan.grid) or floating_tensors(taken)
            self._taken.setdefault(module, []).extend(x.clone() for x in states[:1])

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            taken = self._taken.get(module)
            return output_of(module, taken.pop() if taken else None, output)

        self._hook(hooks, module, before, after)

    def _layer_output(self, block: nn.Module, taken: Tensor | None, output: Any) -> Any:
        """What a layer gives, with what it took for its hidden states."""
        given = candidates_in(output, self.plan.grid)
        fitting = [y for y in given if taken is not None and y.shape == taken.shape]
        if taken is None or len(fitting) != 1:
            came = f"this {type(block).__name__} returns {len(fitting)}: leave out its branches"
            sentence = "a layer is left out where it returns one tensor of the shape that it takes"
            raise WatchError(f"{sentence}; {came}", subject="layers")
        return replaced(output, fitting[0], taken.to(fitting[0]))

    def _norm_output(self, norm: nn.Module, taken: Tensor | None, output: Any) -> Tensor:
        """What a norm takes, in place of what it gives."""
        if taken is None or not isinstance(output, Tensor) or output.shape != taken.shape:
            came = f"this {type(norm).__name__} does not"
            raise WatchError(f"a norm must give one tensor of the shape that it takes; {came}", subject="norms")
        return taken.to(output)

    def _leave_out_branch(self, hooks: Hooks, name: str, branch: nn.Module) -> None:
        self._hook(hooks, branch, lambda *_: self._entered(f"branch {name}"), None)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            given = self._branch_output(name, output, "branches")
            zero = torch.zeros_like(given)
            self.tracer.follow(name, "branches", zero)
            return replaced(output, given, zero)

        self._hook(hooks, branch, None, after)

    def _leave_out_skip(self, hooks: Hooks, name: str, branch: nn.Module) -> None:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.tracer.follow(name, "skips", self._branch_output(name, output, "skips"))

        self._hook(hooks, branch, lambda *_: self._entered(f"skip {name}"), after)

    def _branch_output(self, name: str, output: Any, kind: str) -> Tensor:
        """The tensor that a branch gives: the first of what it returns."""
        if not self._depth:
            raise WatchError(f"{name} must be called by the model to be left out; it was called alone", subject=kind)
        if given := floating_tensors(output):
            return given[0]
        raise WatchError(f"a branch must return a tensor, or one first of several; {name} does not", subject=kind)


def replaced(values: Any, old: Tensor, new: Tensor) -> Any:
    """What a module returned, with one tensor in place of another.

    >>> a, b = torch.zeros(1), torch.ones(1)
    >>> replaced((a, None), a, b)
    (tensor([1.]), None)
    """
    if isinstance(values, Tensor):
        return new
    if isinstance(values, Mapping):
        changed: Any = copy(values)
        for key, value in values.items():
            if value is old:
                changed[key] = new
        return changed
    items = [new if value is old else value for value in values]
    return values._make(items) if hasattr(values, "_make") else type(values)(items)
