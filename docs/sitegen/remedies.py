"""The remedies by name: what each changes, who published it, and at which numbers it changes nothing."""

from dataclasses import fields
from typing import Any

from rankscope.nets.remedies import REMEDIES
from sitegen.markdown import table


def page() -> str:
    """A row for each remedy."""
    return table(
        ["`--remedy`", "what it does", "published by", "changes nothing at"],
        [[spelt(each), each.says, each.source, none(each)] for each in REMEDIES.values()],
    )


def spelt(remedy: Any) -> str:
    """Its name, and the numbers it takes."""
    numbers = ",".join(f"{each.name}={each.default:g}" for each in fields(remedy))
    return f"`{remedy.name}:{numbers}`" if numbers else f"`{remedy.name}`"


def none(remedy: Any) -> str:
    """The numbers at which it leaves a network as it is."""
    return ", ".join(f"{name} = {value:g}" for name, value in remedy.zero.items()) or "never"
