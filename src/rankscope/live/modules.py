"""What a model is made of: its modules and parameters, what wraps or compiles it, and where its layers are.

A stack is a `ModuleList` or `Sequential` of composite modules, or a `ModuleDict` of numbered ones (torchtitan), all (or
most) of one class, in no other stack.
Where some stacks hold attention, the others are no candidates: they are convolutions before a transformer,
or experts. One stack is found without asking, and so are two, such as an encoder and a decoder, which are measured
side by side (`named_stacks`); of more the user names those that are meant. `plan.py` asks once for a watch.

`submodules` walks `_modules` itself: `nn.Module.modules()` also builds the name of every module, which is
most of what finding the blocks of a small model costs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, one_of, require
from rankscope.live.hooks import Hooks

# (package, class) of modules that hold the model as `module` and call it unchanged.
WRAPPERS = {("torch", name) for name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")}
WRAPPERS |= {("deepspeed", "DeepSpeedEngine")}

Blocks = str | Sequence[str | nn.Module]  # the name of a stack or of a part with one in it, or the blocks
NamedStacks = Mapping[str, Blocks]  # several stacks, each by a name of the user's own
MOST_NAMED = 5  # candidates that an error names


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
        attributes = module.__dict__
        if "_orig_mod" in attributes["_modules"] or attributes.get("_compiled_call_impl") is not None:
            return True
        if "forward" in attributes and hasattr(attributes["forward"], "_torchdynamo_orig_callable"):
            return True
    return False


def parts_in(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules inside these blocks, each once, without the blocks themselves."""
    return list(dict.fromkeys(part for block in blocks for part in submodules(block) if part is not block))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What a model is, for a manifest: its class, size, dtypes and devices."""
    weights = list(model.parameters())
    config = getattr(model, "config", None)
    return {
        "fingerprint": None,
        "architecture": None,
        "model": {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "model_type": getattr(config, "model_type", None),
            "parameters": sum(weight.numel() for weight in weights),
            "dtypes": sorted({dtype_name(weight.dtype) for weight in weights}),
            "devices": sorted({str(weight.device) for weight in weights}),
        },
    }


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as `float32`."""
    return str(dtype).removeprefix("torch.")


@runtime_checkable
class BlockListener(Protocol):
    """Follows the run of the blocks, for an observer that must know what goes into them."""

    def block_entered(self, hidden_states: Tensor | None) -> None:
        """A block is called with these hidden states, as the model holds them."""

    def block_left(self, failed: bool) -> None:
        """The block entered last has returned, or failed."""

    def call_ended(self) -> None:
        """The call of the model ended or was interrupted: forget blocks that were not left."""


class WatchedBlocks(list[nn.Module]):
    """The blocks that are watched, each once, with their model and those who follow their run."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__(dict.fromkeys(blocks))
        self.model = model
        self.listeners: list[BlockListener] = []  # an observer's `attach` adds its own, and takes it away

    def modules(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules in the blocks, these among them; and all modules of the model."""
        modules = submodules(*self, self.model)
        return (modules if self.model in self else modules[: modules.index(self.model)]), modules


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., None], **options: bool) -> Iterator[None]:
    """Inside, every one of these modules has this forward hook."""
    with Hooks() as hooks:
        for module in modules:
            hooks.attach(module, hook, **options)
        yield


def refuse_scripted(modules: Sequence[nn.Module]) -> None:
    """Refuse TorchScript, in which hooks do not fire; `modules` are those of a model, the model first."""
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        name = next(name for name, part in modules[0].named_modules() if part is scripted[0])
        what = f"its part {name!r}" if name else "this model"
        sentence = f"{what} is a TorchScript module, in which hooks do not fire: watch it before it was scripted"
        raise WatchError(sentence, subject=name or "model")


def named_stacks(model: nn.Module, blocks: Blocks | NamedStacks | None) -> dict[str, Blocks | None]:
    """The stacks of blocks to measure: {name of a stack: what `find_blocks` takes to find its blocks}. A stack that is
    alone is named "". Two stacks are named by the first part of their dotted names in which they differ.

    >>> named_stacks(nn.Transformer(8, 2, 1, 1, 8, batch_first=True), None)
    {'encoder': 'encoder.layers', 'decoder': 'decoder.layers'}
    """
    if isinstance(blocks, Mapping):
        strange = [name for name in blocks if not isinstance(name, str) or not name or "/" in name]
        fault = f"got {strange[0]!r}" if strange else "received none"
        sentence = f"blocks={{...}} must name each stack by a text without '/'; {fault}"
        require(blocks and not strange, sentence, WatchError, "blocks")
        return dict(blocks)
    stack_names = list(stacks(model)) if blocks is None else []
    if len(stack_names) != 2:
        return {"": blocks}
    first_path, second_path = (name.split(".") for name in stack_names)
    first, second = next((a, b) for a, b in zip(first_path, second_path, strict=False) if a != b)
    # Stacks that are told apart by numbers are stages, which follow one another.
    return {"": None} if first.isdigit() else {first: stack_names[0], second: stack_names[1]}


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> tuple[str, list[nn.Module]]:
    """(dotted name of the stack, its blocks in order); the name is empty where blocks were listed.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> name, blocks = find_blocks(nn.TransformerEncoder(layer, 3))
    >>> name, len(blocks)
    ('layers', 3)
    """
    if blocks is None:
        by_name = stacks(model)
        if len(by_name) != 1:
            _refuse_stacks(model, by_name)
        name, members = next(iter(by_name.items()))
    elif isinstance(blocks, str):
        name, members = _named(model, blocks)
    else:
        name, members = "", _listed(model, blocks)
    return name, [uncompiled(block) for block in members]


def _refuse_stacks(model: nn.Module, by_name: Mapping[str, Sequence[nn.Module]]) -> NoReturn:
    """Raise for a model that has none or several of these stacks, with the candidates."""
    what = type(model).__name__
    if by_name:
        first, second = list(by_name)[:2]
        several = f"watch and Monitor take several, {{'one': {first!r}, 'two': {second!r}}}"
        holds = f"{what} holds {len(by_name)}: {_described(by_name)}: name one, as in blocks={first!r}; {several}"
        raise WatchError(f"blocks= must say which of several stacks of blocks is meant; {holds}", subject="blocks")
    candidates = dict(islice(_candidates(model), MOST_NAMED))
    could = f"{'; '.join(candidates.values())} could be: " if candidates else ""
    holds = f"{what} holds none: {could}name them, as in blocks={next(iter(candidates), repr(['block1', 'block2']))}"
    raise WatchError(f"watch finds blocks in a ModuleList or Sequential; {holds}", subject="blocks")


def describe_inner_stacks(name: str, blocks: Sequence[nn.Module]) -> str:
    """The stacks inside the blocks of the stack of this name, in words; empty if there are none."""
    inner = [stack for k, block in enumerate(blocks if name else ()) for stack in _stacks(f"{name}.{k}", block)]
    return _described({dotted: members for dotted, members in inner[:MOST_NAMED] if members[1:]})


def _described(by_name: Mapping[str, Sequence[nn.Module]]) -> str:
    """Stacks by their names, in words."""
    return ", ".join(f"{name or 'the model'} ({_kinds(members)})" for name, members in by_name.items())


def _kinds(members: Sequence[nn.Module]) -> str:
    """How many blocks there are, and of which classes, in words."""
    classes = list(dict.fromkeys(type(uncompiled(member)).__name__ for member in members))
    return f"{len(members)} blocks of {' and '.join(classes[:3])}{' and others' if classes[3:] else ''}"


def _candidates(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(how to name them, what they are) of what could be blocks: lists with composite modules, modules of one class."""
    for name, module in model.named_modules():
        children = {f"{name}.{part}".lstrip("."): child for part, child in module.named_children()}
        composite = {part: child for part, child in children.items() if any(True for _ in child.children())}
        if isinstance(module, nn.ModuleList | nn.Sequential):
            if name and len(children) > 1 and composite:
                yield repr(name), f"{name} ({_kinds(list(children.values()))})"
            continue
        for kind in dict.fromkeys(map(type, composite.values())):
            alike = [part for part, child in composite.items() if type(child) is kind]
            if len(alike) > 1 and not issubclass(kind, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                yield repr(alike), f"{', '.join(alike)} ({len(alike)} blocks of {kind.__name__})"


def stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Every stack of the model by its dotted name; only those with attention, where any has it."""
    by_name = dict(_stacks("", model))
    if len(by_name) == 1:
        return by_name
    return {name: members for name, members in by_name.items() if any(map(has_attention, members))} or by_name


def has_attention(module: nn.Module) -> bool:
    """True if the name of a class in a module says that it attends."""
    names = (kind.__name__.lower() for kind in set(map(type, submodules(module))))
    return any("attention" in name or "attn" in name for name in names)


def _stacks(name: str, module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """(dotted name, blocks) of the module itself if it is a stack, most of whose blocks are of one class, or of the
    stacks inside it. Inside a stack no other is looked for, unless it has one block alone, which may hold the stack
    that is meant."""
    members = _members(module)
    is_stack = bool(members) and all(any(part is not None for part in member._modules.values()) for member in members)
    if is_stack:
        most = max(Counter(type(uncompiled(member)) for member in members).values())
        is_stack = 2 * most > len(members) or (2 * most == len(members) and len(members) >= 4)
    inside: list[tuple[str, list[nn.Module]]] = []
    if not is_stack or len(members) == 1:
        for part, child in module.named_children():
            if child._modules:
                inside += _stacks(f"{name}.{part}".lstrip("."), child)
    if not is_stack:
        return inside
    # Inside of one block alone: a wrapper around the stack, or a stack of one.
    return [(k, v) for k, v in inside if len(v) > 1 and any(map(has_attention, v))] or [(name, members)]


def _members(module: nn.Module) -> list[nn.Module]:
    """The modules in a list, whose entries may be None, or in a dictionary of numbers; none in any other module."""
    numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    listed = numbered or isinstance(module, (nn.ModuleList, nn.Sequential))
    return [x for x in module._modules.values() if x is not None] if listed else []


def _named(model: nn.Module, name: str) -> tuple[str, list[nn.Module]]:
    """(name, blocks) of the stack that a user named, or of the only one in the part that was named."""
    part = _part(model, name)
    if members := _members(part):
        return name, members
    by_name = {f"{name}.{inner}": members for inner, members in stacks(part).items()}
    if len(by_name) == 1:
        return next(iter(by_name.items()))
    fault = f"{name} is a {type(part).__name__} with {_described(by_name) or 'none'}"
    way = "name one of these, or give the blocks as a list"
    raise WatchError(f"blocks= must name a stack of blocks, or a part with one in it; {fault}: {way}", subject="blocks")


def _listed(model: nn.Module, blocks: Sequence[str | nn.Module]) -> list[nn.Module]:
    """The blocks that a user listed, by name or as modules."""
    require(blocks, "blocks must name at least one block; received none", WatchError, "blocks")
    members = [_part(model, block) if isinstance(block, str) else block for block in blocks]
    ids = {id(module) for module in submodules(model)}
    for block in members:
        if not isinstance(block, nn.Module) or id(block) not in ids:
            sentence = f"blocks must be in {type(model).__name__}, or named; received another {type(block).__name__}"
            raise WatchError(sentence, subject="blocks")
        sentence = "a ModuleList is never called: name it alone, blocks='encoder.layer'"
        require(not isinstance(block, nn.ModuleList), sentence, WatchError, "blocks")
    return members


def _part(model: nn.Module, name: str) -> nn.Module:
    """The module of this dotted name; an error names those that are not nested deeper."""
    by_name = {dotted: part for dotted, part in model.named_modules(remove_duplicate=False) if dotted}
    if name in by_name:
        return by_name[name]
    outer = [dotted for dotted in by_name if dotted.count(".") <= name.count(".")]
    raise WatchError(one_of("blocks", name, islice(outer, 40)), subject="blocks")
