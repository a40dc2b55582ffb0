"""Structures: nested dataclasses, tuples and dicts of tensors, as weights, states and records of blocks are.

What is done with all tensors of one at once is written here: they are listed, named, moved, and two structures are
asked whether they have one form. A part that stands at several places of a structure is met once, and stands at the
same places of what is made of it. Of layers that are read one at a time (`weights.StreamedLayers`) none is read: they
convert themselves.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

Structure = TypeVar("Structure")


class _Kind(NamedTuple):
    """How structures of one class are taken apart."""

    names: tuple[str, ...] | None  # of the fields of a dataclass; None of other structures
    parts: Callable[[Any], Sequence[Any]]  # a structure to what it is made of, in order


class _Kinds(dict[type, "_Kind | None"]):
    """The kind of every class that was met; None of classes whose objects are no structures."""

    def __missing__(self, of: type) -> "_Kind | None":
        kind = None
        if is_dataclass(of):
            names = tuple(field.name for field in fields(of))
            # `attrgetter` gives several attributes as a tuple, but one alone.
            few = len(names) < 2
            kind = _Kind(names, (lambda value: [getattr(value, name) for name in names]) if few else attrgetter(*names))
        elif issubclass(of, tuple | dict):
            kind = _Kind(None, tuple if issubclass(of, tuple) else lambda value: tuple(value.values()))
        elif hasattr(of, "converted"):  # layers that are read one at a time
            kind = _Kind(None, lambda value: (value.source.like,))
        self[of] = kind
        return kind


_kinds = _Kinds()


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, each once."""
    tensors: dict[int, Tensor] = {}
    waiting = [structure]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), value)
        elif (kind := _kinds[type(value)]) is not None:
            waiting += kind.parts(value)[::-1]
    return list(tensors.values())


def form(structure: Any) -> Hashable:
    """Equal for structures that differ in nothing but the values of their tensors."""
    tensors: dict[int, Tensor] = {}
    numbers: dict[int, int] = {}
    places: list[Any] = []
    waiting = [structure]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors[id(value)] = value
            places.append(numbers.setdefault(id(value), len(numbers)))
        elif (kind := _kinds[type(value)]) is not None:
            parts = kind.parts(value)
            places.append((type(value), tuple(value) if isinstance(value, dict) else len(parts)))
            waiting += parts[::-1]
        else:
            places.append(value)
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors.values()]), repr(places)


def converted(structure: Structure, move: Callable[..., Any], *others: Structure) -> Structure:
    """The structure with `move(tensor)` in the place of every tensor; a tensor met twice is moved once.

    With `others`, structures of the same form, `move` is called with the tensors of all at the same place."""
    return cast(Structure, _converted((structure, *others), move, {}))


def _converted(values: tuple[Any, ...], move: Callable[..., Any], seen: dict[tuple[int, ...], Any]) -> Any:
    # No function inside `converted`: one that calls itself would hold all tensors until garbage is collected.
    first, key = values[0], tuple(map(id, values))
    if key in seen:
        return seen[key]
    moved: Any
    if isinstance(first, Tensor):
        moved = move(*values)
    elif hasattr(first, "converted"):
        moved = first.converted(move)
    elif (kind := _kinds[type(first)]) is not None:
        parts = []
        for items in zip(*map(kind.parts, values), strict=True):
            leaf = _kinds[type(items[0])] is None and not isinstance(items[0], Tensor)
            parts.append(items[0] if leaf else _converted(items, move, seen))
        if kind.names is not None:
            moved = type(first)(**dict(zip(kind.names, parts, strict=True)))
        elif isinstance(first, dict):
            moved = dict(zip(first, parts, strict=True))
        else:
            moved = getattr(type(first), "_make", type(first))(parts)
    else:
        moved = first
    seen[key] = moved
    return moved


def named(structure: object, prefix: str = "", layers: bool = True) -> dict[str, Tensor]:
    """Every tensor of a structure, by its dotted name; of a network's weights, without their `layers` if so asked."""
    tensors: dict[str, Tensor] = {}
    kind = _kinds[type(structure)]
    if isinstance(structure, dict):
        members = list(structure.items())
    elif kind is not None and kind.names is not None:
        members = list(zip(kind.names, kind.parts(structure), strict=True))
    else:  # a tuple, or layers that are read one at a time
        members = [(str(index), item) for index, item in enumerate(cast(Sequence[Any], structure))]
    for name, value in members:
        if name == "layers" and not layers:
            continue
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Tensor):
            tensors[path] = value
        elif value is not None:
            tensors |= named(value, path)
    return tensors
