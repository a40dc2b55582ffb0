"""Where the library's code can be changed by one operator, and the text of a file after such a change.

`__main__.py` draws some of these places, changes one at a time and asks the tests whether they notice.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

OTHERS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Each operator that is changed: how it is written, and what is written in its place."""


@dataclass(frozen=True)
class Site:
    """One operator in one file of the library: where its text begins, and what stands there before and after."""

    path: str
    line: int
    start: int
    """Bytes of the file before the operator."""
    before: str
    after: str

    @property
    def name(self) -> str:
        """The place as people read it: file, line, and the change."""
        return f"{self.path}:{self.line}:{self.start} {self.before} -> {self.after}"

    def changed(self, source: bytes) -> bytes:
        """The text of the file with this operator changed."""
        end = self.start + len(self.before)
        assert source[self.start : end] == self.before.encode(), self.name
        return source[: self.start] + self.after.encode() + source[end:]


def sites(root: Path) -> list[Site]:
    """All places of a package that can be changed, in order; kernels for GPUs are left out, since no CPU runs them."""
    files = sorted(path for path in root.rglob("*.py") if not path.name.endswith("_triton.py"))
    return [site for path in files for site in sites_of(path.relative_to(root).as_posix(), path.read_bytes())]


def sites_of(path: str, source: bytes) -> Iterator[Site]:
    """The places of one file; operators within annotations and between literal texts are no arithmetic."""
    starts = [0, *(found.end() for found in re.finditer(rb"\n", source))]

    def offset(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + column

    def between(left: ast.expr, right: ast.expr, operator: type[ast.AST]) -> Iterator[Site]:
        if operator not in OTHERS:
            return
        before, after = OTHERS[operator]
        first = offset(left.end_lineno, left.end_col_offset)
        gap = source[first : offset(right.lineno, right.col_offset)]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), gap)
        start = first + gap.index(before.encode())
        yield Site(path, source[:start].count(b"\n") + 1, start, before, after)

    for node in counted(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=operators, comparators=others):
                for (first, second), operator in zip(pairwise([left, *others]), operators, strict=True):
                    yield from between(first, second, type(operator))
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, type(operator))
            case ast.BoolOp(op=operator, values=values):
                for first, second in pairwise(values):
                    yield from between(first, second, type(operator))


def counted(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of annotations, and but sums and products of texts and of lists, which fail at once."""
    plain = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            sides = (child.left, child.right) if isinstance(child, ast.BinOp) else ()
            texts = [isinstance(side, plain) or isinstance(getattr(side, "value", None), str) for side in sides]
            if not any(texts):
                yield child
            yield from counted(child)
