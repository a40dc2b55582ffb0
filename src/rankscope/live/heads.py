"""What each head adds: `P_h V_h W_O,h`, from the heads' outputs and the output projection that takes them.

Where the projection is a module of its own (every Hugging Face model), nobody says which it is: `o_proj`,
`c_proj`, `dense`, `out_lin` ... It is the first Linear or Conv1D in the block that is called, after
attention, on exactly the heads' outputs side by side. That the parts add up to the projection's own output is
checked every time. Where the projection stands in a module with weights of its own (LoRA), that module's
output is the one that counts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.metrics.tokens import unit_of

CLOSURE = 1e-3
"""How far, relative to its size, the parts may be from the projection's output; more in half precision."""
ROUNDINGS = 8.0


Called = Callable[[nn.Module, Tensor, Tensor], None]
"""Takes a module, its input and its output."""


def weight_of(projection: nn.Module) -> Tensor:
    """`[in, out]`: the matrix that multiplies from the right."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if type(projection).__name__ == "Conv1D" else weight.detach().mT


def by_head(x: Tensor) -> Tensor:
    """`[batch, head, token, ...]`: a lone sample or head gets its dim, and groups of heads stand in a row."""
    if x.ndim < 4:
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.flatten(1, -3)


def contributions(spoken: Tensor, weight: Tensor) -> Tensor:
    """`[batch, head, token, width]`, in float64, from the heads' outputs `[batch, token, head, d]`."""
    W = weight.to(torch.float64).reshape(*spoken.shape[-2:], -1)  # [head, d, width]
    return spoken.to(torch.float64).transpose(1, 2) @ W


def check_closure(added: Tensor, bias: Tensor | None, output: Tensor, where: str) -> None:
    """The heads' parts and the bias are the output, or the projection is not what it was taken for."""
    whole = added.sum(1) if bias is None else added.sum(1) + bias.detach().to(torch.float64)
    allowed = max(CLOSURE, ROUNDINGS * unit_of(output.dtype))
    output = output.detach().to(torch.float64).reshape(whole.shape)
    miss = (whole - output).norm() / output.norm().clamp(min=1e-300)
    if bool(miss > allowed):  # never where there is NaN: a broken sample is marked elsewhere
        raise WatchError(
            f"what the heads of {where} add must sum to its output; it misses by {float(miss):.1e} of its "
            "size: its output projection is not a plain linear map, watch metrics of tokens or attention"
        )


@contextmanager
def projections(blocks: Sequence[nn.Module], called: Called, wrapped: Called) -> Iterator[None]:
    """Every Linear or Conv1D in the blocks shows its input and output to `called`, and every module with
    weights beside those of a Linear in it shows them to `wrapped`."""

    def shown(to: Called) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            # With a second argument it is more than a projection: BERT's also takes the residual.
            if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                to(module, args[0].detach(), output.detach())

        return after

    parts = dict.fromkeys(part for block in blocks for part in block.modules() if part is not block)
    with ExitStack() as hooks:
        for part in parts:
            if _is_linear(part) or _wraps(part):
                show = shown(called if _is_linear(part) else wrapped)
                hooks.callback(part.register_forward_hook(show).remove)
        yield


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def _wraps(part: nn.Module) -> bool:
    """Whether there are linear maps in it and weights beside one of them, other than those of norms."""
    inside = list(part.modules())
    own = [each for each in inside if "norm" not in type(each).__name__.lower()]
    weighted = [each for each in own if next(each.parameters(recurse=False), None) is not None]
    return any(map(_is_linear, inside)) and len(weighted) > 1
