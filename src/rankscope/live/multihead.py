"""Attention of torch's own `nn.MultiheadAttention`, seen through hooks.

A hook after the call makes it once more, for the weights of every head, without gradients and dropout: the
call itself stays as it is. What each head adds is `P_h V_h W_O,h`, with V the projected values.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rankscope.live.isolation import without_dropout
from rankscope.live.modules import holds, parts

M = TypeVar("M", bound=nn.Module)
Weights = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Gives the weights `[batch, head, token, token]`, the values it was given and its output, both `[batch,
token, width]`."""
Seen = Callable[[nn.MultiheadAttention, Weights], None]


def multiheads(blocks: Sequence[nn.Module]) -> list[nn.MultiheadAttention]:
    """Every `nn.MultiheadAttention` in the blocks, once."""
    return _of_kind(parts(*blocks), nn.MultiheadAttention)


def _of_kind(inside: Sequence[nn.Module], kind: type[M]) -> list[M]:
    return [part for part in inside if isinstance(part, kind)] if holds(inside, (kind,)) else []


@contextmanager
def through_hooks(modules: Sequence[nn.MultiheadAttention], seen: Seen) -> Iterator[None]:
    """Attention of these modules is shown to `seen`; what they compute is left as it is."""

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        seen(module, lambda: _beside(module, args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _beside(module: nn.MultiheadAttention, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same call once more, with its weights, without gradients and dropout."""
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    call.apply_defaults()
    given = {**call.arguments, "need_weights": True, "average_attn_weights": False}
    with torch.no_grad(), without_dropout(module):
        out, P = module.forward(**given)
    assert P is not None
    value = given["value"].detach()
    if out.ndim == 2:
        return P[None], value[None], out[None]
    if not module.batch_first:
        value, out = value.transpose(0, 1), out.transpose(0, 1)
    return P, value, out


@contextmanager
def unfused(inside: Sequence[nn.Module]) -> Iterator[bool]:
    """torch's encoders without nested tensors, which its layers take only on the fused path that hooks switch
    off; afterwards all is as it was. `inside` is what the model is made of. Gives whether there are any such
    encoders."""
    encoders = _of_kind(inside, nn.TransformerEncoder)
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
