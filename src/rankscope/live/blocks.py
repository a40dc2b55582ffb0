"""Where a model's layers are: the stack of blocks that its tokens pass through, one after the other.

A stack is a `ModuleList` or `Sequential` of composite modules, all (or most) of one class, in no other stack.
Where some stacks hold attention, the others are no candidates: they are convolutions before a transformer,
or experts. One stack is found without asking; of several the user names one, since an encoder and a decoder
are two networks to measure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from torch import nn

from rankscope.errors import WatchError, one_of
from rankscope.live.compiled import original
from rankscope.live.modules import parts

Blocks = str | Sequence[str | nn.Module]
"""A dotted name of the stack (or of a part of the model with one stack in it), or the blocks themselves."""


NAMED = 5
"""Candidates that an error names."""


def blocks_of(model: nn.Module, blocks: Blocks | None = None) -> tuple[str, list[nn.Module]]:
    """(dotted name of the stack, its blocks in order); the name is empty where blocks were listed.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> name, found = blocks_of(nn.TransformerEncoder(layer, 3))
    >>> name, len(found)
    ('layers', 3)
    """
    if blocks is None:
        name, found = _found(model)
    else:
        name, found = _named(model, blocks) if isinstance(blocks, str) else ("", _listed(model, blocks))
    return name, [original(block) for block in found]


def _found(model: nn.Module) -> tuple[str, list[nn.Module]]:
    found = stacks(model)
    if len(found) == 1:
        return next(iter(found.items()))
    what = type(model).__name__
    if found:
        said = ", ".join(
            f"{name or '(the model itself)'} ({_kinds(inside)})" for name, inside in found.items()
        )
        raise WatchError(
            f"watch measures one stack of blocks; {what} holds {len(found)}: {said}: name one, as in "
            f"blocks={next(iter(found))!r}"
        )
    close = dict(islice(_candidates(model), NAMED))
    could = f"{'; '.join(close.values())} could be: " if close else ""
    raise WatchError(
        f"{what} must hold its blocks in a ModuleList or Sequential for watch to find them; it holds none: "
        f"{could}name them, as in blocks={next(iter(close), repr(['block1', 'block2']))}"
    )


def finer(name: str, blocks: Sequence[nn.Module]) -> str:
    """The stacks inside the blocks of a stack, in words."""
    inside = (
        [stack for k, block in enumerate(blocks) for stack in _inside(f"{name}.{k}", block)] if name else []
    )
    return ", ".join(f"{each} ({_kinds(members)})" for each, members in inside[:NAMED] if len(members) > 1)


def _kinds(members: Sequence[nn.Module]) -> str:
    """How many blocks, of which classes."""
    classes = list(dict.fromkeys(type(original(each)).__name__ for each in members))
    return f"{len(members)} blocks of {' and '.join(classes[:3])}{' and others' if classes[3:] else ''}"


def _candidates(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(how to write it, what it is) of what could be blocks though it is no stack: the members of a list
    where some are made of modules, and modules of one class that stand side by side."""
    for name, module in model.named_modules():
        children = {f"{name}.{part}".lstrip("."): child for part, child in module.named_children()}
        whole = {part: each for part, each in children.items() if next(each.children(), None) is not None}
        if isinstance(module, nn.ModuleList | nn.Sequential):
            if name and len(children) > 1 and whole:
                yield repr(name), f"{name} ({_kinds(list(children.values()))})"
            continue
        for kind in dict.fromkeys(map(type, whole.values())):
            alike = [part for part, each in whole.items() if type(each) is kind]
            if len(alike) > 1 and not issubclass(kind, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                yield repr(alike), f"{', '.join(alike)} ({len(alike)} blocks of {kind.__name__})"


def stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Every stack of the model by its dotted name; those with attention, where any has it."""
    found = dict(_stacks("", model))
    attending = {name: inside for name, inside in found.items() if any(map(has_attention, inside))}
    return attending or found


def has_attention(module: nn.Module) -> bool:
    """Whether a module says by a class name inside it that it attends."""
    names = (kind.__name__.lower() for kind in set(map(type, parts(module))))
    return any("attention" in name or "attn" in name for name in names)


def _stacks(name: str, module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and _alike(members := _members(module)):
        if len(members) == 1:  # a wrapper around the stack, or a stack of one
            inside = _inside(name, module)
            deeper = [(k, v) for k, v in inside if len(v) > 1 and any(map(has_attention, v))]
            return deeper or [(name, members)]
        return [(name, members)]
    return _inside(name, module)


def _members(module: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """What a list holds; places may be empty."""
    return [member for member in module if member is not None]


def _inside(name: str, module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    dotted = ((f"{name}.{part}".lstrip("."), child) for part, child in module.named_children())
    return [stack for part, child in dotted for stack in _stacks(part, child)]


def _alike(members: list[nn.Module]) -> bool:
    """Whether these could be blocks: modules made of modules, most of them of one class."""
    if not members or any(next(member.children(), None) is None for member in members):
        return False
    ((_, most),) = Counter(type(original(each)) for each in members).most_common(1)
    return 2 * most > len(members) or (2 * most == len(members) and len(members) >= 4)


def _named(model: nn.Module, name: str) -> tuple[str, list[nn.Module]]:
    part = _part(model, name)
    if isinstance(part, nn.ModuleList | nn.Sequential) and (members := _members(part)):
        return name, members
    found = stacks(part)
    if len(found) != 1:
        inside = ", ".join(f"{name}.{each} ({_kinds(members)})" for each, members in found.items())
        raise WatchError(
            f"blocks={name!r} must name a ModuleList or Sequential of blocks, or a part of the model with "
            f"one such in it; it is a {type(part).__name__} with {inside or 'none'}: "
            + ("name one of these" if found else "give the blocks as a list")
        )
    inner, members = next(iter(found.items()))
    return f"{name}.{inner}", members


def _listed(model: nn.Module, blocks: Sequence[str | nn.Module]) -> list[nn.Module]:
    if not blocks:
        raise WatchError("blocks must name at least one block; received none")
    found = [_part(model, block) if isinstance(block, str) else block for block in blocks]
    inside = {id(module) for module in parts(model)}
    for block in found:
        if not isinstance(block, nn.Module) or id(block) not in inside:
            raise WatchError(
                f"blocks must be modules inside {type(model).__name__}, or dotted names of such; "
                f"received a {type(block).__name__} that is not"
            )
        if isinstance(block, nn.ModuleList):
            raise WatchError(
                "a ModuleList is never called itself: name it alone, as in blocks='encoder.layer'"
            )
    return found


def _part(model: nn.Module, name: str) -> nn.Module:
    names = {known: part for known, part in model.named_modules(remove_duplicate=False) if known}
    if name in names:
        return names[name]
    outer = [known for known in names if known.count(".") <= name.count(".")]
    raise WatchError(one_of("blocks", name, islice(outer, 40)))
