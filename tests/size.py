"""`python -m tests.size`: lines of each room of the library, and whether all of it stays below the budget.

The budget stands in pyproject.toml, under `[tool.rankscope]`: a library that one person carries on has a size. What
answers a question for us and not for a user is in `packages/rankscope-studies`, the pages are in
`packages/rankscope-explorer`: both are counted and have no budget.
"""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rankscope"
CLIENTS = {name: ROOT / "packages" / f"rankscope-{name}" / "src" for name in ("studies", "explorer")}


def lines_by_room(source: Path = SOURCE) -> Counter[str]:
    """Lines of Python of each room, which is a folder or a file in the source folder."""
    counts: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        counts[path.relative_to(source).parts[0].removesuffix(".py")] += path.read_text(encoding="utf-8").count("\n")
    return counts


def budget() -> int:
    """The most lines that the library may have."""
    lines: int = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rankscope"]["lines"]
    return lines


def main() -> None:
    """Print the rooms from the largest on, and exit with 1 where they are larger than the budget."""
    rooms, most = lines_by_room(), budget()
    total = rooms.total()
    print(", ".join(f"{room} {count:,}" for room, count in rooms.most_common()))
    beside = ", ".join(f"{name} {lines_by_room(source).total():,}" for name, source in CLIENTS.items())
    print(f"{total:,} of {most:,} lines; {beside}")
    if total > most:
        sys.exit(f"the library has {total - most:,} lines more than its budget (pyproject.toml): merge, delete or move")


if __name__ == "__main__":
    main()
