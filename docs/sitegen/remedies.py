"""The remedies by name: what each changes, who published it, at which numbers it changes nothing; and what
`rankscope remedies --full` found of them, from the outcome that the docs of the studies keep."""

import json
from dataclasses import fields
from typing import Any

from rankscope.remedies import REMEDIES
from sitegen import file_of
from sitegen.markdown import table

OUTCOME = file_of("reproduction/full/remedies/outcome.json")


def page() -> str:
    """A row for each remedy."""
    return table(
        ["name", "what it does", "its numbers, if left out", "changes nothing at", "published by"],
        [[f"`{each.name}`", each.formula, numbers(each), none(each), each.citation] for each in REMEDIES.values()],
    )


def numbers(remedy: Any) -> str:
    """What it takes."""
    return ", ".join(f"{each.name} = {each.default:g}" for each in fields(remedy))


def none(remedy: Any) -> str:
    """The numbers at which it leaves a network as it is."""
    return ", ".join(f"{name} = {value:g}" for name, value in remedy.zero.items()) or "never"


def claims() -> str:
    """A row for each published claim, with its verdict."""
    found = json.loads(OUTCOME.read_text(encoding="utf-8"))["comparisons"]
    rows = [
        [each["what"], each["published"], each["ours"], " ".join(filter(None, [each["verdict"], said(each)]))]
        for each in found
    ]
    return table(["claim", "published", "here", "verdict"], rows)


def said(claim: dict[str, Any]) -> str:
    """What to know of a verdict."""
    return f"({claim['because']})" if claim["because"] else ""


def trainings() -> str:
    """A table a setting, each to be opened."""
    found = json.loads(OUTCOME.read_text(encoding="utf-8"))["shown"]
    parts = []
    for each in found:
        if each["title"].startswith("Trained"):
            body = f"{table(each['headings'], each['rows'])}\n\n{each['note']}"
            parts.append(f":::::{{dropdown}} {each['title']}\n\n{body}\n:::::")
    return "\n\n".join(parts)
