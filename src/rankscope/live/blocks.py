"""Where a model's layers are: the stack of blocks that its tokens pass through, one after the other.

A stack is a `ModuleList` or `Sequential` of composite modules, all (or most) of one class, in no other stack.
Where some stacks hold attention, the others are no candidates: they are convolutions before a transformer,
or experts. One stack is found without asking; of several the user names one, since an encoder and a decoder
are two networks to measure.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from torch import nn

from rankscope.errors import WatchError, one_of

Blocks = str | Sequence[str | nn.Module]
"""A dotted name of the stack (or of a part of the model with one stack in it), or the blocks themselves."""


def blocks_of(model: nn.Module, blocks: Blocks | None = None) -> tuple[str, list[nn.Module]]:
    """(dotted name of the stack, its blocks in order); the name is empty where blocks were listed.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> name, found = blocks_of(nn.TransformerEncoder(layer, 3))
    >>> name, len(found)
    ('layers', 3)
    """
    if isinstance(blocks, str):
        return _named(model, blocks)
    if blocks is not None:
        return "", _listed(model, blocks)
    found = stacks(model)
    if len(found) == 1:
        return next(iter(found.items()))
    what = type(model).__name__
    if not found:
        raise WatchError(
            f"{what} must hold its blocks in a ModuleList or Sequential for watch to find them; it holds "
            "none: name them, as in blocks=['block1', 'block2']"
        )
    sizes = ", ".join(
        f"{name or '(the model itself)'} ({len(inside)} blocks)" for name, inside in found.items()
    )
    name = next(iter(found))
    raise WatchError(
        f"watch measures one stack of blocks; {what} holds {len(found)}: {sizes}: name one, as in "
        f"blocks={name!r}"
    )


def stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Every stack of the model by its dotted name; those with attention, where any has it."""
    found = dict(_stacks("", model))
    attending = {name: inside for name, inside in found.items() if any(map(has_attention, inside))}
    return attending or found


def has_attention(module: nn.Module) -> bool:
    """Whether a module says by a class name inside it that it attends."""
    names = (type(part).__name__.lower() for part in module.modules())
    return any("attention" in name or "attn" in name for name in names)


def _stacks(name: str, module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and _alike(members := list(module)):
        if len(members) == 1:  # a wrapper around the stack, or a stack of one
            inside = _inside(name, module)
            deeper = [(k, v) for k, v in inside if len(v) > 1 and any(map(has_attention, v))]
            return deeper or [(name, members)]
        return [(name, members)]
    return _inside(name, module)


def _inside(name: str, module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    dotted = ((f"{name}.{part}".lstrip("."), child) for part, child in module.named_children())
    return [stack for part, child in dotted for stack in _stacks(part, child)]


def _alike(members: list[nn.Module]) -> bool:
    """Whether these could be blocks: modules made of modules, most of them of one class."""
    if not members or any(next(member.children(), None) is None for member in members):
        return False
    ((_, most),) = Counter(map(type, members)).most_common(1)
    return 2 * most > len(members) or (2 * most == len(members) and len(members) >= 4)


def _named(model: nn.Module, name: str) -> tuple[str, list[nn.Module]]:
    part = _part(model, name)
    if isinstance(part, nn.ModuleList | nn.Sequential) and len(part):
        return name, list(part)
    found = stacks(part)
    if len(found) != 1:
        raise WatchError(
            f"blocks={name!r} must name a ModuleList or Sequential of blocks, or a part of the model with "
            f"one such in it; it is a {type(part).__name__} with {len(found)}: give the blocks as a list"
        )
    inner, members = next(iter(found.items()))
    return f"{name}.{inner}", members


def _listed(model: nn.Module, blocks: Sequence[str | nn.Module]) -> list[nn.Module]:
    if not blocks:
        raise WatchError("blocks must name at least one block; received none")
    found = [_part(model, block) if isinstance(block, str) else block for block in blocks]
    inside = {id(module) for module in model.modules()}
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
