"""What a watch measures: the options of `watch`, checked, with the blocks they are about.

`watch` and `Monitor` call `make_plan` once, before anything runs. Everything else in this room takes the
`WatchPlan` and changes nothing in it but the layout, which the first call of the model may show (`first_input.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Literal

from torch import Tensor, nn

from rankscope.errors import WatchError, one_of
from rankscope.live.attention import OBSERVERS, AttentionObserver
from rankscope.live.blocks import Blocks, find_blocks
from rankscope.live.hidden_states import Layout, layout_is_known, layout_of, tokens_in_rows_and_columns
from rankscope.live.left_out import LeftOut
from rankscope.live.modules import own_parameters, submodules
from rankscope.live.padding import is_decoder
from rankscope.live.tensor_parallel import TensorParallel, tensor_parallel_of
from rankscope.metrics import Metric, MetricsLike, chosen_metrics
from rankscope.metrics.residuals import from_norms
from rankscope.nets.padding import padding_from
from rankscope.profiles import DEFAULT_METRICS

KEPT = ("states", "attention", "embeddings")  # tensors that a watch can keep


@dataclass
class WatchPlan:
    """The options of a watch, and what was found out about the model's blocks."""

    metrics: Sequence[Metric]
    blocks: list[nn.Module]  # in order; one that is called several times may stand there several times
    stack: str = ""  # the dotted name of the blocks; empty where they were listed one by one
    layers: frozenset[int] | None = None  # to measure; None for all
    keep: frozenset[str] = frozenset()  # of KEPT
    layout: Layout = "batch first"
    layout_known: bool = True  # by the user, by whoever wrote the blocks, or since attention showed it
    grid: bool = False  # hidden states of four axes are tokens in rows and columns
    padding: Tensor | None = None  # [batch, token], True at padding, where the user gave it
    padding_from_model: bool = True  # find the padding in the arguments of the model's call
    blocks_named: bool = False  # by the user, not found
    decoder: bool = False  # the blocks are the decoder of a model that has an encoder as well
    attention: Sequence[AttentionObserver] = OBSERVERS
    training_only: bool = False  # calls that are no training batches do not count, such as evaluations
    tensor_parallel: TensorParallel | None = None  # the processes that share the blocks, if several do
    left_out: LeftOut = field(default_factory=LeftOut)  # parts of the model that do not count while it is watched
    in_blocks: Sequence[nn.Module] = ()  # all modules in the blocks, as they were when the plan was made
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
) -> WatchPlan:
    """Check the options of a watch, and find the blocks of the model.

    Args:
        model: The model, without wrappers.
        metrics, layers, blocks, padding, attention_mask, layout, keep, attention: As in `watch`.
        modules: All modules of the model, where they are known.
    """
    modules = submodules(model) if modules is None else modules
    offloaded = any(_is_offloaded(module) for module in modules if "_hf_hook" in module.__dict__)
    if not offloaded and any(map(attrgetter("is_meta"), own_parameters(modules))):
        sentence = f"{type(model).__name__} must hold its weights; they are on the meta device: load them first"
        raise WatchError(sentence, subject="model")
    chosen = list(_default_metrics()) if metrics is DEFAULT_METRICS else chosen_metrics("watch", metrics)
    kept = frozenset([keep] if isinstance(keep, str) else keep)
    for name in kept - set(KEPT):
        raise WatchError(one_of("keep", name, KEPT), subject="keep")
    if offloaded and any(metric.of == "heads" for metric in chosen):
        sentence = "metrics of heads need weights in place; the model's are offloaded: watch tokens or attention"
        raise WatchError(sentence, subject="metrics")
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
    return WatchPlan(
        metrics=chosen,
        blocks=found_blocks,
        stack=stack,
        layers=chosen_layers,
        keep=kept,
        layout=layout_of(in_blocks, layout),
        layout_known=layout_is_known(found_blocks, layout),
        grid=tokens_in_rows_and_columns(in_blocks),
        padding=known_padding,
        padding_from_model=known_padding is None and padding == "model",
        blocks_named=blocks is not None,
        decoder=is_decoder(model, stack),
        attention=tuple(attention),
        tensor_parallel=tensor_parallel,
        in_blocks=in_blocks,
    )


@cache
def _default_metrics() -> list[Metric]:
    return chosen_metrics("watch", DEFAULT_METRICS)


def _padding(padding: Tensor | str, attention_mask: Tensor | None) -> Tensor | None:
    """The padding that the user gave, True at padded tokens, or None."""
    if isinstance(padding, Tensor) or padding == "model":
        return padding_from(padding if isinstance(padding, Tensor) else None, attention_mask)
    if padding != "none" or attention_mask is not None:
        expected = "a boolean tensor, 'model' or 'none', and 'model' beside an attention_mask"
        raise WatchError(f"padding must be {expected}; got {padding!r}", subject="padding")
    return None


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
    if wrong or not layers:
        raise WatchError(f"layers must name layers 0..{last}; got {wrong or 'none'}", subject="layers")
    return frozenset(layers)
