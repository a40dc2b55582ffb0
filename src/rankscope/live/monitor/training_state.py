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

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.live.isolation import without_dropout


@contextmanager
def preserved_training_state(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and computes no gradients; afterwards everything is as before."""
    with ExitStack() as stack:
        stack.enter_context(_generators(model))
        stack.enter_context(without_dropout(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_shards(model))
        stack.enter_context(_autocast_cache())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _generators(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of Python, numpy, the CPU and every kind of device that is in use."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    kinds |= {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    devices = [
        (getattr(torch, kind), index)
        for kind in sorted(kinds)
        for index in range(getattr(torch, kind).device_count())
    ]
    states = [backend.get_rng_state(index) for backend, index in devices]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for (backend, index), state in zip(devices, states, strict=True):
            backend.set_rng_state(state, index)


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, content in before:
            module._buffers[name] = buffer
            if buffer is not None and content is not None and not _equal(buffer, content):
                with torch.no_grad():
                    buffer.copy_(content)


@contextmanager
def _shards(model: nn.Module) -> Iterator[None]:
    """Shard weights again: after a forward pass FSDP2 keeps the outermost ones whole for a backward pass."""
    try:
        yield
    finally:
        for module in model.modules():
            if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
                reshard()


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if all entries are equal; NaN equals NaN."""
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def _autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
