"""Docstrings as Markdown: their formulas set, their examples as code."""

import ast
import inspect
import re
from functools import cache
from itertools import zip_longest
from pathlib import Path
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


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def source_of(thing: Any) -> ast.ClassDef | ast.FunctionDef | None:
    """Where a class or a function is written."""
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:
        return None
    if file is None:
        return None
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
            return node
    return None


def comment(file: str, node: ast.stmt) -> str:
    """What a comment at the end of a statement says, as a sentence; empty without one."""
    line = Path(file).read_text(encoding="utf-8").splitlines()[(node.end_lineno or 1) - 1]
    text = line.encode()[node.end_col_offset or 0 :].decode().partition("  # ")[2]
    return f"{text[0].upper()}{text[1:]}." if text and not text.startswith(("fmt:", "type:")) else ""


def fields(thing: type) -> list[tuple[str, str, str, str]]:
    """(name, type, default, what is said of it) of each public field, in the words of the source."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for cls in reversed(thing.__mro__):
        node = source_of(cls) if cls.__module__.startswith("rankscope") else None
        body = node.body if isinstance(node, ast.ClassDef) else []
        for here, after in zip_longest(body, body[1:]):
            if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
                continue
            name, kind = here.target.id, ast.unparse(here.annotation)
            if name.startswith("_") or kind.startswith("ClassVar"):
                continue
            said = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said = inspect.cleandoc(str(after.value.value))
            said = said or comment(inspect.getsourcefile(cls) or "", here)
            default = "" if here.value is None else ast.unparse(here.value)
            default = re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", default)
            if not said and name in found:
                said = found[name][3]
            found[name] = (name, kind, default, said)
    return list(found.values())
