"""Remedies against collapse, as published since 2021: changes that go onto any network.

    net.with_remedy("attnscale", w=0.5)    by name, with its numbers (`catalogue.py`)
    net.with_remedy(mine)                  an object of your own (`base.py` says what it must have)

Everything about a remedy is in its file: formula, citation, the numbers at which it changes nothing, what
theory says, the published claims, and its rules: plain, in deviation arithmetic, and frozen for paths. Rules
get what they need through the `rules` that is passed to them (`nets/parts.py`), so that this room imports
none of the arithmetics. To add a remedy, write its file and add one line to the list in `names.py`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankscope.remedies.names import REMEDY_FILES

if TYPE_CHECKING:
    from rankscope.remedies.base import Claim, NamedRemedy, Remedy, TheoryNote
    from rankscope.remedies.catalogue import BUILT_IN, REMEDIES, remedy
    from rankscope.remedies.shaping import PatternShaping

__all__ = [
    "BUILT_IN", "Claim", "NamedRemedy", "PatternShaping", "REMEDIES", "REMEDY_FILES", "Remedy", "TheoryNote", "remedy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # The command line reads the names of remedies without torch: what needs it is imported when asked for.
    if name not in __all__:
        raise AttributeError(f"module 'rankscope.remedies' has no attribute {name!r}")
    homes = dict.fromkeys(("BUILT_IN", "REMEDIES", "remedy"), "catalogue") | {"PatternShaping": "shaping"}
    return getattr(import_module(f"rankscope.remedies.{homes.get(name, 'base')}"), name)
