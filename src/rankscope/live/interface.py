"""Attention of Hugging Face models, seen through transformers' attention interface.

While such a model is watched, its configs name an attention function of ours. It looks up the
`eager_attention_forward` of the modeling file that the attention module comes from, calls it, shows weights
and output to the watcher and returns both unchanged. transformers keeps a second registry, of functions that
make the mask: theirs for eager attention is registered there under the same name, or the causal and the
padding mask would vanish without a word.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError

Seen = Callable[[Tensor, Tensor], None]
"""Called with the weights `[batch, head, token, token]` and the heads' outputs `[batch, token, head, d]`."""

NAME = "rankscope_watch"
_numbers = itertools.count(1)


def owner_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Any | None:
    """The innermost Hugging Face model that holds the blocks; None where they are no such model's."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    inside = {id(block) for block in blocks}
    found = None
    for part in model.modules():  # outer before inner
        if isinstance(part, PreTrainedModel) and inside <= {id(each) for each in part.modules()}:
            found = part
    return found


def is_outside(owner: Any) -> bool:
    """Whether this model's attention does not go through the interface."""
    return not type(owner)._can_set_attn_implementation()


def refusal(owner: Any) -> str:
    """What to say where attention is asked of a model outside the interface."""
    return (
        "attention can be watched in models that use transformers' attention interface; "
        f"{owner.config.model_type} ({type(owner).__name__}) does not: watch metrics of tokens, or measure "
        "attention through load and measure where its family can be loaded"
    )


@contextmanager
def through_interface(model: nn.Module, seen: Seen) -> Iterator[None]:
    """The model's attention goes through a function that calls `seen`; afterwards all is as it was."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _attend(seen, module, *args, **kwargs)

    name = f"{NAME}_{next(_numbers)}"
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    try:
        for config, _ in before:
            # The attribute behind the property: setting the property would reach into sub-configs as well.
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """`eager_mask`, within float32's range: models in float64 that take softmax in float32 would see minus
    infinity in it, and NaN where a padded token sees padding alone."""
    from transformers.masking_utils import eager_mask

    mask = eager_mask(*args, **kwargs)
    if mask is None or mask.dtype != torch.float64:
        return mask
    return mask.clamp(min=torch.finfo(torch.float32).min)


def _configs(model: nn.Module) -> list[Any]:
    """The distinct configs of every part that goes through the interface, with their sub-configs."""
    from transformers import PreTrainedConfig, PreTrainedModel

    found: dict[int, Any] = {}
    kept: set[int] = set()
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(part, PreTrainedModel) and is_outside(part):
            kept.add(id(config))
        elif isinstance(config, PreTrainedConfig):
            for each in _with_parts(config):
                found[id(each)] = each
    return [config for key, config in found.items() if key not in kept]


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _with_parts(part)


def _attend(
    seen: Seen,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The module's own eager attention, shown to the watcher."""
    if isinstance(attention_mask, Tensor) and not attention_mask.is_floating_point():
        raise WatchError(
            f"{type(module).__name__} was given a mask of {attention_mask.dtype}, made for another attention "
            "than eager, which would be added to the scores as it is: watch metrics of tokens"
        )
    output, weights = _eager(module)(module, query, key, value, attention_mask, *args, **kwargs)
    if isinstance(weights, Tensor) and isinstance(output, Tensor):
        seen(weights, output)
    return output, weights


def _eager(module: nn.Module) -> Callable[..., Any]:
    """`eager_attention_forward` of the file where the module's class, or one it derives from, is written."""
    for each in type(module).__mro__:
        found = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if callable(found):
            return found
    raise WatchError(
        "attention is watched through eager_attention_forward of the modeling file; "
        f"{type(module).__module__}, where {type(module).__name__} is written, has none: watch "
        "metrics of tokens"
    )
