"""`watch`: measure any torch model while it runs, and leave it as it was.

    with watch(model) as w:
        model(**batch)
    w.profile()

Layer 0 is what the first block takes, layer l what block l returns. Metrics are computed in float64 on the
device where the tensors are; only the numbers are kept.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal
from weakref import WeakSet

from torch import Tensor, nn

from rankscope.errors import WatchError, one_of
from rankscope.live.blocks import Blocks, blocks_of, finer
from rankscope.live.call import Plan
from rankscope.live.compiled import eagerly, is_compiled, original, refuse
from rankscope.live.flex import flexible
from rankscope.live.functions import Functions
from rankscope.live.heads import projections
from rankscope.live.interface import calls_torch, is_outside, owner_of, refusal, through_interface
from rankscope.live.mask import arguments_of, is_decoder
from rankscope.live.modules import parts, weights
from rankscope.live.multihead import multiheads, through_hooks, unfused
from rankscope.live.notes import checks, described, dtype_name, notes
from rankscope.live.recorder import CACHED, Recorder
from rankscope.live.routing import routers
from rankscope.live.spans import Spans, is_span, parts_of
from rankscope.live.states import in_rows_and_columns, layout_of
from rankscope.live.telling import told_to
from rankscope.metrics import MetricsLike, chosen_metrics
from rankscope.profiles import DEFAULT_METRICS, Profile
from rankscope.profiles.rows import Entry, Found, table
from rankscope.runs import manifest_of

_attended: WeakSet[nn.Module] = WeakSet()
"""Blocks whose attention is being watched."""


def watch(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Sequence[int] | None = None,
    *,
    blocks: Blocks | None = None,
    padding: Tensor | Literal["model", "none"] = "model",
    layout: str | None = None,
    keep: str | Sequence[str] = (),
    variant: str = "as given",
) -> "Watch":
    """A context manager in which every call of the model is measured.

    `metrics` may be of tokens, of attention, of what each head adds (`head_mu`), or of how a mixture of
    experts routes its tokens (`expert_load`), by name or as a `Metric`;
    `layers` says which of 0..L to measure, all if left out. `blocks` names the stack of blocks where it is
    not found by itself: a dotted name, or a list of names or modules. `padding` is the model's own mask, or
    `[batch, token]`, True at padded tokens, or "none"; `layout` is "batch first" or "token first" where
    blocks do not say. `keep` may hold "states" and "attention": whole tensors, brought to the CPU. `variant`
    names the model in the table.

    Metrics of tokens leave the model's attention as it is. So do those of attention and heads: weights that
    a kernel keeps to itself are computed beside it, in Hugging Face models, in `nn.MultiheadAttention` and
    wherever a module calls `F.scaled_dot_product_attention`, flex attention, or writes its softmax out.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, norm_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> with watch(model, ["mu", "dobrushin"]) as w:
    ...     _ = model(torch.randn(2, 5, 8))
    >>> w.profile().curve("mu").shape
    torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise WatchError(f"watch takes a torch module; received a {type(model).__name__}")
    inside = parts(model)
    refuse(inside)
    inner = original(model)
    plan, found = planned(inner, metrics, layers, blocks=blocks, padding=padding, layout=layout, keep=keep)
    return Watch(inner, plan, found, variant, compiled=is_compiled(inside))


def planned(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Sequence[int] | None = None,
    *,
    blocks: Blocks | None = None,
    padding: Tensor | Literal["model", "none"] = "model",
    layout: str | None = None,
    keep: str | Sequence[str] = (),
) -> tuple[Plan, list[nn.Module]]:
    """What to look for in a model, and its blocks; the options are those of `watch`."""
    inside = parts(model)
    offloaded = any(_is_offloaded(part) for part in inside if "_hf_hook" in part.__dict__)
    if not offloaded and any(weight.is_meta for weight in weights(inside)):
        raise WatchError(
            f"{type(model).__name__} must hold numbers to measure; its weights are on the meta device: load "
            "them first"
        )
    chosen = chosen_metrics("watch", metrics)
    kept = frozenset([keep] if isinstance(keep, str) else keep)
    for each in kept - {"states", "attention"}:
        raise WatchError(one_of("keep", each, ("states", "attention")))
    if not isinstance(padding, Tensor) and padding not in ("model", "none"):
        raise WatchError(f"padding must be a boolean tensor, 'model' or 'none'; got {padding!r}")
    if offloaded and any(each.of == "heads" for each in chosen):
        raise WatchError(
            f"what each head adds is read off the output projection; weights of {type(model).__name__} are "
            "offloaded, and gone when it has run: watch metrics of tokens or attention"
        )
    name, found = blocks_of(model, blocks)
    of_blocks = parts(*found)
    measured = _layers(model, found, layers)
    beyond = [metric for metric in chosen if metric.of != "tokens"]
    if beyond and measured == frozenset([0]):
        raise WatchError(
            "at layer 0, what enters the first block, metrics of tokens alone have a value; "
            f"{beyond[0].name} is of {beyond[0].of}, from layer 1 on: name more layers"
        )
    plan = Plan(
        metrics=chosen,
        layers=measured,
        keep=kept,
        layout=layout_of(of_blocks, layout),
        grid=in_rows_and_columns(of_blocks),
        padding=padding if isinstance(padding, Tensor) else None,
        own_padding=isinstance(padding, str) and padding == "model",
        found=blocks is None,
        finer=lambda: finer(name, found),
        decoder=is_decoder(model, name),
    )
    return plan, found


class Watch:
    """A model being measured: see `watch`. It may be entered again, and goes on counting."""

    def __init__(
        self, model: nn.Module, plan: Plan, blocks: list[nn.Module], variant: str, *, compiled: bool = False
    ) -> None:
        """`compiled`: whether the model is, so that this watch must see to it that it runs as written."""
        self.model = model
        self.variant = variant
        self._compiled = compiled
        self._plan = plan
        self._blocks = list(dict.fromkeys(blocks))
        self._seen = Recorder(plan, blocks)
        self._changes: list[str] = []
        self._stack: ExitStack | None = None

    def __repr__(self) -> str:
        seen = self._seen
        return f"Watch({type(self.model).__name__}, {seen.samples} samples in {seen.calls} calls)"

    def __enter__(self) -> "Watch":
        if self._stack is not None:
            raise WatchError("this watch is already inside its with: use a second watch")
        with ExitStack() as stack:
            if self._compiled:
                stack.enter_context(eagerly())
                self._changed("The model is compiled: while watched, its original ran as it was written.")
            if stack.enter_context(unfused(parts(self.model))):
                self._changed("While watched, torch's fused encoder and its nested tensors were off.")
            if self._plan.wants("attention") or self._plan.wants("heads"):
                self._watch_attention(stack)
            if self._plan.wants("routing"):
                stack.enter_context(routers(self._blocks, self._seen.routed))
            self._watch_blocks(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        self._seen.reset()
        stack.close()

    def profile(self) -> Profile:
        """What was measured so far, as `measure` gives it; samples are numbered on from call to call."""
        seen = self._seen
        if not seen.calls:
            raise WatchError("the model was not called inside watch: call model(...), not model.forward(...)")
        if not seen.samples:
            why = "; ".join(f"{number} left out: {why}" for why, number in seen.left_out.items())
            if CACHED in seen.left_out:
                why += ": call the model on a whole sequence"
            raise WatchError(
                f"of {seen.calls} calls of the model none was measured: "
                + (why or "none of its blocks was called; name those that are with blocks=")
            )
        assert seen.arithmetic is not None
        arithmetic = dtype_name(seen.arithmetic)
        order = {each.name: k for k, each in enumerate(self._plan.metrics)}
        entries = [Entry(layer, start, *pair) for layer, start, found in seen.found for pair in found]
        entries.sort(key=lambda entry: (entry.start, entry.layer, order[entry.metric.name]))
        said = described(self.model)
        device = ", ".join(said["model"]["devices"])
        return Profile(
            table(entries, self.variant, arithmetic),
            manifest_of(said, device, self.variant, arithmetic, list(order), checks(seen)),
        )

    @property
    def readings(self) -> list[tuple[int, Found]]:
        """(layer, what was read of it), call by call."""
        return [(layer, found) for layer, _, found in self._seen.found]

    @property
    def notes(self) -> list[str]:
        """What was done and found so far, in sentences."""
        return notes(self._seen, self._changes)

    @property
    def states(self) -> dict[int, list[Tensor]]:
        """With `keep="states"`: by layer, the state `[batch, token, width]` of each call, on the CPU."""
        return self._kept("states")

    @property
    def attention(self) -> dict[int, list[Tensor]]:
        """With `keep="attention"`: by layer, the weights `[batch, head, token, token]` of each call."""
        return self._kept("attention")

    def _kept(self, what: str) -> dict[int, list[Tensor]]:
        if what not in self._plan.keep:
            raise WatchError(f"{what} are kept when asked for: watch(model, keep={what!r})")
        return dict(sorted(self._seen.kept[what].items()))

    def _changed(self, said: str) -> None:
        if said not in self._changes:  # entered again
            self._changes.append(said)

    def _watch_blocks(self, stack: ExitStack) -> None:
        seen = self._seen

        def before(module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
            stack.callback(module.register_forward_pre_hook(called, with_kwargs=True).remove)

        def after(module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
            stack.callback(module.register_forward_hook(called, always_call=True).remove)

        # The hooks of what is around are the outer ones, also where the model is itself a block.
        outer = [self.model, *around(self.model, self._blocks[0])]
        for part in outer:
            before(part, partial(seen.begin, alone=part is not self.model))
        spans = Spans(seen.enter, seen.leave)
        for block in self._blocks:
            if is_span(block):
                for part in parts_of(block):
                    before(part, partial(spans.before, block))
                    after(part, lambda module, args, output: spans.after(output, _failed(output)))
                continue
            before(block, lambda module, args, kwargs: seen.enter(module, args, kwargs))
            after(block, lambda module, args, output: seen.leave(module, output, _failed(output)))
        if any(map(is_span, self._blocks)):
            after(outer[-1], lambda module, args, output: spans.end(_failed(output)))
        for part in multiheads(self._blocks):
            before(
                part,
                lambda module, args, kwargs: seen.padded_attention(
                    arguments_of(module, args, kwargs).get("key_padding_mask")
                ),
            )
        for part in outer:
            after(part, lambda module, args, output: seen.end(_failed(output)))

    def _watch_attention(self, stack: ExitStack) -> None:
        if any(block in _attended for block in self._blocks):
            raise WatchError(
                "the attention of this model is already being watched: leave the other watch first"
            )
        own = multiheads(self._blocks)
        telling = told_to(self._blocks, self._seen.told)
        owner = owner_of(self.model, self._blocks)
        outside = owner is None or is_outside(owner)
        if owner is not None and outside and not (own or telling) and not calls_torch(owner):
            raise WatchError(refusal(owner))
        _attended.update(self._blocks)
        stack.callback(_attended.difference_update, self._blocks)
        if telling is not None:
            stack.enter_context(telling)
            return
        if own:
            stack.enter_context(through_hooks(own, self._seen.multihead))
            return
        if outside:
            self._seen.functions = Functions(self._seen.function)
            stack.enter_context(flexible(self._blocks, self._seen.functions))
            self._changed("Attention was seen in torch's functions; weights are those before dropout.")
        else:
            before = owner.config._attn_implementation  # type: ignore[union-attr]
            if before != "eager":
                self._changed(f"Attention ran with {before}; its weights were computed beside, undropped.")
            stack.enter_context(through_interface(self._blocks, self._seen.attention))
        if self._plan.wants("heads"):
            stack.enter_context(projections(self._blocks, self._seen.projected, self._seen.wrapped))


def around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The parts of the model that hold a block, from the outside in, without the model itself."""
    named = model.named_modules(remove_duplicate=False)
    steps = next((name for name, part in named if part is block), "").split(".")[:-1]
    holders = [model.get_submodule(".".join(steps[: k + 1])) for k in range(len(steps))]
    return [part for part in holders if not isinstance(part, nn.ModuleList | nn.ModuleDict)]


def _is_offloaded(part: nn.Module) -> bool:
    """Whether accelerate brings the weights of this part while it runs, and takes them away again."""
    hook = vars(part).get("_hf_hook")
    return any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ())))


def _failed(output: Any) -> bool:
    """torch calls these hooks also while an exception passes, with no output."""
    return output is None and sys.exc_info()[0] is not None


def _layers(model: nn.Module, blocks: list[nn.Module], asked: Sequence[int] | None) -> frozenset[int] | None:
    """Which layers to measure; a block that is called many times makes as many layers as the config says."""
    if asked is None:
        return None
    if isinstance(asked, int):
        raise WatchError(f"layers must be a list of layers; got {asked!r}: write layers=[{asked!r}]")
    said = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    last = max(len(blocks), said if isinstance(said, int) else 0)
    wrong = [layer for layer in asked if type(layer) is not int or not 0 <= layer <= last]
    if wrong or not asked:
        raise WatchError(f"layers must name layers 0..{last}; got {wrong or 'none'}")
    return frozenset(asked)
