"""The house itself: imports go one way, and the public face is small."""

import ast
from pathlib import Path

import rankscope

SOURCE = Path(rankscope.__file__).parent
FLOORS = [
    "errors",
    "files",
    "figures",
    "cards",
    "metrics",
    "nets",
    "runs",
    "deviation",
    "profiles",
    "paths",
    "theory",
    "sources",
    "live",
    "studies",
    "charts",
    "report",
    "explorer",
    "cli",
]
"""Each room may import those before it."""


def test_every_room_has_its_floor() -> None:
    rooms = {
        path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "__main__", "__pycache__"} == set(FLOORS)


def test_imports_go_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                inside = node.module == "rankscope"  # from rankscope import nets
                names = [f"rankscope.{alias.name}" for alias in node.names] if inside else [node.module or ""]
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("rankscope."):
                    target = name.split(".")[1]
                    assert FLOORS.index(target) <= FLOORS.index(room), f"{path} imports {name}"


def test_the_public_names_are_exactly_these() -> None:
    names = {"Architecture", "Profile", "Transformer", "certify", "decompose", "fresh", "load", "measure"}
    names |= {"read", "watch"}
    assert set(rankscope.__all__) == names
    for name in rankscope.__all__:
        assert getattr(rankscope, name).__module__.startswith("rankscope.")
    assert dir(rankscope) == sorted(rankscope.__all__)
