"""The house itself: imports go one way, and the public face is small."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import rankscope

SOURCE = Path(rankscope.__file__).parent
FLOORS = [
    "errors",
    "extras",
    "plugins",
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
    "monitor",
    "lab",
    "forecasts",
    "depths",
    "engine",
    "report",
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


PAST_A_FACE = {
    ("cli", "depths.cut"): "a command is named as the function that it calls",
    ("cli", "sources.checkpoint"): "reads a tokenizer alone, without what loads a model",
    ("cli", "profiles.verdict"): "`agreement` is also a module of that room",
    ("deviation", "metrics.log_readings"): "constants, read as `log_readings.LOWEST`: the room has a LOWEST of its own",
    ("monitor", "live.processes"): "a module of functions of all ranks, read as `processes.gathered`",
    ("paths", "deviation.propagate"): "`propagate` is a function of that face",
    ("profiles", "deviation.comparison"): "a module of distances, read as `comparison.state_distance`",
    ("sources", "nets.masks"): "a module of masks by name",
    ("theory", "deviation.propagate"): "`propagate` is a function of that face",
    ("theory", "deviation.replay"): "a module of what a GPU repeats",
}
"""Who takes what from inside another room, and why; all else comes through the face of a room."""


def test_rooms_take_from_the_faces_of_rooms() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in imports(path):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("rankscope."):
                continue
            taken, *inside = str(node.module).split(".")[1:]
            if taken == room or not (SOURCE / taken).is_dir():
                continue
            for alias in node.names:
                below = SOURCE / taken / alias.name
                if inside or below.with_suffix(".py").exists() or below.is_dir():
                    whole = ".".join((taken, *(inside or [alias.name])))
                    known = {(room, whole), (room, taken)} & PAST_A_FACE.keys()
                    assert known, f"{path}: {alias.name} comes from inside {taken}; export it there"
                    found |= known
    assert found == PAST_A_FACE.keys(), "a reason for what nobody does any more"


@pytest.mark.parametrize(("client", "least"), [("studies", 300), ("explorer", 50)])
def test_clients_take_public_names_alone(client: str, least: int) -> None:
    """From a room's face, or the face of a folder in a room; and the library takes nothing from them."""
    clients = SOURCE.parents[1] / "packages" / f"rankscope-{client}" / "src" / f"rankscope_{client}"
    taken = 0
    for path in clients.rglob("*.py"):
        for node in imports(path):
            assert not isinstance(node, ast.Import) or not any(a.name.startswith("rankscope.") for a in node.names)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rankscope":
                face = import_module(str(node.module))
                public = getattr(face, "__all__", dir(face) if hasattr(face, "__path__") else ())
                room = str(node.module).count(".") == 1 and not hasattr(face, "__path__")  # errors, files, shapes
                for alias in node.names:
                    known = alias.name in FLOORS if face is rankscope else room or alias.name in public
                    assert known or alias.name in public, f"{path} takes {alias.name} from inside {node.module}"
                    taken += 1
    assert taken > least
    for path in SOURCE.rglob("*.py"):
        for node in imports(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith(f"rankscope_{client}") for name in names), path


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
