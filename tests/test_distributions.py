"""The wheel and the sdist: what is in them, and that the wheel's package runs where the sources are not."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = f"rankscope-{PROJECT['version']}"


def files(folder: Path, under: Path) -> set[str]:
    """Names of all files of a folder of the sources, relative to `under`."""
    found = (path.relative_to(under) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not {"__pycache__", "_build"} & set(path.parts)}


def build(tree: Path, folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a source tree, by the build backend alone: nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=tree, check=True)
    return folder / f"{NAMED}-py3-none-any.whl", folder / f"{NAMED}.tar.gz"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    found = contents(built[0])
    package = {name for name in found if not name.startswith(f"{NAMED}.dist-info/")}
    assert package == files(ROOT / "src" / "rankscope", ROOT / "src")
    assert {"rankscope/py.typed", "rankscope/report/page.html", "rankscope/data/moby_dick.txt"} < package
    assert "rankscope = rankscope.cli:main" in found[f"{NAMED}.dist-info/entry_points.txt"].decode()
    assert found[f"{NAMED}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_every_file_of_data_is_said_to_be_somebodys() -> None:
    data = ROOT / "src" / "rankscope" / "data"
    rows = re.findall(r"^\| `([^`]+)` \|", (data / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    expected = {path.name + "/" * path.is_dir() for path in data.iterdir()} - {"README.md", "__pycache__/"}
    assert sorted(rows) == sorted(expected)


@pytest.mark.slow
def test_the_sdist_has_what_its_tests_need_and_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / NAMED
    folders = ("src", "tests", "benchmarks", "docs", "packages")
    single = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "Makefile"}
    single |= {"constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
    expected = single.union(*(files(ROOT / folder, ROOT) for folder in folders))
    snapshots = {name for name in expected if name.startswith("packages/") and "/checkpoint-" in name}
    assert files(tree, tree) == expected - snapshots
    assert contents(build(tree, tmp_path / "again")[0]) == contents(wheel)


@pytest.mark.slow
def test_the_package_of_the_wheel_runs_elsewhere(built: tuple[Path, Path], tmp_path: Path) -> None:
    with ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "unpacked")
    (tmp_path / "elsewhere").mkdir()

    def said(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", *arguments], cwd=tmp_path / "elsewhere", check=True, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")},
        )  # fmt: skip
        return done.stdout.strip()

    assert said("-m", "rankscope", "--version") == f"rankscope {PROJECT['version']}"
    code = "import rankscope.metrics as m; from rankscope.sources import bundled_excerpts as b; "
    assert said("-c", code + "print(m.__file__, len(b(8)) > 0)") == (
        f"{tmp_path / 'unpacked' / 'rankscope' / 'metrics' / '__init__.py'} True"
    )
