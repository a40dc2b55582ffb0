"""`StackWatch`: one stack of a model's blocks, measured while the model runs.

`watching.py` and the monitor make one for each stack, of its `WatchPlan`. Entering it attaches hooks to the model and
its blocks (`block_hooks.py`) and, if metrics ask for it, the first observer of `attention/` that applies and hooks on
routers; all report to its recorder (`recorder.py` has the order of events). Leaving removes them. `profile` makes a
table of the recorder's totals, and `notes` says in sentences what was done (`notes.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live import processes
from rankscope.live.attention import AttentionCall, WatchedBlocks
from rankscope.live.attention.head_outputs import may_project
from rankscope.live.attention.multihead import without_nested_tensors
from rankscope.live.block_hooks import block_hooks
from rankscope.live.hooks import Hooks
from rankscope.live.left_out import Removal
from rankscope.live.modules import describe_model, dtype_name, hooked, parts_in, submodules
from rankscope.live.notes import checks, notes
from rankscope.live.plan import LeftOut, WatchPlan
from rankscope.live.recorder import CACHED, Recorder
from rankscope.profiles import Profile, ReadingRow, Readings, readings_table
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
        self._recorder = Recorder(plan, self._blocks, in_blocks, contained)
        self._removal = Removal(model, plan) if plan.left_out else None
        self._before, self._after = block_hooks(self._blocks, self._recorder)
        self._encoders = [module for module in everywhere if isinstance(module, nn.TransformerEncoder)]
        self._changes: dict[str, None] = {}  # how the model ran otherwise than unwatched, in sentences
        self._stack: Hooks | None = None  # hooks and contexts that leaving undoes; None outside

    def __repr__(self) -> str:
        return f"StackWatch({type(self.model).__name__}, {self.samples} samples in {self.calls} calls)"

    def __enter__(self) -> "StackWatch":
        require(self._stack is None, "this watch is already inside its with: use a second watch", WatchError, "watch")
        plan, recorder = self.plan, self._recorder
        with recorder.beginning(), Hooks(self._of_this_thread) as stack:
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
                stack.enter_context(hooked(filter(may_project, parts_in(self._blocks)), recorder.on_projection))
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
            with self._recorder.stopped():
                stack.close()
        finally:
            stack.close()
        if self._removal is not None and kind is None:
            self._removal.check()

    def without(self, out: LeftOut) -> "StackWatch":
        """A new watch of the same stack, without these parts and those that this watch leaves out."""
        plan = replace(self.plan, left_out=self.plan.left_out.beside(out), known_scores={})
        return StackWatch(self.model, plan, compiled=self._compiled, contained=self._contained, modules=self._modules)

    def profile(self, variant: str = AS_GIVEN) -> Profile:
        """What was measured so far, under the name `variant`; as in `Watch.profile`."""
        totals = self._recorder.totals
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
    def samples(self) -> int:
        """The number of samples that were measured so far."""
        return self._recorder.totals.samples

    @property
    def calls(self) -> int:
        """The number of calls of the model so far."""
        return self._recorder.totals.calls

    @property
    def failure(self) -> Exception | None:
        """The error of a hook that was contained, after which nothing was measured any more."""
        return self._recorder.failure

    @property
    def readings(self) -> list[tuple[int, Readings]]:
        """(layer, readings of its metrics), call by call."""
        return [(layer, rows) for layer, _, rows in self._recorder.totals.readings]

    @property
    def valid(self) -> Tensor:
        """Which tokens of the last call that was measured are no padding, `[batch, token]`; of no call, none are."""
        return self._recorder.totals.valid

    @property
    def notes(self) -> list[str]:
        """What was done and found so far, in sentences."""
        return notes(self.plan, self._recorder.totals, [*self._changes])

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

    @property
    def arithmetic(self) -> torch.dtype:
        """The coarsest dtype that the model computed in; float64 before it was called."""
        return self._recorder.totals.arithmetic or torch.float64

    def _named(self, variant: str) -> str:
        """The name of the model in the table, with what is left out."""
        if not self.plan.left_out:
            return variant
        out = f"without {', '.join(self.plan.left_out.asked)}"
        return out if variant == AS_GIVEN else f"{variant} {out}"

    def _on_attention(self, attention: AttentionCall) -> None:
        """Attention was seen: it is measured, unless it is left out or only seen for the heads that are."""
        if self._removal is not None:
            self._removal.heads.on_attention(attention)
        if not self.plan.wants_attention:
            return
        self._recorder.on_attention(attention, left_out=self._removal is not None and self._removal.running > 0)

    def _on_module_output(self, module: nn.Module, args: object, output: object) -> None:
        """A module in a block returned: it may be a router."""
        if self._removal is None or not self._removal.running:
            self._recorder.on_module_output(module, args, output)

    def _kept(self, what: str) -> dict[int, list[Tensor]]:
        sentence = f"{what} are kept when asked for: watch(model, keep={what!r})"
        require(what in self.plan.keep, sentence, WatchError, "keep")
        return dict(sorted(self._recorder.totals.kept[what].items()))

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
