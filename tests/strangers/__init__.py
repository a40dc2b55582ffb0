"""Packages of somebody else that add to rankscope: `whole` works, `broken` makes one of each mistake."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope import plugins

HERE = Path(__file__).parent


def declare(name: str, folder: Path) -> None:
    """Write beside nothing else what pip writes of a package: its name, its version and its entry points."""
    project = tomllib.loads((HERE / name / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def installed(folder: Path, *names: str) -> Iterator[None]:
    """Inside, these packages are there as if pip had installed them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            declare(name, folder)
            patch.syspath_prepend(HERE / name)
        patch.syspath_prepend(folder)
        plugins.refresh()
        yield
    plugins.refresh()
