"""Keeps the state of a training as it is while a probe runs: whatever runs inside, training continues as if
nothing had happened. `probe.py` and `probe_paths.py` call the model inside `preserved_training_state`.

| state                          | how it is preserved                                                  |
|--------------------------------|----------------------------------------------------------------------|
| random generators              | torch's of every device, Python's and numpy's are saved and restored |
| train or eval mode             | saved for every module; inside, all are in eval mode                 |
| buffers, plain attributes      | what each name stands for is restored, and what tensors, arrays,     |
|                                | containers, generators and other objects hold                        |
|                                | (`ModuleState`); what else has changed is refused                    |
| gradients                      | none is computed (`no_grad`)                                         |
| autocast                       | its cache is off: a weight cast without a gradient would stay in it  |
| sharded weights                | sharded again afterwards: FSDP2 leaves the outermost ones whole      |
| compiled graphs                | compiled code runs eagerly inside (`force_eager`)                    |
"""

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live import without_dropout

TORCHS_OWN = vars(nn.Module()).keys() - {"_buffers"}  # attributes of a module that torch keeps for itself
# Packages whose objects are left alone: a trainer, a shard, a lock are not the model's state.
MANAGED = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "bitsandbytes"}
MANAGED |= sys.stdlib_module_names - {"types"}
IMMUTABLE = {bool, int, float, str, type(None)}
CONTENTS = 10_000  # entries of a container up to which each is followed into
FOLLOWED = 100_000  # values that are followed at most


@contextmanager
def preserved_training_state(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and computes no gradients; afterwards everything is as before.

    Raises:
        MonitorError: The model changed something of its own that cannot be put back.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for backend, index in _devices(model):
            stack.callback(backend.set_rng_state, backend.get_rng_state(index), index)
        stack.enter_context(without_dropout(model))
        state = ModuleState(model)
        stack.callback(state.restore)
        stack.callback(_shard_again, model)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        yield
    if state.changed:
        left = f"a call of {type(model).__name__} changed {', '.join(state.changed[:4])}, which cannot be put back"
        way = "keep it in a buffer, or in an attribute that is a tensor, a number or a list, or give no probe"
        raise MonitorError(f"a measurement must leave the model as it was; {left}: {way}", subject="model")


class ModuleState:
    """What a model keeps besides its weights, as it was when this was made.

    A model may keep a cache of earlier calls, a counter, a generator, or tables that grow with the longest sample: in
    buffers, in plain attributes, or in objects that are no modules. All are put back; tables are computed again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed: list[str] = []  # after `restore`: the names of what has changed and could not be put back
        self._undo: list[Callable[[], object]] = []
        self._checks: list[tuple[str, Callable[[], Any], Any]] = []  # a name, what to compare, what it was
        self._seen: dict[int, Any] = {}  # by id
        for name, module in model.named_modules():
            self._save(name or type(model).__name__, module)

    def restore(self) -> None:
        """Put everything back that can be, and note what else has changed."""
        for undo in self._undo:
            undo()
        self.changed = [name for name, compared, before in self._checks if compared() != before]

    def _save(self, name: str, value: Any) -> None:
        """Remember a value and what it holds."""
        if type(value) in IMMUTABLE or id(value) in self._seen or len(self._seen) > FOLLOWED:
            return
        if isinstance(value, nn.Parameter | type):
            return
        parts: list[tuple[Any, Any]] = []
        if type(value).__module__.startswith("torch.distributed"):
            return  # shards of a module are not its state
        if isinstance(value, nn.Module):
            parts = [(key, part) for key, part in vars(value).items() if key not in TORCHS_OWN]
            self._undo.append(partial(_restore_attributes, value, dict(parts)))
            weights = [(key, weight) for key, weight in value._parameters.items() if weight is not None]
            self._checks += [(f"the weight {name}.{key}", partial(_stamp, x), _stamp(x)) for key, x in weights]
        elif isinstance(value, list | tuple | dict | set | deque):
            parts = list(value.items() if isinstance(value, dict) else enumerate(value))
            if not isinstance(value, tuple):
                self._undo.append(partial(_restore_container, value, list(value), [part for _, part in parts]))
        elif (undo := _undo_of(value)) is not None:
            self._undo.append(undo)
        elif isinstance(value, Tensor | itertools.count):  # sparse, or on no device
            self._checks.append((name, partial(_stamp, value), _stamp(value)))
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in MANAGED:
            parts = list(vars(value).items())
            self._undo.append(partial(_restore_attributes, value, dict(parts)))
        else:
            return
        self._seen[id(value)] = value  # held, so that its id is not given to another
        if len(parts) <= CONTENTS:
            for key, part in parts:
                self._save(f"{name}.{key}", part)


def _stamp(value: Any) -> Any:
    """A number or text that changes when a tensor is written to, or when a counter counts."""
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return repr(value)


def _undo_of(value: Any) -> Callable[[], object] | None:
    """A function that puts back what a tensor, an array or a generator holds; None for anything else."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_quantized):
        return partial(_restore_tensor, value, value.detach().clone())
    if isinstance(value, np.ndarray) and value.flags.writeable and not isinstance(value, np.memmap):
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _restore_attributes(holder: Any, attributes: dict[str, Any]) -> None:
    """Let the names stand for what they did, and no others; torch's own of a module are left alone."""
    now = vars(holder)
    left_alone = TORCHS_OWN if isinstance(holder, nn.Module) else ()
    for name in [name for name in now if name not in attributes and name not in left_alone]:
        del now[name]
    now.update(attributes)


def _restore_container(container: Any, keys: list[Any], values: list[Any]) -> None:
    """Let a list, a dictionary, a set or a deque hold what it did, in its order."""
    now = list(container.values() if isinstance(container, dict) else container)
    same_keys = not isinstance(container, dict) or list(container) == keys
    if same_keys and len(now) == len(values) and all(map(is_, now, values)):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(zip(keys, values, strict=True) if isinstance(container, dict) else values)
    else:
        container.extend(values)


def _restore_tensor(tensor: Tensor, content: Tensor) -> None:
    """Give a tensor its content back if it has another; NaN equals NaN."""
    if (tensor.shape, tensor.dtype, tensor.device) != (content.shape, content.dtype, content.device):
        tensor.data = content
        return
    same = torch.equal(tensor, content) or ((tensor == content) | (tensor != tensor) & (content != content))
    if not bool(torch.as_tensor(same).all()):
        with torch.no_grad():
            tensor.copy_(content)


def _devices(model: nn.Module) -> list[tuple[Any, int]]:
    """(torch's module of a kind of device, index) of every device, beside the CPU, of the kinds in use."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    kinds |= {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    backends = [getattr(torch, kind) for kind in sorted(kinds)]
    return [(backend, index) for backend in backends for index in range(backend.device_count())]


def _shard_again(model: nn.Module) -> None:
    """Shard weights again: after a forward pass FSDP2 keeps the outermost ones whole for a backward pass."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
            reshard()
