"""`StackWatch`: one stack of a model's blocks, measured while the model runs.

`watching.py` and the monitor make one for each stack, of its `WatchPlan`. Entering it attaches hooks to the model and
its blocks and, if metrics ask for it, the first observer of `attention/` that applies and hooks on routers; all report
to its `CallFollower` (`call_follower.py` has the order of events). Leaving removes them. `profile` makes a
table of the follower's totals, and `notes` says in sentences what was done (`notes.py`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live import processes
from rankscope.live.attention import AttentionCall, WatchedBlocks
from rankscope.live.attention.head_outputs import may_project
from rankscope.live.attention.multihead import without_nested_tensors
from rankscope.live.call_follower import CACHED, CallFollower, has_listed_parts, modules_around, parts_of
from rankscope.live.hooks import Hooks
from rankscope.live.left_out import Removal
from rankscope.live.model_call import WatchTotals
from rankscope.live.modules import describe_model, dtype_name, hooked, parts_in, submodules
from rankscope.live.notes import checks, notes
from rankscope.live.plan import LeftOut, WatchPlan
from rankscope.profiles import Profile, ReadingRow, readings_table
from rankscope.runs import manifest_of

AS_GIVEN = "as given"  # the variant of a model that nobody named
_observed: WeakSet[nn.Module] = WeakSet()  # blocks whose attention is being observed, by any watch


class StackWatch:
    """Measures one stack of a model's blocks in every call of the model inside its `with`, and keeps the readings.
    Entered again, it continues to count. A `compiled` model is made to run as it was written. Errors of the watch's
    hooks reach the call of the model unless they are `contained`. `modules` saves a search: what
    `WatchedBlocks.modules` gives, if the caller has it."""

    def __init__(
        self, model: nn.Module, plan: WatchPlan, *, compiled: bool = False, contained: bool = False,
        of_this_thread: bool = False, modules: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.plan = model, plan
        self._compiled = compiled
        self._blocks = WatchedBlocks(model, plan.blocks)
        in_blocks, everywhere = self._blocks.modules() if modules is None else modules
        self._modules, self._contained = (in_blocks, everywhere), contained
        self._of_this_thread = of_this_thread
        self._follower = CallFollower(plan, self._blocks, in_blocks, contained)
        self._removal = Removal(model, plan) if plan.left_out.asked else None
        self._before, self._after = block_hooks(self._blocks, self._follower)
        self._encoders = [module for module in everywhere if isinstance(module, nn.TransformerEncoder)]
        self._changes: dict[str, None] = {}  # how the model ran otherwise than unwatched, in sentences
        self._stack: Hooks | None = None  # hooks and contexts that leaving undoes; None outside

    def __repr__(self) -> str:
        return f"StackWatch({type(self.model).__name__}, {self.totals.samples} samples in {self.totals.calls} calls)"

    def __enter__(self) -> "StackWatch":
        require(self._stack is None, "this watch is already inside its with: use a second watch", WatchError, "watch")
        plan, follower = self.plan, self._follower
        with follower.beginning(), Hooks(self._of_this_thread) as stack:
            if plan.tensor_parallel is not None:
                meeting = f"watch/{processes.next_number('watch')}"
                processes.require_all_ranks("watch(...)", meeting, plan.tensor_parallel.ranks)
                shared = f"{plan.tensor_parallel.size} processes share the model"
                self._changes[f"{shared}: heads and tokens of all of them were measured."] = None
            if self._compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks fire; graphs are kept
                self._changes["The model is compiled: while watched, its original ran as it was written."] = None
            if bool(self._encoders) and stack.enter_context(without_nested_tensors(self._encoders)):
                self._changes["While watched, torch's fused encoder and its nested tensors were off."] = None
            if self._removal is not None:
                self._removal.attach(stack)
            for module, hook in self._before:
                stack.attach(module, hook, before=True, with_kwargs=True)
            if plan.wants_attention or plan.left_out.heads:
                self._observe_attention(stack)
            if plan.wants("heads"):
                stack.enter_context(hooked(filter(may_project, parts_in(self._blocks)), follower.on_projection))
            if plan.wants("routing"):
                stack.enter_context(hooked(parts_in(self._blocks), self._on_module_output))
            if self._removal is not None:
                self._removal.attach_last(stack)
            for module, hook in self._after:
                stack.attach(module, hook, always_call=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        try:
            with self._follower.stopped():
                stack.close()
        finally:
            stack.close()
        if self._removal is not None and kind is None:
            self._removal.check()

    def restart(self) -> "StackWatch":
        """The watch as it was before it was entered first: what it has measured is forgotten."""
        self._changes = {}
        self._follower.restart()
        return self

    def without(self, out: LeftOut) -> "StackWatch":
        """A new watch of the same stack, without these parts and those that this watch leaves out."""
        plan = replace(self.plan, left_out=self.plan.left_out.beside(out), known_scores={})
        return StackWatch(self.model, plan, compiled=self._compiled, contained=self._contained, modules=self._modules)

    def profile(self, variant: str = AS_GIVEN) -> Profile:
        """What was measured so far, under the name `variant`; as in `Watch.profile`."""
        totals = self.totals
        sentence = "the model was not called in watch: call model(...), not its forward"
        require(totals.calls, sentence, WatchError, "model")
        if not totals.samples:
            why = "; ".join(f"{count} left out: {why}" for why, count in totals.calls_left_out.items())
            why = why or "none of its blocks was called; name those that are with blocks="
            if CACHED in totals.calls_left_out:
                why += ": call the model on a whole sequence"
            raise WatchError(f"of {totals.calls} calls of the model none was measured: {why}", subject="model")
        assert totals.arithmetic is not None
        arithmetic, variant = dtype_name(totals.arithmetic), self._named(variant)
        order = {metric.name: k for k, metric in enumerate(self.plan.metrics)}
        entries = [ReadingRow(layer, start, *pair) for layer, start, rows in totals.readings for pair in rows]
        entries.sort(key=lambda entry: (entry.start, entry.layer, order[entry.metric.name]))
        description, results = describe_model(self.model), checks(self.plan, totals)
        device = ", ".join(description["model"]["devices"])
        manifest = manifest_of(description, device, variant, arithmetic, list(order), results)
        return Profile(readings_table(entries, variant, arithmetic), manifest)

    @property
    def totals(self) -> WatchTotals:
        """What was measured in all calls so far, and what was noticed."""
        return self._follower.totals

    @property
    def failure(self) -> Exception | None:
        """The error of a hook that was contained, after which nothing was measured any more."""
        return self._follower.failure

    @property
    def notes(self) -> list[str]:
        """What was done and found so far, in sentences."""
        return notes(self.plan, self.totals, [*self._changes])

    @property
    def states(self) -> dict[int, list[Tensor]]:
        """With `keep="states"`: by layer, the hidden states `[batch, token, width]` of each call."""
        return self._kept("states")

    @property
    def attention(self) -> dict[int, list[Tensor]]:
        """With `keep="attention"`: by layer, the pattern `[batch, head, query, key]` of each call."""
        return self._kept("attention")

    @property
    def embeddings(self) -> dict[int, Tensor]:
        """With `keep="embeddings"`: by layer, the mean of each sample's tokens `[sample, width]`; see `Watch`."""
        return {layer: torch.cat(means) for layer, means in self._kept("embeddings").items()}

    def _named(self, variant: str) -> str:
        """The name of the model in the table, with what is left out."""
        if not self.plan.left_out.asked:
            return variant
        out = f"without {', '.join(self.plan.left_out.asked)}"
        return out if variant == AS_GIVEN else f"{variant} {out}"

    def _on_attention(self, attention: AttentionCall) -> None:
        """Attention was seen: it is measured, unless it is left out or only seen for the heads that are."""
        if self._removal is not None:
            self._removal.heads.on_attention(attention)
        if not self.plan.wants_attention:
            return
        self._follower.on_attention(attention, left_out=self._removal is not None and self._removal.running > 0)

    def _on_module_output(self, module: nn.Module, args: object, output: object) -> None:
        """A module in a block returned: it may be a router."""
        if self._removal is None or not self._removal.running:
            self._follower.on_module_output(module, args, output)

    def _kept(self, what: str) -> dict[int, list[Tensor]]:
        sentence = f"{what} are kept when asked for: watch(model, keep={what!r})"
        require(what in self.plan.keep, sentence, WatchError, "keep")
        return dict(sorted(self.totals.kept[what].items()))

    def _observe_attention(self, hooks: Hooks) -> None:
        """Attach the first observer that applies; one watch at a time may observe a block."""
        blocks = self._blocks
        unobserved = _observed.isdisjoint(submodules(*blocks)) and set(submodules(*_observed)).isdisjoint(blocks)
        sentence = "attention of this model is watched already: leave that watch first"
        require(unobserved, sentence, WatchError, "attention")
        observer = next((way for way in self.plan.attention if way.applies(self.model, blocks)), None)
        if observer is None:
            ways = ", ".join(type(way).__name__ for way in self.plan.attention) or "none"
            what = f"attention of {type(self.model).__name__} must be visible to an observer ({ways}); none applies"
            raise WatchError(f"{what}: watch metrics of tokens, or give attention=[Mine()]", subject="attention")
        _observed.update(blocks)
        hooks.callback(_observed.difference_update, blocks)
        note = hooks.enter_context(observer.attach(blocks, self._on_attention))
        if note is not None:
            self._changes[note] = None


HookFunction = Callable[..., None]
HooksOfModules = list[tuple[nn.Module, HookFunction]]


def block_hooks(blocks: WatchedBlocks, follower: Any) -> tuple[HooksOfModules, HooksOfModules]:
    """The hooks that report to a follower: those before a module's forward pass, and those after it. Observers may add
    theirs in between, which on a block then run while the follower knows that the block runs.

    Args:
        blocks: The model and its blocks.
        follower: A `CallFollower`, or an object with its events.
    """
    # Modules around the blocks come first when they are called and last when they return, as the model may itself
    # be a block.
    outer = [blocks.model, *modules_around(blocks.model, blocks[0])]
    calls: HooksOfModules = [
        (module, partial(follower.begin_call, alone=module is not blocks.model)) for module in outer
    ]
    returns: HooksOfModules = []
    lists = ListedParts(follower)
    for block in blocks:
        position = follower.plan.blocks.index(block) + 1
        if isinstance(block, nn.ModuleList):
            called, returned = partial(lists.part_called, position, block), on_return(lists.part_returned)
        else:
            called = partial(follower.enter_block, position)
            returned = on_return(partial(follower.leave_block, position))
        calls += [(part, called) for part in parts_of(block)]
        returns += [(part, returned) for part in parts_of(block)]
    calls += [(module, follower.on_multihead) for module in follower.multihead]
    if has_listed_parts(blocks):
        returns.append((outer[-1], on_return(lambda module, output, failed: lists.end_block(failed))))
    ended = on_return(lambda module, output, failed: follower.end_call(failed))
    return calls, returns + [(module, ended) for module in outer]


def on_return(returned: Callable[[nn.Module, Any, bool], None]) -> HookFunction:
    """A hook that calls `returned` with the module, its output and whether it failed, also while it raises."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        returned(module, output, output is None and sys.exc_info()[0] is not None)

    return hook


@torch.no_grad()
def is_sum(x: Any, a: Any, b: Any) -> bool:
    """True if x is another tensor than b, and a + b to the bit."""
    alike = all(isinstance(y, Tensor) and y.shape == x.shape for y in (a, b)) if isinstance(x, Tensor) else False
    return alike and x is not b and torch.equal(x, a + b)


class ListedParts:
    """Makes blocks of lists of parts that are called one by one. A block begins when any of its parts is called, and
    ends when a part of another is, or the module that holds the blocks returns; its output is that of its last part.

    Where the parts are branches, and what each takes is added to what it gives outside of them (vit-pytorch), so is
    what the last one took."""

    def __init__(self, follower: CallFollower) -> None:
        self.follower = follower
        self._forget()

    def _forget(self) -> None:
        self.block: nn.Module | None = None  # the block that runs
        self.position = 0  # its first place in the plan, from 1
        self.called: set[nn.Module] = set()  # its parts that were called so far
        self.output: Any = None  # what the last of these returned
        self.taken: Any = None  # what it took
        self.branches = False  # True if what a part took and returned was added up for the next

    def part_called(self, position: int, block: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of a block is called: a new block begins where it is another's, or was called before."""
        if self.follower.runs_elsewhere():
            return
        if block is not self.block or part in self.called:
            self.end_block()
            self.block, self.position = block, position
            self.follower.enter_block(position, block, args, kwargs)
        elif not self.branches:
            self.branches = bool(args) and is_sum(args[0], self.taken, self.output)
        self.called.add(part)
        self.taken = args[0] if args else None

    def part_returned(self, part: nn.Module, output: Any, failed: bool) -> None:
        """A part has returned; if it failed, so did its block."""
        if self.follower.runs_elsewhere():
            return
        self.output = output
        if failed:
            self.end_block(failed)

    def end_block(self, failed: bool = False) -> None:
        """No more parts of the running block come: report that it was left."""
        if self.block is not None and not self.follower.runs_elsewhere():
            position, block, output = self.position, self.block, self.output
            if self.branches and isinstance(output, Tensor):
                output = output.detach() + self.taken.detach()
            self._forget()
            self.follower.leave_block(position, block, output, failed)
