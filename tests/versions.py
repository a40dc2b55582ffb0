"""The oldest and newest transformers and torch that pyproject.toml declares, each in an environment of its
own under .versions: `python -m tests.versions [oldest] [newest]`, or `make versions`.

What is installed comes through constraints.txt, but for these two packages: at the lower bound of their
range, or left to pip. `--torch pinned` leaves torch as it is pinned, where no other build of it can be had.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".versions"
MOVED = ("torch", "transformers")
EXTRAS = "full,trainer,lightning,tensorboard,wandb,mlflow"
CLIENTS = ("-e", "packages/rankscope-studies", "-e", "packages/rankscope-explorer")
ROOMS = ("tests/sources", "tests/nets", "tests/live", "tests/monitor")


def lowest(name: str) -> str:
    """The lower bound of a package's range in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = [*project["dependencies"], *(line for each in project["optional-dependencies"].values() for line in each)]
    (asked,) = (line for line in told if re.match(rf"{name}\W", line))
    found = re.search(r">=([\d.]+)", asked)
    assert found is not None, f"{name} must have a lower bound; pyproject.toml says {asked!r}"
    return found[1]


def constraints(which: str, torch: str) -> list[str]:
    """The lines of constraints.txt with torch and transformers moved to that end of their ranges."""
    moved = MOVED if torch == "moved" else tuple(name for name in MOVED if name != "torch")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in moved]
    return kept + [f"{name}=={lowest(name)}" for name in moved] if which == "oldest" else kept


def environment(which: str, torch: str) -> Path:
    """The interpreter of an environment with these versions, made anew where there is none."""
    folder, pins = FOLDER / which, FOLDER / f"{which}.txt"
    FOLDER.mkdir(exist_ok=True)
    pins.write_text("\n".join(constraints(which, torch)) + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*install, "-c", pins, "pip"], cwd=ROOT, check=True)  # one that knows groups
    subprocess.run([*install, "-c", pins, "-e", f".[{EXTRAS}]", *CLIENTS, "--group", "test"], cwd=ROOT, check=True)
    return python


def main() -> int:
    """Runs the tests of what meets transformers and torch; the exit code says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["oldest", "newest"], metavar="oldest newest")
    parser.add_argument("--torch", choices=["moved", "pinned"], default="moved")
    asked = parser.parse_args()
    if others := {*asked.which} - {"oldest", "newest"}:
        parser.error(f"versions are oldest and newest; got {', '.join(sorted(others))}")
    failed = 0
    for which in asked.which:
        python = environment(which, asked.torch)
        said = "import torch, transformers; print(torch.__version__, transformers.__version__)"
        subprocess.run([python, "-c", said], check=True)
        ways = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([python, "-m", "pytest", "-q", "-n", "2", *ROOMS], cwd=ROOT, env=ways)
        failed |= done.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
