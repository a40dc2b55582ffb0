"""Attention of torch's own `nn.MultiheadAttention`, seen through forward hooks.

A hook after the module's call makes the call once more, for the pattern of every head, without gradients and
dropout: the first call stays as it is. What each head adds is `P_h V_h W_h`, with V the projected values and
W the output projection.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live.attention.head_outputs import check_contributions, contributions_of, weight_of
from rankscope.live.attention.observer import AttentionCall, OnAttention
from rankscope.live.attention.scores import AttentionScores
from rankscope.live.hooks import Replacements, isolated, without_dropout
from rankscope.live.modules import WatchedBlocks, hooked, submodules
from rankscope.live.padding import arguments_of

_nested_tensors = Replacements()  # encoders that would make them do not


class MultiheadModules:
    """Observes `nn.MultiheadAttention` inside the blocks."""

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True if there is an `nn.MultiheadAttention` in the blocks."""
        return bool(multihead_modules(submodules(*blocks)))

    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> AbstractContextManager[None]:
        """Inside, every call of these modules is reported."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            assert isinstance(module, nn.MultiheadAttention)
            on_attention(attention_call(module, args, kwargs, output[0] if isinstance(output, tuple) else None))

        return hooked(multihead_modules(submodules(*blocks)), hook, with_kwargs=True)


def multihead_modules(modules: Sequence[nn.Module]) -> list[nn.MultiheadAttention]:
    """Every `nn.MultiheadAttention` among these modules."""
    return [part for part in modules if isinstance(part, nn.MultiheadAttention)]


def attention_call(
    module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Tensor | None = None
) -> AttentionCall:
    """What to report of a module's call: pattern and contributions, from a second call if asked for, and scores where
    its `output` is known."""
    arguments = arguments_of(module, args, kwargs)
    second_call = cache(lambda: _call_again(module, arguments))

    def contributions() -> Tensor:
        pattern, value, output = second_call()
        with isolated(pattern.device):
            added = contributions_of(_head_outputs(module, pattern, value), weight_of(module.out_proj))
            check_contributions(added, module.out_proj.bias, output, type(module).__name__)
        return added

    query, key, mask = (arguments.get(name) for name in ("query", "key", "key_padding_mask"))
    unseen = None if mask is None else mask < 0 if mask.is_floating_point() else mask.bool()
    known: Any = {"hidden_tokens": lambda: unseen, "contributions": contributions}
    if isinstance(query, Tensor) and isinstance(key, Tensor) and query.ndim == 3:
        batch, token = (0, 1) if module.batch_first else (1, 0)
        known["sizes"] = (query.shape[batch], query.shape[token], key.shape[token])
        if output is not None:
            projected = ProjectedHeads(module, arguments, output.detach())
            known["scores"] = projected.scores
            known["products"] = None if module.training and module.dropout else projected.products
    return AttentionCall(pattern=lambda: second_call()[0], **known)


@dataclass(frozen=True)
class ProjectedHeads:
    """Queries, keys and values of a module's call, projected once more, in the dtype of the output that it gave."""

    module: nn.MultiheadAttention
    arguments: Mapping[str, Any]  # by name
    output: Tensor

    def scores(self) -> AttentionScores | None:
        """How the module makes its scores; None if it has keys of its own."""
        module = self.module
        if module.bias_k is not None or module.add_zero_attn:
            return None
        query, key = self._heads("query", 0), self._heads("key", 1)
        mask, padding = (self.arguments.get(name) for name in ("attn_mask", "key_padding_mask"))
        if mask is not None:
            mask = mask.detach() if mask.is_floating_point() else ~mask.detach()  # torch's is True at what is unseen
            mask = mask.reshape(query.shape[0], -1, *mask.shape[-2:]) if mask.ndim == 3 else mask
        if padding is None:
            return AttentionScores(query=query, key=key, mask=mask)
        padding = padding.detach()[:, None, None]

        def padded(scores: Tensor, at: Tensor) -> Tensor:
            added = padding.is_floating_point()
            return scores + padding.to(scores) if added else scores.masked_fill(padding, -torch.inf)

        return AttentionScores(query=query, key=key, mask=mask, modified=padded)

    def products(self, rows: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """What rows of a pattern give, through the output projection, beside what the module gave."""
        heads = (P @ self._heads("value", 2).to(P)).transpose(1, 2).flatten(2)
        out = self.module.out_proj
        bias = None if out.bias is None else out.bias.detach().to(P)
        product = nn.functional.linear(heads, out.weight.detach().to(P), bias)
        output = self.output if self.module.batch_first else self.output.transpose(0, 1)
        return product[:, :, None], output[:, rows, None]

    def _heads(self, name: str, part: int) -> Tensor:
        """Queries, keys or values by head `[batch, head, token, d]`; `part` is the place of their weights."""
        module, x, dtype = self.module, self.arguments[name].detach(), self.output.dtype
        x = x if module.batch_first else x.transpose(0, 1)
        y = nn.functional.linear(x.to(dtype), *_input_projection(module, part, dtype))
        return y.reshape(*y.shape[:2], module.num_heads, -1).transpose(1, 2)


def _input_projection(module: nn.MultiheadAttention, part: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weight and bias, in a dtype, that make queries (`part` 0), keys (1) or values (2)."""
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weight = separate[part] if module.in_proj_weight is None else module.in_proj_weight.chunk(3)[part]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[part].detach().to(dtype)
    return weight.detach().to(dtype), bias


def _call_again(module: nn.MultiheadAttention, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Pattern, values taken `[batch, token, width]` and output of the same call without gradients and dropout."""
    with torch.no_grad(), without_dropout(module):
        output, pattern = module.forward(**{**arguments, "need_weights": True, "average_attn_weights": False})
    assert pattern is not None
    value = arguments["value"].detach()
    if output.ndim == 2:
        return pattern[None], value[None], output[None]
    if not module.batch_first:
        value, output = value.transpose(0, 1), output.transpose(0, 1)
    return pattern, value, output


def _head_outputs(module: nn.MultiheadAttention, pattern: Tensor, value: Tensor) -> Tensor:
    """`P_h V_h` of every head, `[batch, token, head, d]`, in float64, from `pattern` `[batch, head, token, token]` and
    `value` `[batch, token, width]`, not projected yet. Patterns with keys of the module's own (`bias_k`,
    `add_zero_attn`) do not come here: by their shape `attention_readings.py` leaves them out."""
    wide = torch.float64
    weight, bias = _input_projection(module, 2, wide)
    V = value.to(wide) @ weight.mT
    V = V if bias is None else V + bias
    V = V.reshape(*V.shape[:-1], module.num_heads, -1).transpose(1, 2)
    return (pattern.to(wide) @ V).transpose(1, 2)


class _Off:
    """A stand-in for an attribute that is True: False while an encoder is watched, True when copied or pickled."""

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> Any:
        return bool, (True,)


@contextmanager
def without_nested_tensors(encoders: Sequence[nn.TransformerEncoder]) -> Iterator[bool]:
    """Inside, torch's encoders make no nested tensors, which hooked layers do not take; True if some would have."""
    using = [encoder for encoder in encoders if encoder.use_nested_tensor is not False]
    with _nested_tensors.heard_by(None, [(encoder, "use_nested_tensor", _Off()) for encoder in using]):
        yield bool(using)
