"""Docstrings as Markdown: their formulas set, their examples as code."""

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import dedent
from typing import Any

from sitegen.markdown import blocks, formulas


def of(thing: Any) -> str:
    """What an object says of itself."""
    found = thing.__doc__ or ""
    if isinstance(thing, type) and re.match(rf"{thing.__name__}\(", found):  # a dataclass that says nothing
        found = ""
    return inspect.cleandoc(found)


def markdown(text: str) -> str:
    """A docstring as part of a page."""
    parts = re.split(r"(^>>> .*?(?:\n\s*\n|\Z))", text + "\n\n", flags=re.DOTALL | re.MULTILINE)
    return "\n\n".join(_example(each) if each.startswith(">>> ") else _prose(each) for each in parts).strip()


def _example(text: str) -> str:
    return f"```pycon\n{text.strip()}\n```"


def _prose(text: str) -> str:
    text = re.sub(r"(?<=\n)\n((?: {4,}.*[─│├└].*\n?)+)", lambda tree: f"\n```text\n{tree[1]}```\n", "\n" + text)
    kept = re.split(r"(^```.*?^```$)", blocks(text + "\n"), flags=re.DOTALL | re.MULTILINE)
    return "".join(each if each.startswith("```") else formulas(escaped(each)) for each in kept).strip()


def escaped(text: str) -> str:
    """The same text, with what Markdown would take for a sign of its own, outside of code, kept as it is."""
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith(("    ", "|")):
            lines.append(line)
            continue
        parts = re.split(r"(`[^`\n]*`)", line)
        lines.append("".join(each if each.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", each) for each in parts))
    return "".join(lines)


def source_of(thing: Any) -> ast.stmt | None:
    """A class or a function as it is written; None where nobody wrote it, as the methods that a dataclass is given."""
    try:
        return ast.parse(dedent(inspect.getsource(thing))).body[0]
    except (TypeError, OSError):
        return None


def told(body: Sequence[ast.stmt], source: str) -> Iterator[tuple[ast.stmt, str]]:
    """Each statement of a class or a module with what is said of it: in the string beneath it, or else in the comment
    at its end, as a sentence."""
    lines = source.splitlines()
    for node, after in zip_longest(body, body[1:]):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield node, inspect.cleandoc(str(after.value.value))
            continue
        text = lines[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode().partition("  # ")[2]
        yield node, f"{text[0].upper()}{text[1:]}." if text and not text.startswith(("fmt:", "type:")) else ""


def fields(thing: type) -> list[tuple[str, str, str, str]]:
    """(name, type, default, what is said of it) of each public field, in the words of the source."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for cls in reversed(thing.__mro__):
        node = source_of(cls) if cls.__module__.startswith("rankscope") else None
        if not isinstance(node, ast.ClassDef):
            continue
        for here, said in told(node.body, dedent(inspect.getsource(cls))):
            if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
                continue
            name, kind = here.target.id, ast.unparse(here.annotation)
            if name.startswith("_") or kind.startswith("ClassVar"):
                continue
            default = "" if here.value is None else ast.unparse(here.value)
            default = re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", default)
            found[name] = (name, kind, default, said or found.get(name, ("",) * 4)[3])
    return list(found.values())
