"""The public names, room by room, from their signatures and docstrings, as Markdown.

Sphinx's autodoc with napoleon was tried on these pages and does not do it: it leaves out constants that a room's face
hands on from its files (a fifth of the names of `sources`) and fields whose meaning is a comment beside them, takes
what stands before a colon in the string beneath a field for its type, spells aliases of types out, and reads docstrings
as reStructuredText, in which tables and formulas such as `|A|` are errors. What would have to be hooked into it (the
comments, the constants, Markdown, formulas) is most of this file and of `docstrings.py`.
"""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import rankscope
from sitegen.docstrings import fields, markdown, of, source_of, told
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
    text = of(thing) if isinstance(thing, ModuleType) else _constant(home, name)
    said = markdown(text) or f"A `{type(thing).__name__}`."
    if isinstance(thing, dict) and all(isinstance(each, str) for each in thing):
        said += " By name: " + ", ".join(f"`{each}`" for each in thing) + "."
    return directive("data", name, said)


def _constant(home: str, name: str) -> str:
    """What is said of a constant where it is written, in a room or inside it."""
    return next(filter(None, (_constants(where).get(name) for where in [home, *_inside(home)])), "")


@cache
def _constants(where: str) -> dict[str, str]:
    """What is said of the constants of a module, by name; `A, B = 1, 2` are two."""
    source, found = inspect.getsource(import_module(where)), dict[str, str]()
    for node, said in told(ast.parse(source).body, source):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [each for target in targets for each in getattr(target, "elts", [target])]
        found |= {each.id: said for each in names if isinstance(each, ast.Name)}
    return found


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
            yield directive("method", method + signature(inspect.unwrap(inner)), markdown(of(inner)), option)
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


def signature(thing: Any) -> str:
    """As it is written, with its types: `(net: Transformer, X: Tensor, *, metrics: MetricsLike=...)`; of a class that
    of its constructor."""
    function: Any = thing.__init__ if isinstance(thing, type) else thing
    node = source_of(function)
    if not isinstance(node, ast.FunctionDef):
        return "()"
    home, taken = function.__module__, node.args
    if taken.args and taken.args[0].arg in ("self", "cls"):
        del taken.args[0]
    for each in ast.walk(taken):
        if isinstance(each, ast.arg) and each.annotation:
            each.annotation = _plain(each.annotation, home)
    returns = None if isinstance(thing, type) else node.returns
    return f"({ast.unparse(taken)})" + (f" -> {ast.unparse(_plain(returns, home))}" if returns else "")


def _plain(annotation: ast.expr, home: str) -> Any:
    """A type as it is written, without quotes, names that are described here in full."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return _Named(home).visit(annotation)


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
