"""Small pieces of Markdown that several pages are made of."""

import re
from collections.abc import Iterable, Sequence

from sitegen.formulas import tex

CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what would end a cell or a row is kept from it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text in one cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def math(formula: str) -> str:
    """TeX in a line of text; a vertical bar is written so that it ends no cell of a table."""
    return "{math}`" + re.sub(r"(?<!\\)\|", r"\\vert ", formula.replace(r"\|", r"\Vert ")) + "`"


def formulas(text: str) -> str:
    """The same text, its formulas between backticks set as such."""

    def one(match: re.Match[str]) -> str:
        found = tex(" ".join(match[1].replace(r"\|", "|").split()))
        return match[0] if found is None else math(found)

    return CODE.sub(one, text)


def page_formulas(text: str) -> str:
    """A page with its formulas set: in lines of text, and as indented blocks of nothing else."""
    kept = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(each if each.startswith("```") else formulas(blocks(each)) for each in kept)


def blocks(text: str) -> str:
    """Indented blocks, each line of which is a formula, as formulas; others stay as they are."""

    def one(match: re.Match[str]) -> str:
        lines = [line.strip() for line in match[1].strip("\n").splitlines()]
        found = [_aligned(re.sub(r"[.,]$", "", line)) for line in _joined(lines)]
        if not lines or any(each is None for each in found):
            return match[0]
        return "\n" + "\n\n".join(f"```{{math}}\n{each}\n```" for each in found) + "\n\n"

    return re.sub(r"(?<=\n)\n((?: {4}.*\S.*\n|\n(?= {4}))+)(?=\n|\Z)", one, text)


def _aligned(text: str) -> str | None:
    """A formula; one that goes on in further lines, which begin with =, one beneath the other."""
    parts = [tex(f" {line}") for line in text.split("\n")]
    if None in parts or len(parts) == 1 or " = " not in str(parts[0]):
        return tex(" ".join(text.split("\n")))
    first, *others = map(str, parts)
    rows = [first.replace(" = ", " &= ", 1), *(f"&{each}" for each in others)]
    return "\\begin{aligned} " + " \\\\ ".join(rows) + " \\end{aligned}"


def _joined(lines: Sequence[str]) -> list[str]:
    """Formulas that go on in the next line, which then begins with an operator, in one."""
    found: list[str] = []
    for line in filter(None, lines):
        if found and re.match(r"[=+\-·≤<>]", line):
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found
