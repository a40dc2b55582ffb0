"""What docs/cli.md says of `--json`, read as shapes, and answers held to them.

`running.py` holds the JSON of every command that a test runs to its line of the page."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def section(heading: str) -> list[list[str]]:
    """The cells of each row of the table under a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def shapes() -> dict[str, list[str]]:
    """The shapes of each command; some have another with an option, or of other runs."""
    found: dict[str, list[str]] = {}
    for commands, *cells in section("JSON"):
        for command in re.findall(r"`([a-z]+)[^`]*`", commands):
            found.setdefault(command, []).extend(re.findall(r"`([{[].*?[}\]](?: or null)?)`", " | ".join(cells)))
    return found


def entries(inside: str) -> list[str]:
    """What stands between commas, those in inner brackets left alone."""
    depth, parts = 0, [""]
    for letter in inside:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def fault(shape: str, value: Any) -> str | None:
    """Why a value is not of a shape; None if it is."""
    if shape.endswith(" or null"):
        return None if value is None else fault(shape.removesuffix(" or null"), value)
    inner = shape[1:-1].strip()
    if shape.startswith("["):
        if not isinstance(value, list):
            return f"{shape} is no list: {value!r:.80}"
        return fault(inner, value[0]) if value and inner != "..." else None
    if not shape.startswith("{") or shape == "{...}":
        return None
    if not isinstance(value, dict):
        return f"{shape} is no table: {value!r:.80}"
    named = dict([*each.split(": ", 1), ""][:2] for each in entries(inner))
    more = named.pop("...", None) is not None
    missing, unsaid = set(named) - set(value), set() if more else set(value) - set(named)
    if missing or unsaid:
        return f"docs/cli.md names {sorted(missing)}, which is not there, and lacks {sorted(unsaid)}"
    return next((wrong for name, of in named.items() if (wrong := fault(of, value[name]))), None)


def must_be_documented(command: str, answer: Any) -> None:
    """Hold the JSON of a command to the shapes that docs/cli.md has of it."""
    faults = [fault(shape, answer) for shape in shapes()[command]]
    assert None in faults, f"{command} --json: {faults}"
