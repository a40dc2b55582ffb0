"""Attention of torch's own `nn.MultiheadAttention`, seen through hooks.

A hook before the call asks for the weights of every head; a hook after it shows them to the watcher and gives
the caller what it had asked for. What each head adds is `P_h V_h W_O,h`, with V the projected values.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Seen = Callable[[nn.MultiheadAttention, Tensor, Tensor, Tensor], None]
"""Called with the module, the weights `[batch, head, token, token]`, the values it was given and its output,
both `[batch, token, width]`."""


def multiheads(blocks: Sequence[nn.Module]) -> list[nn.MultiheadAttention]:
    """Every `nn.MultiheadAttention` in the blocks, once."""
    found = (part for block in blocks for part in block.modules() if isinstance(part, nn.MultiheadAttention))
    return list(dict.fromkeys(found))


@contextmanager
def through_hooks(modules: Sequence[nn.MultiheadAttention], seen: Seen) -> Iterator[None]:
    """Attention of these modules is shown to `seen`; afterwards all is as it was."""
    asked: list[tuple[bool, bool, dict[str, Any]]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        call = arguments.arguments
        asked.append((call["need_weights"], call["average_attn_weights"], call))
        return (), {**call, "need_weights": True, "average_attn_weights": False}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        need, average, call = asked.pop()
        if output is None:  # the call failed
            return None
        result, weights = output
        assert isinstance(module, nn.MultiheadAttention)
        value, out, P = call["value"].detach(), result.detach(), weights.detach()
        if result.ndim == 2:
            value, out, P = value[None], out[None], P[None]
        elif not module.batch_first:
            value, out = value.transpose(0, 1), out.transpose(0, 1)
        seen(module, P, value, out)
        if not need:
            return result, None
        return result, (weights.mean(dim=-3) if average else weights)

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
        yield


@contextmanager
def unfused(model: nn.Module) -> Iterator[bool]:
    """torch's encoders without nested tensors, which its layers take only on the fused path that hooks switch
    off; afterwards all is as it was. Gives whether there are any such encoders."""
    encoders = [part for part in model.modules() if isinstance(part, nn.TransformerEncoder)]
    before = [encoder.use_nested_tensor for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield any(before)
    finally:
        for encoder, use in zip(encoders, before, strict=True):
            encoder.use_nested_tensor = use


def head_outputs(module: nn.MultiheadAttention, P: Tensor, value: Tensor) -> Tensor:
    """`P_h V_h` of every head, `[batch, token, head, head_width]`, in float64."""
    wide = torch.float64
    if module.in_proj_weight is None:
        weight = module.v_proj_weight.to(wide)
    else:
        weight = module.in_proj_weight.chunk(3)[2].to(wide)
    V = value.to(wide) @ weight.mT
    if module.in_proj_bias is not None:
        V = V + module.in_proj_bias.chunk(3)[2].to(wide)
    V = V.reshape(*V.shape[:-1], module.num_heads, -1).transpose(1, 2)
    return (P.to(wide) @ V).transpose(1, 2)
