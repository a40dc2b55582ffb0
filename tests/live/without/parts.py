"""Models with parts left out, by `watch` and by hand."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live import Watch, watch
from tests.live.gpt import GPT, Block, words

BLOCKS = "transformer.h.*"


def random_gpt(block: Any = Block) -> GPT:
    """Three blocks in float64, biases random too."""
    model = GPT(block=block).double().eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.5)
    return model


def zeroed(linear: nn.Linear) -> list[Tensor]:
    """Make a linear layer give 0; returns its tensors."""
    return [nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)]


def without(model: nn.Module, metrics: Any = "mu", x: Tensor | None = None, **parts: Any) -> tuple[Tensor, Watch]:
    """What a model gives without these parts, and the watch that saw it."""
    with torch.no_grad(), watch(model, metrics).without(**parts) as w:
        output = model(words() if x is None else x)
    return output, w


def edited(model: nn.Module, edit: Callable[[Any], object]) -> Any:
    """A copy of a model, changed by hand."""
    copy = deepcopy(model)
    edit(copy)
    return copy


def footprint(model: nn.Module) -> dict[str, Any]:
    """What a model is made of: its tensors with their versions, hooks, modes and attributes."""
    tensors = {name: (id(x), x._version) for name, x in model.state_dict(keep_vars=True).items()}
    modules = {
        name: (len(part._forward_hooks), len(part._forward_pre_hooks), part.training, sorted(vars(part)))
        for name, part in model.named_modules()
    }
    return tensors | modules
