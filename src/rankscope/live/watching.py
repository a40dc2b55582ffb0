"""`watch`: measure any torch model while it runs, and leave it as it was.

    with watch(model) as w:
        model(**batch)
    w.profile()

Layer 0 is what the first block takes, layer l what block l returns. Metrics are computed in float64 on the
device where the tensors are; only the numbers are kept.

What happens, file by file: `watch` makes a `WatchPlan` for each stack of blocks (`plan.py`, which finds them by
`modules.py`), and a `Watch` of a `StackWatch` for each (`stack_watch.py` goes on from there). Where a model has an
encoder and a decoder, each stack has its own layers, its own tokens and its own padding, as if it were watched alone.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Unpack
from weakref import WeakSet

from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live.left_out import HeadsOut, Names, choose
from rankscope.live.modules import is_compiled, refuse_scripted, submodules, uncompiled
from rankscope.live.plan import Layers, WatchOptions, make_plans
from rankscope.live.stack_watch import AS_GIVEN, StackWatch
from rankscope.metrics import MetricsLike
from rankscope.profiles import DEFAULT_METRICS, Profile

_entered: WeakSet["Watch"] = WeakSet()  # watches that are inside their with


def watch(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Layers = None,
    *,
    variant: str = AS_GIVEN,
    **options: Unpack[WatchOptions],
) -> "Watch":
    """Return a context manager in which every call of the model is measured.

    What the model computes stays the same to the last bit. A pattern that a kernel does not return is
    computed a second time: in Hugging Face models, in `nn.MultiheadAttention`, and wherever a module calls
    `F.scaled_dot_product_attention` or flex attention, or writes its softmax out.

    Args:
        model: Any torch module; a compiled one runs uncompiled while it is watched.
        metrics: Metrics of tokens, of attention, of what each head adds (`head_mu`), or of how a mixture of
            experts routes its tokens (`expert_load`), by name or as a `Metric`.
        layers: Which of the layers 0..L to measure; all if None. Of several stacks each may have its own, as
            `{"encoder": [0, 6], "decoder": [0, 4]}`.
        variant: The name of the model in the table.
        options: `blocks`, `padding`, `attention_mask`, `layout`, `keep` and `attention`, as `WatchOptions` says.

    Returns:
        A `Watch`: enter it, call the model, and ask for `profile()`.

    Raises:
        WatchError: The model cannot be watched so, or an option is wrong.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, norm_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> with watch(model, ["mu", "dobrushin"]) as w:
    ...     _ = model(torch.randn(2, 5, 8))
    >>> w.profile().curve("mu").shape
    torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise WatchError(f"watch takes a torch module; received a {type(model).__name__}", subject="model")
    modules = submodules(model)
    refuse_scripted(modules)
    inner, compiled = uncompiled(model), is_compiled(modules)
    plans = make_plans(inner, metrics, layers, modules=modules, **options)
    modules = modules if inner is model else submodules(inner)
    watches = {
        name: StackWatch(inner, plan, compiled=compiled, modules=(plan.in_blocks, modules))
        for name, plan in plans.items()
    }
    return Watch(watches, variant)


class Watch:
    """A model that is being measured: what `watch` returns. Entered again after it was left, it continues to count.
    `stacks` has a `StackWatch` for each stack of blocks, by the stack's name: "" if there is only one. `variant` is the
    model's name in the table."""

    def __init__(self, stacks: Mapping[str, StackWatch], variant: str = AS_GIVEN) -> None:
        self.stacks, self.variant = dict(stacks), variant
        self.model = next(iter(self.stacks.values())).model
        self._entered: ExitStack | None = None

    def __repr__(self) -> str:
        counted = (
            f"{name and f'{name}: '}{stack.totals.samples} samples in {stack.totals.calls} calls"
            for name, stack in self.stacks.items()
        )
        return f"Watch({type(self.model).__name__}, {', '.join(counted)})"

    def __enter__(self) -> "Watch":
        require(self._entered is None, "this watch is already inside its with: use a second watch", WatchError, "watch")
        self._refuse_unlabelled()
        with ExitStack() as entered:
            for stack in self.stacks.values():
                entered.enter_context(stack)
            _entered.add(self)
            entered.callback(_entered.discard, self)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._entered is not None
        entered, self._entered = self._entered, None
        entered.__exit__(*error)

    def _refuse_unlabelled(self) -> None:
        """Raise if this watch and another of the same model would run at once, and one of them leaves parts out: the
        readings of the other would not say so."""
        sentence = "a model that runs without some of its parts must have one watch, whose readings say so"
        way = "leave that watch first; .without(...) may be repeated to leave out more"
        for entered in _entered:
            complete = not any(stack.plan.left_out for w in (self, entered) for stack in w.stacks.values())
            apart = complete or set(submodules(self.model)).isdisjoint(submodules(entered.model))
            require(apart, f"{sentence}; this model is watched already: {way}", WatchError, "without")

    def without(
        self,
        layers: Iterable[int] = (),
        heads: HeadsOut = (),
        *,
        branches: Names = (),
        norms: Names = (),
        skips: Names = (),
    ) -> "Watch":
        """Return a new watch inside whose `with` the model runs without some of its parts. After it they are back.

        Parts that this watch leaves out already stay out. Modules are named as in `model.named_modules()`; `*` stands
        for one step of a name, as in `layers.*.mlp`. Weights are not touched, and parts that are left out get no
        gradients. Rows, manifest and notes say what was left out; the run of a `Monitor` of the same model does not.

        Args:
            layers: Layers whose output is their input, numbered from 1, as in the table.
            heads: `{layer: heads}` or pairs (layer, head), heads numbered from 0: what they give to the output
                projection is 0; its bias stays.
            branches: Modules f, such as an MLP or attention, whose output becomes 0; a block must compute x + f(x).
            norms: Norms whose output becomes their input.
            skips: Modules f whose block then gives f(x), where it computes x + f(x).

        Raises:
            WatchError: There is no such part, or it cannot be left out exactly. The error comes here or when the model
                is called; for a part that never ran, when the watch is left.

        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, norm_first=True)
        >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> with torch.no_grad(), watch(model, "mu").without(layers=[2], branches="layers.*.self_attn") as w:
        ...     _ = model(torch.randn(2, 5, 8))
        >>> mu = w.profile().curve("mu")
        >>> bool((mu[:, 1] == mu[:, 2]).all())
        True
        """
        first, *further_stacks = self.stacks
        several = f"this watch has {first} and {' and '.join(further_stacks)}: name one, as in blocks={first!r}"
        sentence = f"parts are left out of a watch of one stack of blocks; {several}"
        require(not further_stacks, sentence, WatchError, "stacks")
        stack = self.stacks[first]
        out = choose(self.model, stack.plan.blocks, layers, heads, branches, norms, skips)
        return Watch({first: stack.without(out)}, self.variant)

    def profile(self) -> Profile:
        """What was measured so far, as `measure` gives it; samples are numbered on from call to call. Of several stacks
        each is a variant of the table; one that was not called is left out, as a decoder is by `generate`.

        Raises:
            WatchError: Nothing was measured; the message says why.
        """
        first, *further_stacks = self.stacks
        measured = [name for name, stack in self.stacks.items() if stack.totals.samples]
        if not further_stacks or not measured:
            return self.stacks[first].profile(self.variant)
        prefix = "" if self.variant == AS_GIVEN else f"{self.variant}: "
        return Profile.join([self.stacks[name].profile(f"{prefix}{name}") for name in measured])

    @property
    def notes(self) -> list[str]:
        """What was done and found so far, in sentences."""
        return [f"{name}: {note}" if name else note for name, stack in self.stacks.items() for note in stack.notes]

    @property
    def states(self) -> dict[int, list[Tensor]]:
        """With `keep="states"`: by layer, the hidden states `[batch, token, width]` of each call."""
        return self._only("states").states

    @property
    def attention(self) -> dict[int, list[Tensor]]:
        """With `keep="attention"`: by layer, the pattern `[batch, head, query, key]` of each call."""
        return self._only("attention").attention

    @property
    def embeddings(self) -> dict[int, Tensor]:
        """With `keep="embeddings"`: by layer, the mean of each sample's tokens `[sample, width]`, padding left out, of
        all calls one after another. A sample without tokens has no row."""
        return self._only("embeddings").embeddings

    def _only(self, what: str) -> StackWatch:
        """The one stack; an error says how to ask for one of several."""
        first, *further_stacks = self.stacks
        several = f"this watch has {first} and {' and '.join(further_stacks)}: ask for w.stacks[{first!r}].{what}"
        require(not further_stacks, f"{what} are those of one stack of blocks; {several}", WatchError, "stacks")
        return self.stacks[first]
