"""Leaves parts out of a live model: what a user names, checked, and hooks that are attached when a watch is entered and
removed when it is left.

    layer l                x_l = x_{l-1}: what the block took goes on in place of what it gave
    norm                   gives what it takes
    branch f of x + f(x)   gives 0 (`branches.py`)
    skip of x + f(x)       the sum is f(x) (`branches.py`)
    head h                 P_h V_h = 0 (`HeadsRemoval`)

`Watch.without` calls `choose`; the `LeftOut` that it gives is part of the watch's plan (`plan.py`), of which
`attention_readings.py` asks for heads, and notes, manifest and the name of the variant for its words.

Modules still run, and what they return is replaced, so that caches and what else they return stay as they are.
`StackWatch` calls `attach` of a `Removal` before its own hooks, which then see what goes on, and `attach_last` after
those of observers.

An observer of `attention/` reports the outputs of all heads, and the linear layer that is called on exactly these is
the output projection; a hook before it sets some to 0. `nn.MultiheadAttention` calls no linear layer: while it runs,
its output projection has a copy of its weight, with 0 where these heads come in. Where neither is seen, an error says
so when the block returns.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from itertools import islice
from numbers import Integral
from threading import get_ident
from traceback import walk_stack
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from rankscope.errors import WatchError, one_of, require
from rankscope.live.attention import AttentionCall
from rankscope.live.attention.head_outputs import is_linear, takes_heads, without_heads
from rankscope.live.attention.multihead import multihead_modules
from rankscope.live.branches import SkipTracer
from rankscope.live.call_follower import modules_around
from rankscope.live.hidden_states import candidates_in, floating_tensors
from rankscope.live.hooks import Hooks
from rankscope.live.modules import parts_in, submodules
from rankscope.live.plan import LeftOut, WatchPlan, words_of

HeadsOut = Mapping[int, Iterable[int]] | Iterable[tuple[int, int]]  # {layer: heads}, or pairs (layer, head)
Names = str | Iterable[str]  # dotted names of modules; `*` stands for one step of a name


def choose(
    model: nn.Module, blocks: list[nn.Module], layers: Iterable[int], heads: HeadsOut, branches: Names, norms: Names,
    skips: Names,
) -> LeftOut:  # fmt: skip
    """The parts that a user named, checked against the model.

    Args:
        model: The model, whose modules `branches`, `norms` and `skips` name.
        blocks: The blocks of the stack that is watched, layer by layer.
        layers, heads, branches, norms, skips: As in `Watch.without`.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise WatchError(f"layers must be a list, as [3, 4]; got {layers!r}", subject="layers")
    chosen_layers = [_layer(layer, blocks, "layers") for layer in layers]
    try:
        by_layer: Any = heads.items() if isinstance(heads, Mapping) else ((layer, [head]) for layer, head in heads)
        pairs = [(layer, head) for layer, some in by_layer for head in some]
    except (TypeError, ValueError) as error:
        expected = "{layer: heads}, as {1: [0, 3]}, or pairs, as [(1, 0), (1, 3)]"
        raise WatchError(f"heads must be {expected}; got {heads!r}", subject="heads") from error
    chosen_heads: dict[int, set[int]] = {}
    for layer, head in pairs:
        if not _is_whole(head) or head < 0:
            raise WatchError(f"heads are numbered from 0; got {head!r} in layer {layer}", subject="heads")
        chosen_heads.setdefault(_layer(layer, blocks, "heads"), set()).add(int(head))
    named = {"branches": branches, "norms": norms, "skips": skips}
    patterns = {kind: _patterns(names, kind) for kind, names in named.items()}
    modules = {kind: _modules(model, kind, names) for kind, names in patterns.items()}
    for name, norm in modules["norms"].items():
        sentence = "norms must name single norms, which then give what they take"
        fault = f"{name} is a {type(norm).__name__}: name it in branches="
        require(not (norm._modules or isinstance(norm, nn.Linear)), f"{sentence}; {fault}", WatchError, "norms")
    in_lists = {part for block in blocks if isinstance(block, nn.ModuleList) for part in submodules(block)}
    for name, branch in modules["skips"].items():
        sentence = f"a skip can be left out in a layer that is one module; the layer of {name} is a list of parts"
        require(branch not in in_lists, sentence, WatchError, "skips")  # its output is made outside, known by its skips
    heads_out = {layer: frozenset(some) for layer, some in sorted(chosen_heads.items())}
    words = words_of(set(chosen_layers), heads_out, tuple(patterns.values()))
    return LeftOut(frozenset(chosen_layers), heads_out, **modules, asked=tuple(words))


def _patterns(names: Names, kind: str) -> list[str]:
    """The names that a user gave, as a list."""
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    for name in listed:
        sentence = f"{kind} must be names of modules, as 'layers.*.mlp'; got {name!r:.60}"
        require(isinstance(name, str), sentence, WatchError, kind)
    return listed


def _is_whole(number: object) -> TypeGuard[int]:
    """True for a whole number of Python or numpy."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _layer(layer: object, blocks: list[nn.Module], what: str) -> int:
    """The number of a layer, whose block must stand for this layer alone and be called itself."""
    if not _is_whole(layer) or not 1 <= layer <= len(blocks):
        raise WatchError(f"layers are numbered 1..{len(blocks)}; got {layer!r}", subject=what)
    block = blocks[layer - 1]
    if isinstance(block, nn.ModuleList):
        fault = f"layer {layer} is a list of parts: name these parts in branches="
        raise WatchError(f"a layer must be a module that is called to be left out; {fault}", subject=what)
    require(sum(candidate is block for candidate in blocks) == 1, several_layers(layer, block), WatchError, what)
    return int(layer)


def several_layers(layer: int, block: nn.Module) -> str:
    """The sentence for a block that is called more than once."""
    name = type(block).__name__
    return f"a block must be one layer to be left out, or its heads; the {name} of layer {layer} is several"


def _modules(model: nn.Module, kind: str, patterns: list[str]) -> dict[str, nn.Module]:
    """The modules of the model that these names mean, without the marks that `torch.compile` leaves in names."""
    by_name = {name.replace("_orig_mod.", ""): part for name, part in model.named_modules(remove_duplicate=False)}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", r"[^.]+")
        matches = {name: part for name, part in by_name.items() if name and re.fullmatch(expression, name)}
        if not matches:
            near = [name for name in by_name if name and name.count(".") <= pattern.count(".")]
            raise WatchError(one_of(kind, pattern, islice(near, 40)), subject=kind)
        chosen |= matches
    return chosen


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
        self.running = 0  # layers and branches that run and are left out: what they attend to goes nowhere
        self._calls: Counter[int] = Counter()  # of layers, in this call of the model
        self._called: set[str] = set()  # what was left out at least once, in words
        self._model_ran = False
        self._taken: dict[nn.Module, list[Tensor]] = {}  # copies of what layers and norms that run have taken

    def attach(self, hooks: Hooks) -> None:
        """Hook the model, until `hooks` are closed."""
        out, hooks = self.plan.left_out, hooks.enter_context(Hooks(if_traced=True))
        hooks.callback(self._end)
        for module in [self.model, *modules_around(self.model, self.plan.blocks[0])]:
            hooks.attach(module, self._call_begins, before=True)
            hooks.attach(module, self._call_ends)
            hooks.attach(module, self._call_unwinds, always_call=True)
        if out.branches or out.skips:
            hooks.enter_context(self.tracer)
        for name, norm in out.norms.items():
            self._pass_on(hooks, "norm", norm, partial(self._entered, f"norm {name}"))
        for kind, words, named in (("branches", "branch", out.branches), ("skips", "skip", out.skips)):
            for name, branch in named.items():
                hooks.attach(branch, lambda *_, words=f"{words} {name}": self._entered(words), before=True)
                hooks.attach(branch, partial(self._branch_left, name, kind))
        self.heads.attach(hooks, partial(self._layer_entered, "heads"))
        for module in (*self.layers.values(), *out.branches.values()):
            hooks.attach(module, partial(self._count, 1), before=True)
        for layer, block in self.layers.items():
            self._pass_on(hooks, "layer", block, partial(self._layer_entered, "layer", layer))

    def attach_last(self, hooks: Hooks) -> None:
        """Hook what must come after the hooks of observers, which may look at a module when it has returned."""
        hooks = hooks.enter_context(Hooks(if_traced=True))
        self.heads.attach_last(hooks)
        for module in (*self.layers.values(), *self.plan.left_out.branches.values()):
            hooks.attach(module, partial(self._count, -1), always_call=True)

    def _count(self, by: int, *_: Any) -> None:
        self.running += by

    def check(self) -> None:
        """Raise if the model was called and never came to a part that was to be left out."""
        out = self.plan.left_out
        expected = [f"layer {layer}" for layer in sorted(out.layers)] + [f"heads {layer}" for layer in out.heads]
        for what, names in (("norm", out.norms), ("branch", out.branches), ("skip", out.skips)):
            expected += [f"{what} {name}" for name in names]
        missing = [words for words in expected if words not in self._called]
        if self._model_ran and missing:
            what, _, name = missing[0].partition(" ")
            fault = f"{'layer ' * (what in ('layer', 'heads'))}{name} was never called: name a module that is called"
            raise WatchError(f"what is left out must run, or nothing changes; {fault}", subject="without")

    def _call_begins(self, module: nn.Module, args: Any) -> None:
        fault = f"a second called this {type(self.model).__name__} before the first call had ended"
        sentence = f"a model runs without some of its parts in one thread at a time; {fault}"
        require(not self._depth or self._thread == get_ident(), sentence, WatchError, "model")
        self._depth, self._thread = self._depth + 1, get_ident()
        if self._depth == 1:
            self._calls.clear()
            self._taken.clear()
            self.running, self._model_ran, self.tracer.active = 0, True, True

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
        if any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in walk_stack(sys._getframe())):
            fault = f"{words} runs in torch.utils.checkpoint, which runs it again for gradients: switch that off"
            raise WatchError(f"what is left out must stay out in the backward pass; {fault}", subject="without")

    def _layer_entered(self, what: str, layer: int) -> None:
        self._entered(f"{what} {layer}")
        self._calls[layer] += self._depth > 0 and (what == "layer" or layer not in self.layers)
        require(self._calls[layer] <= 1, several_layers(layer, self.plan.blocks[layer - 1]), WatchError, "layers")

    def _pass_on(self, hooks: Hooks, what: str, module: nn.Module, entered: Callable[[], None]) -> None:
        """Make a module, a layer or a norm, give what it takes. That is copied, as the module may write into it."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            entered()
            taken = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
            states = candidates_in(taken, self.plan.grid) or floating_tensors(taken)
            self._taken.setdefault(module, []).extend(x.clone() for x in states[:1])

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            taken = self._taken[module].pop() if self._taken.get(module) else None
            fitting = [y for y in floating_tensors(output) if taken is not None and y.shape == taken.shape]
            if taken is None or len(fitting) != 1:
                fault = f"this {type(module).__name__} returns {len(fitting)}"
                sentence = f"a {what} is left out where it returns one tensor of the shape that it takes; {fault}"
                way = ": leave out its branches" if what == "layer" else ""
                raise WatchError(f"{sentence}{way}", subject=f"{what}s")
            return replaced(output, fitting[0], taken.to(fitting[0]))

        hooks.attach(module, before, before=True, with_kwargs=True)
        hooks.attach(module, after)

    def _branch_left(self, name: str, kind: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Follow the tensor that a branch gives, the first of what it returns; 0 if it is the branch that goes."""
        sentence = f"{name} must be called by the model to be left out; it was called alone"
        require(self._depth, sentence, WatchError, kind)
        if not (given := floating_tensors(output)):
            sentence = "a branch must return a tensor, or one first of several"
            raise WatchError(f"{sentence}; {name} does not", subject=kind)
        followed = given[0] if kind == "skips" else torch.zeros_like(given[0])
        self.tracer.follow(name, kind, followed)
        return replaced(output, given[0], followed) if followed is not given[0] else None


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


class HeadsRemoval:
    """Sets the output of some heads to 0 before the output projection. `heads` and `blocks` are by layer."""

    def __init__(self, heads: Mapping[int, frozenset[int]], blocks: Mapping[int, nn.Module]) -> None:
        self.heads, self.blocks = heads, blocks
        self.layer: int | None = None  # the layer that runs, if it loses heads
        self.begun = self.done = False  # attention in it was seen; the output projection was
        self.outputs: Tensor | None = None  # what the heads of the running layer gave, `[batch, query, head, d]`
        self._weights: list[tuple[nn.Module, Tensor]] = []  # output projections, with the weights to give back

    def attach(self, hooks: Hooks, entered: Callable[[int], None]) -> None:
        """Hook the blocks and linear layers in them, until `hooks` are closed; `entered` is called for each call of a
        block."""
        hooks.callback(self._restore)
        for layer, block in self.blocks.items():

            def before(module: nn.Module, args: Any, layer: int = layer) -> None:
                entered(layer)
                self.layer, self.begun, self.done, self.outputs = layer, False, False, None

            hooks.attach(block, before, before=True)
            hooks.attach(block, self._left)
            parts = parts_in([block])
            for attention in multihead_modules(parts):
                hooks.attach(attention, self._mask_weight, before=True)
            for linear in filter(is_linear, parts):
                hooks.attach(linear, self._mask_input, before=True)

    def attach_last(self, hooks: Hooks) -> None:
        """Attach the hooks that restore weights. They run after the observer's, which therefore computes its second
        pass without these heads."""
        for part in multihead_modules(parts_in(self.blocks.values())):
            hooks.attach(part, lambda *_: self._restore(), always_call=True)

    def on_attention(self, attention: AttentionCall) -> None:
        """Wait for the output projection, once the layer's attention of its tokens to themselves was seen."""
        if self.layer is None or self.begun or attention.self_attention is False or attention.unused:
            return
        self.begun = True
        if attention.head_outputs is not None:
            self.outputs = attention.head_outputs()
            self._check(self.outputs.shape[2])

    def _check(self, count: int) -> None:
        """Refuse numbers of heads that the running layer does not have."""
        assert self.layer is not None
        last = max(self.heads[self.layer])
        sentence = f"heads are numbered 0..{count - 1}; got {last} in layer {self.layer}"
        require(last < count, sentence, WatchError, "heads")

    def _mask_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a linear layer takes, with 0 for what these heads gave, if it is the output projection."""
        outputs = self.outputs
        if outputs is None or self.layer is None or not takes_heads(outputs, args):
            return None
        self.outputs, self.done = None, True
        split = args[0].unflatten(-1, outputs.shape[-2:])
        return (without_heads(split, self.heads[self.layer], -2).flatten(-2),)

    def _mask_weight(self, module: nn.MultiheadAttention, args: Any) -> None:
        """Give an `nn.MultiheadAttention` an output projection without these heads, while it runs."""
        if self.layer is None or self.begun:
            return
        self._check(module.num_heads)
        self.begun = self.done = True
        projection = module.out_proj
        weight = projection.weight.view(len(projection.weight), module.num_heads, -1)
        self._weights.append((projection, projection.weight))
        masked: Any = without_heads(weight, self.heads[self.layer], 1).flatten(1)
        projection._parameters["weight"] = masked

    def _restore(self) -> None:
        """Give weights back to the output projections that had a copy."""
        while self._weights:
            projection, weight = self._weights.pop()
            projection._parameters["weight"] = weight  # type: ignore[assignment]

    def _left(self, block: nn.Module, args: Any, output: Any) -> None:
        """A block has returned: its heads must have been left out."""
        layer, self.layer, self.outputs = self.layer, None, None
        seen = "no Linear or Conv1D took what they gave" if self.begun else "its attention was not seen"
        sentence = f"heads are left out where the output projection takes them; in layer {layer} {seen}"
        require(self.done, f"{sentence}: leave out the branch of attention instead", WatchError, "heads")
