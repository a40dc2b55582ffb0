"""The remedies by name: what each changes, who published it, and at which numbers it changes nothing."""

from dataclasses import fields
from typing import Any

from rankscope.nets.remedies import REMEDIES
from sitegen.markdown import table


def page() -> str:
    """A row for each remedy."""
    return table(
        ["name", "what it does", "its numbers, if left out", "changes nothing at", "published by"],
        [[f"`{each.name}`", each.says, numbers(each), none(each), each.source] for each in REMEDIES.values()],
    )


def numbers(remedy: Any) -> str:
    """What it takes."""
    return ", ".join(f"{each.name} = {each.default:g}" for each in fields(remedy))


def none(remedy: Any) -> str:
    """The numbers at which it leaves a network as it is."""
    return ", ".join(f"{name} = {value:g}" for name, value in remedy.zero.items()) or "never"
