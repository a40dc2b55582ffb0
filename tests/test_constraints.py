"""`constraints.txt`: all that set-up installs is pinned, nothing else is, and the tests run in just that."""

import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical
from packaging.version import Version

from tests import versions

ROOT = Path(__file__).parents[1]
EXTRAS = ("full", "ray", "trainer", "lightning", "tensorboard", "wandb", "mlflow")
ACCELERATORS = ("cuda-", "nvidia-", "triton")
"""What torch's wheel brings along with it depends on the index it came from; that wheel pins them itself."""


def pins() -> dict[str, str]:
    """{name: version} of the file."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert lines == sorted(lines, key=str.lower)
    found = [line.split("==") for line in lines]
    return {canonical(name): version for name, version in found}


def grouped(groups: dict[str, list[str | dict[str, str]]], name: str) -> list[str]:
    """Lines of a dependency group and of those that it includes."""
    return [
        line
        for each in groups[name]
        for line in ([each] if isinstance(each, str) else grouped(groups, each["include-group"]))
    ]


def required() -> set[str]:
    """Names of all that set-up asks for, and of what that asks for in its turn."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = told["project"]
    wanted = ["pip", *told["build-system"]["requires"], *project["dependencies"]]  # pip, for groups
    wanted += [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    wanted += grouped(told["dependency-groups"], "dev")
    waiting, met = [Requirement(line) for line in wanted], set()
    while waiting:
        asked = waiting.pop()
        for extra in ("", *asked.extras):
            if (asked.name, extra) in met or canonical(asked.name).startswith(ACCELERATORS):
                continue
            met.add((asked.name, extra))
            further = [Requirement(line) for line in distribution(asked.name).requires or ()]
            waiting += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {canonical(name) for name, _ in met if not name.startswith("rankscope")}  # extras of extras, and clients


def test_set_up_installs_these_extras_and_groups() -> None:
    assert f"-e '.[{','.join(EXTRAS)}]' --group dev" in (ROOT / "Makefile").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="constraints.txt is what CI installs, on Linux")
def test_what_set_up_installs_is_what_is_pinned() -> None:
    assert required() == set(pins())


def test_the_tests_run_in_the_pinned_versions() -> None:
    here = {name: Version(version(name)).public for name in pins()}  # torch's own ends in +cpu or the like
    assert here == pins()


def test_the_oldest_versions_are_the_lower_bounds_and_the_newest_are_free() -> None:
    """What `make versions` installs: all as it is pinned, but for the packages whose ends are tried."""
    pinned = {name for name in pins() if name not in versions.MOVED}
    for which, torch, free in (("oldest", "moved", set()), ("newest", "moved", {*versions.MOVED})):
        found = dict(line.split("==") for line in versions.constraints(which, torch)[1:])
        assert {canonical(name) for name in found} == pinned | ({*versions.MOVED} - free)
    oldest = dict(line.split("==") for line in versions.constraints("oldest", "pinned")[1:])
    assert oldest["torch"] == pins()["torch"] and Version(oldest["transformers"]) <= Version(pins()["transformers"])
