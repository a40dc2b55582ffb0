"""What a watch measures: the options of `watch`, checked, with the blocks they are about.

`watch` and `Monitor` call `make_plans` once, before anything runs; it makes a `WatchPlan` for each stack of blocks.
Everything else in this room takes the plan and changes nothing in it but what calls of the model show: the layout
(`model_call.py`), which block is which layer, and whether a mask was found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from operator import and_, attrgetter, eq
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from rankscope.errors import WatchError, one_of, require, require_one_of
from rankscope.live.attention import OBSERVERS, AttentionObserver
from rankscope.live.hidden_states import Layout, layout_of, tokens_in_rows_and_columns
from rankscope.live.modules import Blocks, NamedStacks, find_blocks, named_stacks, own_parameters, stacks, submodules
from rankscope.live.padding import is_decoder, is_decoder_name
from rankscope.live.processes import TensorParallel, tensor_parallel_of
from rankscope.metrics import Metric, MetricsLike, chosen_metrics, from_norms
from rankscope.nets import padding_from
from rankscope.profiles import DEFAULT_METRICS

# Names of parameters that are tokens beside those of the input.
SPECIAL_TOKENS = {"cls_token", "class_token", "class_embedding", "cls_embed", "dist_token", "distillation_token"}
SPECIAL_TOKENS |= {"register_tokens", "reg_token", "storage_tokens", "memory_tokens", "mem_tokens"}
KEPT = ("states", "attention", "embeddings")  # tensors that a watch can keep
Layers = Sequence[int] | Mapping[str, Sequence[int]] | None  # to measure: of each stack, or by stack
PaddingOption = Tensor | Literal["model", "none"]
Padding = PaddingOption | Mapping[str, PaddingOption]
Mask = Tensor | Mapping[str, Tensor] | None
BY_STACK: dict[str, Any] = {"layers": None, "padding": "model", "attention_mask": None}
"""Options of which each stack may have its own, and what a stack has that is not named."""


class WatchOptions(TypedDict, total=False):
    """Options of `watch`, by name; all may be left out.

    Args:
        blocks: The stack of blocks where it is not found by itself: a dotted name, or a list of names or modules; or
            several stacks by name, `{"text": "text_model.layers", "image": "vision_model.layers"}`. Two stacks, such
            as an encoder and a decoder, are found and measured side by side.
        padding: `[batch, token]`, True at padded tokens; "model" to take the mask that the model is called
            with; "none" to count every token. Of several stacks each may have its own, by name.
        attention_mask: `[batch, token]`, 1 at tokens and 0 at padding, in place of `padding`; also by name of stacks.
        layout: "batch first", "token first" or "width second", where blocks do not say: the order of the axes of
            their hidden states, `[batch, token, width]`, `[token, batch, width]` or `[batch, width, token]`.
        keep: "states", "attention" or both: whole tensors, brought to the CPU; "embeddings": the mean of each sample's
            tokens, for `rankscope.metrics.samples`.
        attention: The ways to see attention, of which the first that applies is used; put one of your own
            before the built-in ones, `[Mine(), *rankscope.live.OBSERVERS]`.
    """

    blocks: Blocks | NamedStacks | None
    padding: Padding
    attention_mask: Mask
    layout: str | None
    keep: str | Sequence[str]
    attention: Sequence[AttentionObserver]


@dataclass(frozen=True)
class LeftOut:
    """The parts that a watch leaves out of a model. Modules are listed by their dotted names."""

    layers: frozenset[int] = frozenset()  # numbered from 1
    heads: Mapping[int, frozenset[int]] = field(default_factory=dict)  # by layer, numbered from 0
    branches: Mapping[str, nn.Module] = field(default_factory=dict)  # what they give becomes 0
    norms: Mapping[str, nn.Module] = field(default_factory=dict)  # they give what they take
    skips: Mapping[str, nn.Module] = field(default_factory=dict)  # what they give is not added to anything
    asked: tuple[str, ...] = ()  # all of it in words, with names as the user wrote them

    def __bool__(self) -> bool:
        return bool(self.asked)

    def beside(self, other: "LeftOut") -> "LeftOut":
        """The parts that this choice or the other leaves out."""
        heads = {
            layer: self.heads.get(layer, frozenset()) | other.heads.get(layer, frozenset())
            for layer in sorted(self.heads.keys() | other.heads.keys())
        }
        branches, norms, skips = ({**self._modules[k], **other._modules[k]} for k in range(3))
        asked = tuple(dict.fromkeys(self.asked + other.asked))
        return LeftOut(self.layers | other.layers, heads, branches, norms, skips, asked)

    @property
    def words(self) -> list[str]:
        """Everything that is left out, each part by its full name."""
        return words_of(self.layers, self.heads, self._modules)

    @property
    def _modules(self) -> tuple[Mapping[str, nn.Module], ...]:
        return self.branches, self.norms, self.skips


@dataclass
class WatchPlan:
    """The options of a watch, and what was found out about the model's blocks."""

    metrics: Sequence[Metric]
    blocks: list[nn.Module]  # in order; one that is called several times may stand there several times
    stack: str = ""  # the dotted name of the blocks; empty where they were listed one by one
    name: str = ""  # what this stack is called beside another one that is measured; empty where it is the only one
    layers: frozenset[int] | None = None  # to measure; None for all
    keep: frozenset[str] = frozenset()  # of KEPT
    layout: Layout = "batch first"
    layout_known: bool = True  # by the user, by whoever wrote the blocks, or since attention showed it
    grid: bool = False  # hidden states of four axes are tokens in rows and columns
    padding: Tensor | None = None  # [batch, token], True at padding, where the user gave it
    padding_from_model: bool = True  # find the padding in the arguments of the model's call
    blocks_named: bool = False  # by the user, not found
    decoder: bool = False  # the blocks are the decoder of a model that has an encoder as well
    around_both: frozenset[nn.Module] = frozenset()  # of a decoder: the modules that hold the encoder as well
    attention: Sequence[AttentionObserver] = OBSERVERS
    training_only: bool = False  # calls that are no training batches do not count, such as evaluations
    tensor_parallel: TensorParallel | None = None  # the processes that share the blocks, if several do
    left_out: LeftOut = field(default_factory=LeftOut)  # parts of the model that do not count while it is watched
    in_blocks: Sequence[nn.Module] = ()  # all modules in the blocks, as they were when the plan was made
    remarks: dict[str, None] = field(default_factory=dict)  # on how tokens were read, without a full stop
    unmasked: bool = False  # a call said nothing of padding where it was looked for
    tokens: int | None = None  # of the longest sample of the last call that a monitor read; None if it has read none
    called: dict[int, int] = field(default_factory=dict)  # by layer, the place of its block in `blocks`, from 1
    known_scores: dict[int, tuple[tuple[object, ...], int]] = field(default_factory=dict)
    """Layers in which scores that were made again have given what attention gave: their `kind`, and calls since."""

    def measures(self, layer: int) -> bool:
        """True if this layer is to be measured."""
        return self.layers is None or layer in self.layers

    def wants(self, of: str) -> bool:
        """True if a metric of this kind ("attention", "heads", ...), or a tensor to keep, is asked for."""
        return of in self._wanted

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return self.keep.union(metric.of for metric in self.metrics)

    @cached_property
    def norms_suffice(self) -> bool:
        """True if norms of hidden states are all that the metrics of tokens ask for."""
        of_tokens = [metric for metric in self.metrics if metric.of == "tokens"]
        return bool(of_tokens) and all(map(from_norms, of_tokens))

    @property
    def wants_attention(self) -> bool:
        """True if attention must be seen: for metrics of its pattern, of its scores or of heads, or to keep it."""
        return any(map(self.wants, ("attention", "scores", "heads")))


def make_plans(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Layers = None,
    *,
    modules: Sequence[nn.Module] | None = None,
    **options: Unpack[WatchOptions],
) -> dict[str, WatchPlan]:
    """The plan of each stack that is measured, by the stack's name; of one stack alone the name is empty. Arguments are
    those of `make_plan`; of `layers`, `padding` and `attention_mask` each stack may have its own."""
    for name in options.keys() - WatchOptions.__annotations__.keys():
        raise WatchError(one_of("options", name, ["variant", *WatchOptions.__annotations__]), subject=name)
    blocks = options.pop("blocks", None)
    by_name, given = named_stacks(model, blocks), {"layers": layers, **options}
    for name in BY_STACK:
        option = given.get(name)
        if isinstance(option, Mapping):
            for stack in option.keys() - by_name.keys():
                known = sorted(filter(None, by_name)) or ["none, since one stack is measured"]
                raise WatchError(one_of(f"a stack in {name}", str(stack), known), subject=name)
        elif isinstance(option, Tensor) and len(by_name) > 1:
            fault = f"one came for {' and '.join(by_name)}: give {name}={{{next(iter(by_name))!r}: ...}}"
            raise WatchError(f"{name} must be given for each stack of blocks; {fault}", subject=name)
    plans = {}
    for stack, of_stack in by_name.items():
        chosen: Any = {
            name: option.get(stack, BY_STACK[name]) if name in BY_STACK and isinstance(option, Mapping) else option
            for name, option in given.items()
        }
        plans[stack] = make_plan(model, metrics, blocks=of_stack, modules=modules, stack_name=stack, **chosen)
        plans[stack].blocks_named = blocks is not None
    _remark_on_special_tokens(model, plans)
    return plans


def make_plan(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Sequence[int] | None = None,
    *,
    modules: Sequence[nn.Module] | None = None,
    stack_name: str = "",
    **options: Unpack[WatchOptions],
) -> WatchPlan:
    """Check the options of a watch of one stack, and find its blocks.

    Args:
        model: The model, without wrappers.
        metrics, layers: As in `watch`.
        modules: All modules of the model, where they are known.
        stack_name: What the stack is called beside another one.
        options: Those of `WatchOptions`, of one stack.
    """
    modules = submodules(model) if modules is None else modules
    offloaded = any(_is_offloaded(module) for module in modules if "_hf_hook" in module.__dict__)
    in_place = offloaded or not any(map(attrgetter("is_meta"), own_parameters(modules)))
    sentence = f"{type(model).__name__} must hold its weights; they are on the meta device: load them first"
    require(in_place, sentence, WatchError, "model")
    chosen = list(_default_metrics()) if metrics is DEFAULT_METRICS else chosen_metrics("watch", metrics)
    keep = options.get("keep", ())
    kept = frozenset([keep] if isinstance(keep, str) else keep)
    for name in kept:
        require_one_of("keep", name, KEPT, WatchError)
    sentence = "metrics of heads need weights in place; the model's are offloaded: watch tokens or attention"
    require(not offloaded or all(metric.of != "heads" for metric in chosen), sentence, WatchError, "metrics")
    tensor_parallel = tensor_parallel_of(model)
    if tensor_parallel is not None and "attention" in kept:
        sentence = f"attention is kept in one process; {tensor_parallel.size} share this model: watch metrics of it"
        raise WatchError(sentence, subject="keep")
    of_stack: Any = options  # nothing by name of a stack
    padding = of_stack.get("padding", "model")
    known_padding = _padding(padding, of_stack.get("attention_mask"))
    stack, found_blocks = find_blocks(model, of_stack.get("blocks"))
    chosen_layers = _layers(model, found_blocks, layers)
    beyond = [metric for metric in chosen if metric.of != "tokens"]
    if beyond and chosen_layers == frozenset([0]):
        sentence = f"layer 0 has metrics of tokens alone; {beyond[0].name} is of {beyond[0].of}: name more layers"
        raise WatchError(sentence, subject="layers")
    in_blocks = submodules(*found_blocks)
    layout, layout_known = layout_of(found_blocks, in_blocks, options.get("layout"))
    around_both = _around_both(model, stack, stack_name)
    return WatchPlan(
        metrics=chosen,
        blocks=found_blocks,
        stack=stack,
        name=stack_name,
        layers=chosen_layers,
        keep=kept,
        layout=layout,
        layout_known=layout_known,
        grid=tokens_in_rows_and_columns(in_blocks),
        padding=known_padding,
        padding_from_model=known_padding is None and padding == "model",
        decoder=bool(around_both) or is_decoder(model, stack),
        around_both=around_both,
        attention=options.get("attention", OBSERVERS),
        tensor_parallel=tensor_parallel,
        in_blocks=in_blocks,
    )


def _remark_on_special_tokens(model: nn.Module, plans: Mapping[str, WatchPlan]) -> None:
    """Remark on tokens that a model adds to those of its input, such as the class token of a ViT, in the plans of the
    stacks nearest to them."""
    in_blocks = {part for plan in plans.values() for part in plan.in_blocks}
    adding = [x for x in submodules(model) if SPECIAL_TOKENS & x._parameters.keys() and x not in in_blocks]
    if not adding:
        return
    added: dict[str, list[str]] = {}  # by stack: how many tokens of which name
    names = {part: name for name, part in model.named_modules()}
    paths = {stack: (plan.stack or names[plan.blocks[0]]).split(".") for stack, plan in plans.items()}
    every = [*paths.values(), *(name.split(".") for name in stacks(model))]
    for part in adding:
        path = names[part].split(".") if names[part] else []
        nearest = max(_shared(path, stack_path) for stack_path in every)
        near = [stack for stack, stack_path in paths.items() if _shared(path, stack_path) == nearest]
        for name, weight in part._parameters.items():
            if name in SPECIAL_TOKENS and weight is not None:
                for stack in near:
                    added.setdefault(stack, []).append(f"{weight.numel() // weight.shape[-1]} of {name}")
    for stack, words in added.items():
        counted = "where they pass through the blocks they are counted among the tokens"
        what = f"The model adds tokens that stand for no part of its input ({', '.join(words)})"
        plans[stack].remarks[f"{what}: {counted}"] = None


def words_of(layers: Iterable[int], heads: Mapping[int, Iterable[int]], names: Iterable[Iterable[str]]) -> list[str]:
    """Layers, heads by layer, and the `names` of branches, norms and skips, each part in words."""
    words = [f"layer {layer}" for layer in sorted(layers)]
    for layer, chosen in heads.items():
        numbers = sorted(chosen)
        words.append(f"head{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))} of layer {layer}")
    for kind, some in zip(("branch", "norm", "skip around"), names, strict=True):
        words += [f"{kind} {name}" for name in some]
    return words


def _shared(path: list[str], other: list[str]) -> int:
    """How many steps two dotted names have in common, from the first on."""
    return sum(accumulate(map(eq, path, other), and_))


_default_metrics = cache(lambda: chosen_metrics("watch", DEFAULT_METRICS))


def _padding(padding: Tensor | str, attention_mask: Tensor | None) -> Tensor | None:
    """The padding that the user gave, True at padded tokens, or None."""
    if isinstance(padding, Tensor) or (padding == "model" and attention_mask is not None):
        return padding_from(padding if isinstance(padding, Tensor) else None, attention_mask)
    expected = "a boolean tensor, 'model' or 'none', and 'model' beside an attention_mask"
    sentence = f"padding must be {expected}; got {padding!r}"
    require(padding in ("model", "none") and attention_mask is None, sentence, WatchError, "padding")
    return None


def _around_both(model: nn.Module, stack: str, stack_name: str) -> frozenset[nn.Module]:
    """The modules that hold both the decoder, if this stack's names say that it is one, and another stack."""
    if not is_decoder_name(stack) and not is_decoder_name(stack_name):
        return frozenset()
    path = stack.split(".")
    shared = [_shared(path, other.split(".")) for other in stacks(model) if other != stack]
    return frozenset(model.get_submodule(".".join(path[:k])) for k in range(max(shared, default=-1) + 1))


def _is_offloaded(module: nn.Module) -> bool:
    """True if accelerate brings the weights of this module while it runs, and takes them away again."""
    hook = vars(module).get("_hf_hook")
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def _layers(model: nn.Module, blocks: list[nn.Module], layers: Sequence[int] | None) -> frozenset[int] | None:
    """The layers to measure, checked; None for all. Layer 0 is what the first block takes, the last is the number of
    blocks, or the config's number of layers where that is larger: one block may be called many times."""
    if layers is None:
        return None
    if isinstance(layers, int):
        raise WatchError(f"layers must be a list; got {layers!r}: write layers=[{layers!r}]", subject="layers")
    configured = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    last = max(len(blocks), configured if isinstance(configured, int) else 0)
    wrong = [layer for layer in layers if type(layer) is not int or not 0 <= layer <= last]
    require(layers and not wrong, f"layers must name layers 0..{last}; got {wrong or 'none'}", WatchError, "layers")
    return frozenset(layers)
