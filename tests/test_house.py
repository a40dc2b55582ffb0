"""The house itself: imports go one way, and the public face is small."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import rankscope

SOURCE = Path(rankscope.__file__).parent
FLOORS = [
    "errors",
    "extras",
    "naming",
    "shipped",
    "shapes",
    "files",
    "figures",
    "runs",
    "results",
    "doubled",
    "metrics",
    "remedies",
    "nets",
    "workers",
    "sources",
    "deviation",
    "profiles",
    "paths",
    "theory",
    "trainings",
    "live",
    "lab",
    "forecasts",
    "depths",
    "studies",
    "engine",
    "report",
    "explorer",
    "cli",
]
"""Each room may import those before it."""


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Imports of a file, wherever they stand."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__", "__main__", "__pycache__"} == set(FLOORS)


def test_imports_go_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for node in imports(path):
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
    names = {"Architecture", "Profile", "Transformer", "certify", "decompose", "forecast", "fresh", "load", "measure"}
    names |= {"DepthCard", "Monitor", "depth", "read", "sweep", "watch"}
    names |= {"Certificates", "RunComparison", "Cut", "Decomposition", "Forecast", "Result", "Spikes", "Sweep"}
    names |= {"TrainingRun"}
    assert set(rankscope.__all__) == names
    for name in rankscope.__all__:
        assert getattr(rankscope, name).__module__.startswith("rankscope.")
    assert dir(rankscope) == sorted(rankscope.__all__)


def test_the_version_is_that_of_the_package() -> None:
    assert rankscope.__version__ == version("rankscope")


def test_every_legend_has_a_place() -> None:
    """Without `loc`, matplotlib looks for the best place, and warns if that takes long by the clock."""
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if ".legend(" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "legend":
                assert "loc" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def test_no_module_imports_one_that_imports_it() -> None:
    """Nor by way of others, nor inside a function, nor for its types alone."""
    files = {
        ".".join(("rankscope", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    imported: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        for node in imports(path):
            if isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if each in files else str(node.module) for each in whole}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        imported[name] = (found & set(files)) - {name}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle
