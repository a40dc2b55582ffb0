"""`Record`: a frozen dataclass that is a JSON object in a file; types of its fields are checked on reading.

`Manifest`, its parts and the entries of `manifest.json` are records. A field that a class does not know is
kept under `more` and written again, so files of other versions lose nothing.
"""

from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON object with known fields; a field that is None or empty is not written."""

    more: dict[str, Any] = field(default_factory=dict)
    """Fields that this version does not know."""

    def adding(self: R, **values: Any) -> R:
        """A copy with these fields set, whether the class knows them or not."""
        known = {name: values.pop(name) for name in _kinds(type(self)) if name in values}
        return replace(self, **known, more={**self.more, **values})

    def to_dict(self) -> dict[str, Any]:
        """The record as plain Python, for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "more"}
        known = {name: _plain(value) for name, value in values.items() if value not in (None, (), {})}
        return {**known, **self.more}

    @classmethod
    def from_dict(cls: type[R], content: object) -> R:
        """The record that `to_dict` wrote; a ValueError names the first field of another type."""
        if not isinstance(content, dict):
            raise ValueError(f"an object must describe a {cls.__name__.lower()}; got {_type_name(content)}")
        kinds = _kinds(cls)
        known = {
            name: _typed(name, kinds[name], content[name]) for name in kinds if content.get(name) is not None
        }
        return cls(**known, more={name: value for name, value in content.items() if name not in kinds})


def _kinds(cls: type) -> dict[str, Any]:
    """The type of each known field, without None."""
    hints = {name: kind for name, kind in get_type_hints(cls).items() if name != "more"}
    return {
        name: next(option for option in get_args(kind) if option is not NoneType)
        if get_origin(kind) is UnionType
        else kind
        for name, kind in hints.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _typed(name: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(value)
    origin = get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, get_args(kind)[0], item) for item in value)
    if kind == dict[str, str] and isinstance(value, dict):
        return {key: _typed(f"{name}.{key}", str, item) for key, item in value.items()}
    if origin is tuple or not isinstance(value, float | int if origin is float else origin):
        expected = "list" if origin is tuple else origin.__name__
        raise ValueError(f"{name} must be a {expected}; got {_type_name(value)}")
    return value


def _type_name(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
