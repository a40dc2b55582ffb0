"""What a model is made of: its modules and parameters, and what wraps or compiles it.

Called by `watch`, by `plan.py` and `blocks.py` (which find the blocks) and by `Monitor`; calls `hooks.py` and torch.
`submodules` walks `_modules` itself: `nn.Module.modules()` also builds the name of every module, which is
most of what finding the blocks of a small model costs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.hooks import Hooks

# (package, class) of modules that hold the model as `module` and call it unchanged.
WRAPPERS = {("torch", name) for name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")}
WRAPPERS |= {("deepspeed", "DeepSpeedEngine")}


def submodules(*modules: nn.Module) -> list[nn.Module]:
    """These modules and everything in them, each once, in the order of `nn.Module.modules()`.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> submodules(layer) == list(layer.modules())
    True
    """
    visited: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [*reversed(modules)]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in visited:
            visited[module] = None
            if inside := module._modules:
                ahead.extend(reversed(inside.values()))
    return list(visited)


def own_parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters that belong to these modules directly, not to modules inside them."""
    return [weight for module in modules for weight in module._parameters.values() if weight is not None]


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` was given; any other module as it is."""
    while isinstance(module, nn.Module) and "_orig_mod" in module._modules:
        module = module._orig_mod
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without `torch.compile` and what spreads it over devices (DDP, FSDP) around it.

    Only the classes in `WRAPPERS` are taken off: any other model that keeps its only child under the name
    `module` has a `forward` of its own, and stays.

    >>> inner = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(torch.compile(inner))) is inner
    True
    """
    while True:
        model = uncompiled(model)
        if not any((kind.__module__.partition(".")[0], kind.__name__) in WRAPPERS for kind in type(model).__mro__):
            return model
        model = model.module  # type: ignore[assignment]


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """True if one of these modules runs compiled: through `torch.compile(module)` or `module.compile()`."""
    for module in modules:
        own = module.__dict__
        if "_orig_mod" in own["_modules"] or own.get("_compiled_call_impl") is not None:
            return True
        if "forward" in own and hasattr(own["forward"], "_torchdynamo_orig_callable"):
            return True
    return False


def parts_in(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules inside these blocks, each once, without the blocks themselves."""
    return list(dict.fromkeys(part for block in blocks for part in submodules(block) if part is not block))


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., None], **options: bool) -> Iterator[None]:
    """Inside, every one of these modules has this forward hook."""
    with Hooks() as hooks:
        for module in modules:
            hooks.attach(module, hook, **options)
        yield


def refuse_scripted(modules: Sequence[nn.Module]) -> None:
    """Refuse TorchScript, in which hooks do not fire; `modules` are those of a model, the model first."""
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in set(map(type, modules))):
        scripted = next(module for module in modules if isinstance(module, torch.jit.ScriptModule))
        name = next(name for name, part in modules[0].named_modules() if part is scripted)
        what = f"its part {name!r}" if name else "this model"
        sentence = f"{what} is a TorchScript module, in which hooks do not fire: watch it before it was scripted"
        raise WatchError(sentence, subject=name or "model")
