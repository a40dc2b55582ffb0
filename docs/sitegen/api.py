"""The public names, room by room, from their signatures and docstrings."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import rankscope
from sitegen.docstrings import comment, fields, markdown, of, source_of
from sitegen.markdown import formulas, table

INSIDE = ("__main__", "cli", "data", "files", "extras", "naming", "plugins", "shapes", "shipped", "workers")
"""Rooms that nobody calls from Python: the commands, and what others are made with."""
LOOPS = ("monitor.loops.transformers", "monitor.loops.lightning")
"""Callbacks of other packages' loops, which bring these packages along when they are imported."""
DEEPER = ("monitor.alarm_rules", "monitor.writers", *LOOPS)
"""Public modules inside rooms."""


BESIDE = {"studies": "rankscope_studies"}
"""Packages of ours beside rankscope, by the name of their page."""


def rooms() -> list[str]:
    """Packages of rankscope that are called from Python, and those beside it, by name."""
    found = [each.name for each in pkgutil.iter_modules(rankscope.__path__)]
    return [name for name in found if name not in INSIDE] + [*BESIDE]


def module(name: str) -> ModuleType:
    """`rankscope` itself, one of its rooms, or a package beside it."""
    return import_module(BESIDE.get(name) or f"rankscope.{name}".rstrip("."))


def public(name: str) -> list[str]:
    """The public names of a room."""
    here = module(name)
    named = getattr(here, "__all__", None)
    if named is None:
        named = [
            each
            for each, thing in vars(here).items()
            if not each.startswith("_") and getattr(thing, "__module__", None) == here.__name__
        ]
    return list(named)


@cache
def homes() -> dict[int, str]:
    """Where each class is described, by its id."""
    found: dict[int, str] = {}
    for name in [*rooms(), *(each for each in DEEPER if each not in LOOPS), ""]:  # the top comes last, and counts
        here = module(name)
        found |= {id(getattr(here, each)): f"{here.__name__}.{each}" for each in public(name)}
    return found


def page(name: str = "") -> str:
    """All public names of a room; those that the top has are described there."""
    here = module(name)
    parts = [markdown(of(here)), f":::{{py:module}} {here.__name__}\n:::"]
    for each in public(name):
        if name and each in rankscope.__all__:
            parts.append(f"- {{py:obj}}`rankscope.{each}`: {summary(getattr(rankscope, each))}")
    for each in public(name):
        if not name or each not in rankscope.__all__:
            parts.append(entry(here.__name__, each, getattr(here, each)))
    return "\n\n".join(parts)


def summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    return formulas(of(thing).split("\n\n")[0].replace("\n", " "))


def entry(home: str, name: str, thing: Any) -> str:
    """One name."""
    if isinstance(thing, type) and thing.__module__.startswith(rankscope.__name__):
        return "\n".join(_class(name, thing))
    if isinstance(thing, type):  # of another package, for types
        return directive("data", name, f"`{thing.__module__}.{thing.__qualname__}`.")
    if inspect.isroutine(thing) or hasattr(thing, "cache_info"):
        inner = inspect.unwrap(thing)
        return directive("function", name + signature(inner), markdown(of(inner)))
    told = of(thing) if isinstance(thing, ModuleType) else _constant(home, name)
    said = markdown(told) or f"A `{type(thing).__name__}`."
    if isinstance(thing, dict) and all(isinstance(each, str) for each in thing):
        said += " By name: " + ", ".join(f"`{each}`" for each in thing) + "."
    return directive("data", name, said)


def _constant(home: str, name: str) -> str:
    """What stands beneath a constant, where it is written."""
    for where in [home, *(each for each in _inside(home))]:
        source = inspect.getsource(import_module(where))
        body = ast.parse(source).body
        for node, after in pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            written = [each for target in targets for each in getattr(target, "elts", [target])]  # `A, B = 1, 2` too
            if any(isinstance(each, ast.Name) and each.id == name for each in written):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    return inspect.cleandoc(str(after.value.value))
                if said := comment(inspect.getsourcefile(import_module(where)) or "", node):
                    return said
    return ""


def _inside(home: str) -> Iterator[str]:
    for each in pkgutil.iter_modules(getattr(import_module(home), "__path__", [])):
        if not each.name.startswith("_") and not each.name.endswith("_triton"):  # Triton may not be there
            yield f"{home}.{each.name}"
            if each.ispkg and each.name != "loops":  # whose packages may not be there either
                yield from _inside(f"{home}.{each.name}")


def _class(name: str, thing: type) -> Iterator[str]:
    kind = "exception" if issubclass(thing, BaseException) else "class"
    title = name if kind == "exception" else name + (made(thing) if fields(thing) else signature(thing))
    yield f"::::::{{py:{kind}}} {title}\n\n{markdown(of(thing))}\n"
    rows = [
        [f"`{field}`", f"`{annotation}`", f"`{default}`" if default else "", " ".join(markdown(said).split())]
        for field, annotation, default, said in fields(thing)
    ]
    if rows:
        yield table(["field", "type", "if left out", "meaning"], rows)
    for method, member in members(thing):
        if isinstance(member, property | cached_property):
            yield directive("property", method, markdown(of(member)))
        else:
            inner: Any = getattr(member, "__func__", member)
            option = f":{type(member).__name__}:\n" if isinstance(member, classmethod | staticmethod) else ""
            yield directive(
                "method", method + signature(inspect.unwrap(inner), method=True), markdown(of(inner)), option
            )
    yield "::::::\n"


def made(thing: type) -> str:
    """How a class with fields is made: those that must be given, the others being in the table beneath."""
    given = fields(thing)
    must = [name for name, _, default, _ in given if not default]
    return f"({', '.join([*must, '...'] if len(must) < len(given) else must)})"


def members(thing: type) -> list[tuple[str, Any]]:
    """Methods and properties that say what they are, its own and those it has from classes of ours."""
    found: dict[str, Any] = {}
    for cls in reversed(thing.__mro__):
        if cls.__module__.startswith("rankscope"):
            found |= {name: each for name, each in vars(cls).items() if not name.startswith("_")}
    kinds = (property, cached_property, classmethod, staticmethod)
    return [
        (name, each)
        for name, each in found.items()
        if (isinstance(each, kinds) or inspect.isfunction(each)) and of(getattr(each, "__func__", each))
    ]


def directive(kind: str, title: str, body: str, options: str = "") -> str:
    """An entry of Sphinx's Python domain."""
    return f":::::{{py:{kind}}} {title}\n{options}\n{body}\n:::::\n"


def signature(thing: Any, method: bool = False) -> str:
    """As it is written, with its types: `(net: Transformer, X: Tensor, *, metrics: MetricsLike = ...)`. Of a
    class without a constructor of its own, which has its fields in a table, the names alone."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return "()"
    node = source_of(thing)
    written = node.args if isinstance(node, ast.FunctionDef) else _constructor(node)
    home = thing.__module__
    types, defaults = (_types(written, home), _defaults(written)) if written else ({}, {})
    parts, star = [], False
    for at, each in enumerate(found.parameters.values()):
        if at == 0 and each.name in ("self", "cls") and method:
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
        mark = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        star = star or mark == "*" or each.kind is each.KEYWORD_ONLY
        kind = types.get(each.name, "")
        text = mark + each.name + (f": {kind}" if kind else "")
        if each.default is not each.empty:
            text += (" = " if kind else "=") + defaults.get(each.name, _shown(each.default))
        parts.append(text)
    returns = node.returns if isinstance(node, ast.FunctionDef) else None
    return "(" + ", ".join(parts) + ")" + (f" -> {_plain(returns, home)}" if returns else "")


def _constructor(node: ast.AST | None) -> ast.arguments | None:
    body = node.body if isinstance(node, ast.ClassDef) else []
    own = (each.args for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    return next(own, None)


def _types(written: ast.arguments, home: str) -> dict[str, str]:
    named = [*written.posonlyargs, *written.args, *written.kwonlyargs, written.vararg, written.kwarg]
    return {each.arg: _plain(each.annotation, home) for each in named if each and each.annotation}


def _plain(annotation: ast.expr, home: str) -> str:
    """A type as it is written, without quotes, names that are described here in full."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return ast.unparse(_Named(home).visit(annotation))


class _Named(ast.NodeTransformer):
    """Puts full names in the place of names, so that none leads to another's class of the same name."""

    def __init__(self, home: str) -> None:
        self.home = home

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """One name: where it is described, or else where it comes from, if that is another package."""
        here = import_module(self.home)
        thing = getattr(here, node.id, None)
        where = imported(self.home).get(node.id, "")
        if thing is None and where.startswith("rankscope"):  # imported for its type alone
            thing = getattr(import_module(where), node.id, None)
        full = homes().get(id(thing)) if isinstance(thing, type) else None
        if full is None and where and not where.startswith("rankscope"):
            full = f"{where}.{node.id}"
        return ast.parse(full, mode="eval").body if full else node


@cache
def imported(home: str) -> dict[str, str]:
    """{name: the module that it is imported from}, of a module."""
    tree = ast.parse(inspect.getsource(import_module(home)))
    found = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module]
    return {(name.asname or name.name): str(each.module) for each in found for name in each.names}


def _defaults(written: ast.arguments) -> dict[str, str]:
    plain = [*written.posonlyargs, *written.args]
    last = plain[len(plain) - len(written.defaults) :]
    pairs = [*zip(last, written.defaults, strict=True), *zip(written.kwonlyargs, written.kw_defaults, strict=True)]
    return {name.arg: ast.unparse(value) for name, value in pairs if value is not None}


def _shown(default: Any) -> str:
    found = repr(default)
    return found if len(found) < 40 and "<" not in found else "..."
