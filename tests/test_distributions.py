"""The wheel and the sdist: what is in them, and that the wheel's package runs where the sources are not."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
NAMED = f"rankscope-{PROJECT['version']}"
STUDIES = ROOT / "packages" / "rankscope-studies"


def files(folder: Path, under: Path) -> set[str]:
    """Names of all files of a folder of the sources, relative to `under`."""
    found = (path.relative_to(under) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not {"__pycache__", "_build"} & set(path.parts)}


def build(tree: Path, folder: Path, named: str = NAMED) -> tuple[Path, Path]:
    """The wheel and the sdist of a source tree, by the build backend alone: nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=tree, check=True)
    return folder / f"{named}-py3-none-any.whl", folder / f"{named}.tar.gz"


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


CLIENTS = {"studies": "studies", "explorer": "explore"}
"""Our packages beside the library, and the extra that brings each."""


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_the_version_of_the_library(name: str) -> None:
    folder = ROOT / "packages" / f"rankscope-{name}"
    told = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told["version"] == PROJECT["version"]
    needed = Requirement(told["dependencies"][0])
    assert needed.name == "rankscope" and str(needed.specifier) == f"=={told['version']}"
    assert needed.extras <= {*PROJECT["optional-dependencies"]}
    assert PROJECT["optional-dependencies"][CLIENTS[name]][-1] == told["name"]
    assert len(told["dependencies"]) == 1 or name == "explorer"


@pytest.mark.parametrize("name", CLIENTS)
def test_the_wheel_of_a_client_has_every_file_of_the_package_and_its_commands(name: str, tmp_path: Path) -> None:
    named, folder = f"rankscope_{name}-{PROJECT['version']}", ROOT / "packages" / f"rankscope-{name}"
    found = contents(build(folder, tmp_path, named)[0])
    package = {file for file in found if not file.startswith(f"{named}.dist-info/")}
    assert package == files(folder / "src" / f"rankscope_{name}", folder / "src")
    assert found[f"{named}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    links = re.findall(r"\]\(([^)]+)\)", found[f"{named}.dist-info/METADATA"].decode())
    assert links and all(link.startswith("https://") for link in links)
    declared = found[f"{named}.dist-info/entry_points.txt"].decode()
    assert "[rankscope.commands]" in declared
    for line in declared.split("\n[")[0].splitlines()[1:]:
        module, _, function = line.partition(" = ")[2].partition(":")
        assert not line or callable(getattr(import_module(module), function)), line


@pytest.mark.parametrize(
    "data", [ROOT / "src" / "rankscope" / "data", STUDIES / "src" / "rankscope_studies" / "data", STUDIES / "data"],
    ids=["library", "studies", "kept"],
)  # fmt: skip
def test_every_file_of_data_is_said_to_be_somebodys(data: Path) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (data / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    expected = {path.name + "/" * path.is_dir() for path in data.iterdir()} - {"README.md", "__pycache__/"}
    assert sorted(rows) == sorted(expected)


@pytest.mark.skipif(not RELEASE.exists(), reason="the sdist has no workflows")
def test_links_in_the_notes_of_a_release_lead_to_files_of_its_tag(tmp_path: Path) -> None:
    """The command of the workflow, run as if all of the changelog were one version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("\n## ", "\n### ").removeprefix("# Changelog\n")
    text += "[Above](#new), [a page](docs/growth.md#memory), [a paper](https://arxiv.org/abs/2103.03404).\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## 9.9.9 (2030-01-01)\n{text}\n## 9.9.8\n\nOlder.\n")
    workflow = RELEASE.read_text(encoding="utf-8")
    (step,) = re.findall(r"- name: notes of this version\n +run: \|\n((?: {10}.*\n)+)", workflow)
    names = {"GITHUB_SERVER_URL": "https://h", "GITHUB_REPOSITORY": "o/r", "GITHUB_REF_NAME": "v9.9.9"}
    subprocess.run(["bash", "-ec", step], cwd=tmp_path, env={**os.environ, **names}, check=True)
    notes, target, tree = (
        (tmp_path / "notes.md").read_text(encoding="utf-8"),
        r"\]\(([^)]*)\)",
        "https://h/o/r/blob/v9.9.9/",
    )
    assert re.sub(target, "]", notes).strip() == re.sub(target, "]", text).strip()
    links = re.findall(target, notes)
    assert links[-3:] == [f"{tree}CHANGELOG.md#new", f"{tree}docs/growth.md#memory", "https://arxiv.org/abs/2103.03404"]
    paths = [link.removeprefix(tree).partition("#")[0] for link in links if link.startswith(tree)]
    assert all((ROOT / path).is_file() for path in paths) and all(link.startswith("https://") for link in links)


@pytest.mark.slow
def test_the_sdist_has_what_its_tests_need_and_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / NAMED
    folders = ("src", "tests", "benchmarks", "docs", "packages")
    single = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "Makefile"}
    single |= {"conftest.py", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
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
