"""Keeps the state of a training as it is while a probe runs: whatever runs inside, training continues as if
nothing had happened. `probe.py` and `probe_paths.py` call the model inside `preserved_training_state`.

| state                          | how it is preserved                                                  |
|--------------------------------|----------------------------------------------------------------------|
| random generators              | torch's of every device, Python's and numpy's are saved and restored |
| train or eval mode             | saved for every module; inside, all are in eval mode                 |
| buffers                        | their contents are restored, and which tensor each name stands for   |
| gradients                      | none is computed (`no_grad`)                                         |
| autocast                       | its cache is off: a weight cast without a gradient would stay in it  |
| sharded weights                | sharded again afterwards: FSDP2 leaves the outermost ones whole      |
| compiled graphs                | compiled code runs eagerly inside (`force_eager`)                    |
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.live.isolation import without_dropout


@contextmanager
def preserved_training_state(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and computes no gradients; afterwards everything is as before."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for backend, index in _devices(model):
            stack.callback(backend.set_rng_state, backend.get_rng_state(index), index)
        stack.enter_context(without_dropout(model))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                content = None if buffer is None else buffer.detach().clone()
                stack.callback(_restore_buffer, module, name, buffer, content)
        stack.callback(_shard_again, model)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        yield


def _devices(model: nn.Module) -> list[tuple[Any, int]]:
    """(torch's module of a kind of device, index) of every device, beside the CPU, of the kinds in use."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    kinds |= {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    backends = [getattr(torch, kind) for kind in sorted(kinds)]
    return [(backend, index) for backend in backends for index in range(backend.device_count())]


def _restore_buffer(module: nn.Module, name: str, buffer: Tensor | None, content: Tensor | None) -> None:
    """Let the name stand for this tensor again, with this content; NaN equals NaN."""
    module._buffers[name] = buffer
    if buffer is not None and content is not None:
        same = torch.equal(buffer, content) or ((buffer == content) | (buffer != buffer) & (content != content))
        if not bool(torch.as_tensor(same).all()):
            with torch.no_grad():
                buffer.copy_(content)


def _shard_again(model: nn.Module) -> None:
    """Shard weights again: after a forward pass FSDP2 keeps the outermost ones whole for a backward pass."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
            reshard()
