"""Frozen dataclasses that are JSON objects in a file, with each field's type checked when it is read.

A field that a class does not know is kept under `more` and written again: files of other versions lose
nothing.
"""

from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON object with known fields; one that is None or empty is not written."""

    more: dict[str, Any] = field(default_factory=dict)
    """Fields that this version does not know."""

    def adding(self: R, **given: Any) -> R:
        """The same with these fields, known or not."""
        own = {name: given.pop(name) for name in _kinds(type(self)) if name in given}
        return replace(self, **own, more={**self.more, **given})

    def to_dict(self) -> dict[str, Any]:
        """As plain Python, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        known = {name: _plain(value) for name, value in values.items() if value not in (None, (), {})}
        return {**known, **self.more}

    @classmethod
    def from_dict(cls: type[R], given: object) -> R:
        """What `to_dict` gave; a ValueError that names the field where one is of another type."""
        if not isinstance(given, dict):
            raise ValueError(f"an object must describe a {cls.__name__.lower()}; got {_called(given)}")
        kinds = _kinds(cls)
        known = {
            name: _typed(name, kinds[name], given[name]) for name in kinds if given.get(name) is not None
        }
        return cls(**known, more={name: value for name, value in given.items() if name not in kinds})


def _kinds(cls: type) -> dict[str, Any]:
    """The type of each known field, without None."""
    hints = {name: kind for name, kind in get_type_hints(cls).items() if name != "more"}
    return {
        name: next(each for each in get_args(kind) if each is not NoneType)
        if get_origin(kind) is UnionType
        else kind
        for name, kind in hints.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _typed(name: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(value)
    origin = get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, get_args(kind)[0], each) for each in value)
    if kind == dict[str, str] and isinstance(value, dict):
        return {key: _typed(f"{name}.{key}", str, each) for key, each in value.items()}
    if origin is tuple or not isinstance(value, float | int if origin is float else origin):
        expected = "list" if origin is tuple else origin.__name__
        raise ValueError(f"{name} must be a {expected}; got {_called(value)}")
    return value


def _called(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
