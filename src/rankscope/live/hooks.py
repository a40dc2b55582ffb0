"""How a running model is looked at without noticing: hooks, contexts to compute in, stand-ins for functions it calls.

`Hooks` are forward hooks that nobody but the watch notices, attached to modules until they are closed. All files of
this room that look at a running module attach their hooks here. Torch keeps a hook on the module itself, so whatever
copies, saves or traces the module would meet it. These hooks stay out of the way:

- Copies and files of a module have none of them: what is copied or loaded is not watched, and needs no rankscope.
- While torch traces or transforms the module (`torch.export`, `torch.func`, `torch.jit.trace`, `make_fx`, fake
  tensors), they do nothing: there are no numbers to measure.
- Those of one thread (`this_thread`) do nothing in another that calls the module meanwhile.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import getattr_static
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks")  # of a module, by which torch finds its hooks
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # torch 2.6 has none
_mode: Any = torch._C._get_dispatch_mode
_TRACING_MODES = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY")]


def is_traced() -> bool:
    """True while torch traces or transforms what runs, other than to compile it."""
    if _is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    functions: Any = torch._C._functorch
    if functions.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        return True
    return any(map(_mode, _TRACING_MODES))


class Hook:
    """A hook that calls a function: of calls in `thread` alone, if one is given, and while torch traces the module only
    `if_traced`. With a number of `arguments` it does nothing where torch passes another number of them: torch adds and
    removes a hook before it notes that the hook takes `kwargs`, and another thread may call the module in between."""

    def __init__(
        self, function: Callable[..., Any], thread: int | None = None, if_traced: bool = False,
        arguments: int | None = None,
    ) -> None:  # fmt: skip
        self.function, self.thread, self.if_traced, self.arguments = function, thread, if_traced, arguments

    def __call__(self, *args: Any) -> Any:
        """Call the function and return what it returns; None (no change, for torch) if it is not to be called."""
        elsewhere = self.thread is not None and get_ident() != self.thread
        misfits = self.arguments is not None and len(args) != self.arguments
        return None if elsewhere or misfits or (not self.if_traced and is_traced()) else self.function(*args)

    def __reduce__(self) -> Any:
        """A copied or pickled hook is a built-in function that does nothing: loading it needs no rankscope."""
        return getattr, ((), "count")


class Hooks(ExitStack):
    """Contexts and hooks that are undone on closing. Hooks `of_this_thread` see no calls from other threads; hooks that
    change what the model returns must be `if_traced`, or a traced model would not have the change."""

    def __init__(self, of_this_thread: bool = False, if_traced: bool = False) -> None:
        super().__init__()
        self.thread, self.if_traced = get_ident() if of_this_thread else None, if_traced

    def attach(self, module: nn.Module, function: Callable[..., Any], *, before: bool = False, **options: bool) -> None:
        """Call a function `before` every forward pass of a module, or after it; `options` are those of torch's
        `register_forward_pre_hook` and `register_forward_hook`."""
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        arguments = (2 if before else 3) + options.get("with_kwargs", False)
        handle = register(Hook(function, self.thread, self.if_traced, arguments), **options)
        for name in (*DICTIONARIES, *FLAGS):
            # Both pickle and deepcopy look for `__reduce_ex__` on the dictionary itself before they look at its class.
            entries = getattr(module, name)
            entries.__reduce_ex__ = partial(_without_ours, module, entries)
        self.callback(_detach, module, handle)


def _ours(module: nn.Module) -> set[int]:
    """The keys of all hooks on a module that were attached here."""
    return {k for name in DICTIONARIES for k, hook in getattr(module, name).items() if isinstance(hook, Hook)}


def _without_ours(module: nn.Module, entries: "OrderedDict[int, Any]", _protocol: int) -> tuple[Any, ...]:
    """The reduced form by which a dictionary of hooks is copied or pickled: without the hooks attached here."""
    ours = _ours(module)
    return OrderedDict, (), None, None, iter([(key, value) for key, value in entries.items() if key not in ours])


def _detach(module: nn.Module, handle: Any) -> None:
    handle.remove()
    if not _ours(module):
        for name in (*DICTIONARIES, *FLAGS):
            vars(getattr(module, name)).pop("__reduce_ex__", None)


class Replacements:
    """What others hold under some names is replaced while somebody listens; the last to leave puts it back."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self._replaced: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # holder, name, what it held
        self._uses: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def heard_by(self, listener: Any, replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
        """Inside, there is this listener, and each of (holder, name, replacement) is in place; of several for one name,
        the first."""
        keys = []
        for holder, name, replacement in replacements:
            keys.append(key := (id(holder), name))
            self._uses[key] += 1
            if key not in self._replaced:
                self._replaced[key] = (holder, name, getattr_static(holder, name))
                setattr(holder, name, replacement)
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)
            self._uses.subtract(keys)
            for key in keys:
                if not self._uses[key]:
                    setattr(*self._replaced.pop(key))


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Inside, neither autograd nor the user's autocast or default device is active."""
    with torch.no_grad(), nullcontext() if torch.get_default_device() == CPU else CPU:
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """The module and all its parts are in eval mode inside, and in the modes they had afterwards. Flags are set one by
    one, since a model's own `train` may do more."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def float64_device(device: torch.device) -> torch.device:
    """The device that computes in float64 for this one: itself, or the CPU for MPS, which has no float64."""
    return CPU if device.type == "mps" else device


def to_float64_device(x: Tensor) -> Tensor:
    """x on a device that has float64: where it is, or on the CPU."""
    return x.to(float64_device(x.device))
