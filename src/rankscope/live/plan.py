"""What a watch measures: the options of `watch`, checked, with the blocks they are about.

`watch` and `Monitor` call `make_plans` once, before anything runs; it makes a `WatchPlan` for each stack of blocks.
Everything else in this room takes the plan and changes nothing in it but what calls of the model show: the layout
(`model_call.py`), which block is which layer, and whether a mask was found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from rankscope.errors import WatchError, one_of, require, require_one_of
from rankscope.live.attention import OBSERVERS, AttentionObserver
from rankscope.live.hidden_states import Layout, layout_is_known, layout_of, tokens_in_rows_and_columns
from rankscope.live.left_out import LeftOut
from rankscope.live.modules import Blocks, NamedStacks, find_blocks, named_stacks, own_parameters, stacks, submodules
from rankscope.live.padding import is_decoder, is_decoder_name
from rankscope.live.tensor_parallel import TensorParallel, tensor_parallel_of
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
    blocks: Blocks | NamedStacks | None = None,
    **options: Any,
) -> dict[str, WatchPlan]:
    """The plan of each stack that is measured, by the stack's name; of one stack alone the name is empty. `options` are
    those of `make_plan`; of `layers`, `padding` and `attention_mask` each stack may have its own."""
    names = named_stacks(model, blocks)
    options |= {"metrics": metrics, "layers": layers}
    for name in BY_STACK:
        option = options.get(name)
        if isinstance(option, Mapping):
            for stack in option.keys() - names.keys():
                known = sorted(filter(None, names)) or ["none, since one stack is measured"]
                raise WatchError(one_of(f"a stack in {name}", str(stack), known), subject=name)
        elif isinstance(option, Tensor) and len(names) > 1:
            came = f"one came for {' and '.join(names)}: give {name}={{{next(iter(names))!r}: ...}}"
            raise WatchError(f"{name} must be given for each stack of blocks; {came}", subject=name)
    by_stack = {name: option for name in BY_STACK if isinstance(option := options.get(name), Mapping)}
    plans = {}
    for stack, named in names.items():
        of_stack = {name: option.get(stack, BY_STACK[name]) for name, option in by_stack.items()}
        plans[stack] = make_plan(model, blocks=named, stack_name=stack, **(options | of_stack))
        plans[stack].blocks_named = blocks is not None
    _remark_on_special_tokens(model, plans)
    return plans


def make_plan(
    model: nn.Module,
    metrics: MetricsLike = DEFAULT_METRICS,
    layers: Sequence[int] | None = None,
    *,
    blocks: Blocks | None = None,
    padding: Tensor | Literal["model", "none"] = "model",
    attention_mask: Tensor | None = None,
    layout: str | None = None,
    keep: str | Sequence[str] = (),
    attention: Sequence[AttentionObserver] = OBSERVERS,
    modules: Sequence[nn.Module] | None = None,
    stack_name: str = "",
) -> WatchPlan:
    """Check the options of a watch of one stack, and find its blocks.

    Args:
        model: The model, without wrappers.
        metrics, layers, blocks, padding, attention_mask, layout, keep, attention: As in `watch`.
        modules: All modules of the model, where they are known.
        stack_name: What the stack is called beside another one.
    """
    modules = submodules(model) if modules is None else modules
    offloaded = any(_is_offloaded(module) for module in modules if "_hf_hook" in module.__dict__)
    in_place = offloaded or not any(map(attrgetter("is_meta"), own_parameters(modules)))
    sentence = f"{type(model).__name__} must hold its weights; they are on the meta device: load them first"
    require(in_place, sentence, WatchError, "model")
    chosen = list(_default_metrics()) if metrics is DEFAULT_METRICS else chosen_metrics("watch", metrics)
    kept = frozenset([keep] if isinstance(keep, str) else keep)
    for name in kept:
        require_one_of("keep", name, KEPT, WatchError)
    sentence = "metrics of heads need weights in place; the model's are offloaded: watch tokens or attention"
    require(not offloaded or all(metric.of != "heads" for metric in chosen), sentence, WatchError, "metrics")
    tensor_parallel = tensor_parallel_of(model)
    if tensor_parallel is not None and "attention" in kept:
        sentence = f"attention is kept in one process; {tensor_parallel.size} share this model: watch metrics of it"
        raise WatchError(sentence, subject="keep")
    known_padding = _padding(padding, attention_mask)
    stack, found_blocks = find_blocks(model, blocks)
    chosen_layers = _layers(model, found_blocks, layers)
    beyond = [metric for metric in chosen if metric.of != "tokens"]
    if beyond and chosen_layers == frozenset([0]):
        sentence = f"layer 0 has metrics of tokens alone; {beyond[0].name} is of {beyond[0].of}: name more layers"
        raise WatchError(sentence, subject="layers")
    in_blocks = submodules(*found_blocks)
    around_both = _around_both(model, stack, stack_name)
    return WatchPlan(
        metrics=chosen,
        blocks=found_blocks,
        stack=stack,
        name=stack_name,
        layers=chosen_layers,
        keep=kept,
        layout=layout_of(in_blocks, layout),
        layout_known=layout_is_known(found_blocks, layout),
        grid=tokens_in_rows_and_columns(in_blocks),
        padding=known_padding,
        padding_from_model=known_padding is None and padding == "model",
        decoder=bool(around_both) or is_decoder(model, stack),
        around_both=around_both,
        attention=tuple(attention),
        tensor_parallel=tensor_parallel,
        in_blocks=in_blocks,
    )


def _remark_on_special_tokens(model: nn.Module, plans: Mapping[str, WatchPlan]) -> None:
    """Remark on tokens that a model adds to those of its input, such as the class token of a ViT, in the plans of the
    stacks nearest to them."""
    in_blocks = {part for plan in plans.values() for part in plan.in_blocks}
    if not any(SPECIAL_TOKENS & part._parameters.keys() for part in submodules(model) if part not in in_blocks):
        return
    added: dict[str, list[str]] = {}  # by stack: how many tokens of which name
    names = {part: name for name, part in model.named_modules()}
    paths = {stack: (plan.stack or names[plan.blocks[0]]).split(".") for stack, plan in plans.items()}
    every = [*paths.values(), *(name.split(".") for name in stacks(model))]
    for name, weight in model.named_parameters():
        *path, last = name.split(".")
        if last not in SPECIAL_TOKENS:
            continue
        nearest = max(_shared(path, stack_path) for stack_path in every)
        for stack in (stack for stack, stack_path in paths.items() if _shared(path, stack_path) == nearest):
            added.setdefault(stack, []).append(f"{weight.numel() // weight.shape[-1]} of {last}")
    for stack, words in added.items():
        counted = "where they pass through the blocks they are counted among the tokens"
        what = f"The model adds tokens that stand for no part of its input ({', '.join(words)})"
        plans[stack].remarks[f"{what}: {counted}"] = None


def _shared(path: list[str], other: list[str]) -> int:
    """How many steps two dotted names have in common."""
    return next((k for k, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))


_default_metrics = cache(lambda: chosen_metrics("watch", DEFAULT_METRICS))


def _padding(padding: Tensor | str, attention_mask: Tensor | None) -> Tensor | None:
    """The padding that the user gave, True at padded tokens, or None."""
    if isinstance(padding, Tensor) or padding == "model":
        return padding_from(padding if isinstance(padding, Tensor) else None, attention_mask)
    expected = "a boolean tensor, 'model' or 'none', and 'model' beside an attention_mask"
    sentence = f"padding must be {expected}; got {padding!r}"
    require(padding == "none" and attention_mask is None, sentence, WatchError, "padding")
    return None


def _around_both(model: nn.Module, stack: str, stack_name: str) -> frozenset[nn.Module]:
    """The modules that hold both the decoder, if this stack's names say that it is one, and another stack."""
    if not is_decoder_name(stack) and not is_decoder_name(stack_name):
        return frozenset()
    path = stack.split(".")
    other_paths = [other.split(".") for other in stacks(model) if other != stack]
    shared = {k for other in other_paths for k in range(len(path)) if other[:k] == path[:k]}
    return frozenset(model.get_submodule(".".join(path[:k])) for k in shared)


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
