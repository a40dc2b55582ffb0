"""Compiled models: hooks inside compiled code fire once, while it is traced, or never. So while a model is
looked at, what is compiled runs as it was written; its graphs stay as they are."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rankscope.errors import WatchError
from rankscope.live.modules import holds


def original(model: Any) -> Any:
    """The module that was compiled; others as they are."""
    while _is_wrapper(model):
        model = model._orig_mod
    return model


def is_compiled(inside: Iterable[nn.Module]) -> bool:
    """Whether a model, or a part of it, is compiled; `inside` is what it is made of, itself first."""
    return any(
        "_orig_mod" in part._modules
        or part.__dict__.get("_compiled_call_impl") is not None
        or ("forward" in part.__dict__ and hasattr(part.__dict__["forward"], "_torchdynamo_orig_callable"))
        for part in inside
    )


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, what is compiled runs as it was written; its graphs stay as they are."""
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse(inside: Sequence[nn.Module]) -> None:
    """What hooks do not see into; `inside` as above."""
    if not holds(inside, (torch.jit.ScriptModule,)):
        return
    for part in inside:
        if isinstance(part, torch.jit.ScriptModule):
            name = next(name for name, each in inside[0].named_modules() if each is part)
            what = f"its part {name!r}" if name else "this model"
            raise WatchError(
                f"{what} is a TorchScript module, which hooks do not see into: watch the original"
            )


def _is_wrapper(part: Any) -> bool:
    return isinstance(part, nn.Module) and "_orig_mod" in part._modules
