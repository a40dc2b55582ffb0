"""A look that the training does not notice: whatever runs inside, everything is as it was before.

| what                           | how                                                                  |
|--------------------------------|----------------------------------------------------------------------|
| generators of every device     | their states are kept, and Python's and numpy's with them            |
| train or eval, of every module | the flag of each is kept; inside, all are in eval mode               |
| buffers                        | their contents are kept, and which tensor each name stands for       |
| gradients                      | none is taken (`no_grad`)                                            |
| autocast                       | its cache is off: a weight cast without a gradient would stay in it  |
| weights that ranks share out   | each rank has its share again: FSDP leaves the outermost whole       |
| compiled graphs                | inside, compiled code is run as it was written (`force_eager`)       |
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.live.compiled import eagerly


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and takes no gradients; after, nothing has changed."""
    with ExitStack() as stack:
        stack.enter_context(_generators(model))
        stack.enter_context(_modes(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_shares(model))
        stack.enter_context(_autocast_cache())
        stack.enter_context(eagerly())
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _generators(model: nn.Module) -> Iterator[None]:
    """torch's, of the CPU and of every device that is in use; Python's and numpy's."""
    ours, theirs = random.getstate(), np.random.get_state()
    cpu = torch.get_rng_state()
    kinds = {part.device.type for part in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    kinds |= {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    kept = {kind: _states(kind) for kind in sorted(kinds)}
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(cpu)
        for kind, states in kept.items():
            for index, state in states.items():
                _of(kind).set_rng_state(state, index)


def _states(kind: str) -> dict[int, Tensor]:
    module = _of(kind)
    return {index: module.get_rng_state(index) for index in range(module.device_count())}


def _of(kind: str) -> "torch.types.ModuleType":
    return getattr(torch, kind)


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """The flags are set one by one: a `train` of the model's own may do more than that."""
    before = {part: part.training for part in model.modules()}
    for part in before:
        part.training = False
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    before = [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        for part, name, buffer, content in before:
            part._buffers[name] = buffer
            if buffer is not None and content is not None and not _same(buffer, content):
                with torch.no_grad():
                    buffer.copy_(content)


@contextmanager
def _shares(model: nn.Module) -> Iterator[None]:
    """After a forward pass FSDP2 keeps the outermost weights whole, for the backward pass that comes."""
    try:
        yield
    finally:
        for part in model.modules():
            if callable(reshard := getattr(part, "reshard", None)) and hasattr(part, "unshard"):
                reshard()


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit as far as numbers go; what is no number counts as itself."""
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def _autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
