"""Every remedy that has a name: the built-in ones, and those of plugins."""

import math
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from rankscope.errors import ArchitectureError, one_of
from rankscope.plugins import Group
from rankscope.remedies.base import NamedRemedy
from rankscope.remedies.differential import HeadNorm
from rankscope.remedies.names import REMEDY_FILES


def _class_of(name: str) -> type[NamedRemedy]:
    members = vars(import_module(f"rankscope.remedies.{REMEDY_FILES[name]}")).values()
    kinds = [kind for kind in members if isinstance(kind, type) and issubclass(kind, NamedRemedy)]
    return next(kind for kind in kinds if getattr(kind, "name", "") == name)


def _is_remedy(given: Any) -> bool:
    return isinstance(given, type) and issubclass(given, NamedRemedy) and is_dataclass(given)


SHIPPED = {name: _class_of(name) for name in REMEDY_FILES}
REMEDIES: Group[type[NamedRemedy]] = Group("remedies", "a dataclass derived from NamedRemedy", _is_remedy)
PIECES: dict[str, type[NamedRemedy]] = {HeadNorm.name: HeadNorm}
"""Parts that a remedy brings beside its own, which files of networks name as well."""
BUILT_IN = (*SHIPPED.values(), *PIECES.values())
"""The classes that theorems know about."""


def remedy(spec: str, **numbers: Any) -> NamedRemedy:
    """Return the remedy of a line such as `contranorm:s=0.1`, or of a name and numbers.

    >>> remedy("attnscale:w=0.5")
    AttnScale(w=0.5)
    """
    name, _, written = spec.partition(":")
    kind = PIECES.get(name) or REMEDIES.get(name)
    if kind is None:
        raise ArchitectureError(one_of("remedy", name, REMEDIES), subject="remedy")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values = dict(numbers)
    for pair in filter(None, written.split(",")):
        key, _, value = pair.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            sentence = "the numbers of a remedy must be NAME=NUMBER, as attnscale:w=0.5"
            raise ArchitectureError(f"{sentence}; got {pair!r} in {spec!r}", subject=name) from None
    for key, value in values.items():
        if key not in known:
            raise ArchitectureError(f"{name} has no number {key!r}; it has {', '.join(known) or 'none'}", subject=key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArchitectureError(f"{key} of {name} must be a number; got {value!r}", subject=key)
        number_type = type(known[key].default)
        if not math.isfinite(value) or (number_type is int and value != int(value)):
            expected = "a whole number" if number_type is int else "a finite number"
            raise ArchitectureError(f"{key} of {name} must be {expected}; got {value!r}", subject=key)
        values[key] = number_type(value)
    return kind(**values)
