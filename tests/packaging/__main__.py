"""Installs the wheel into an empty environment, without extras and with each in turn, and does there what
each is for: `python -m tests.packaging [CASE ...]`, or `make wheel-check`.

Cases are `core`, every extra of pyproject.toml, and `sdist`. Each begins with rankscope and its core alone:
what an extra brought is taken out again before the next. With a torch for CPUs an environment takes 1.4 GB of
disk, and a case a minute or two.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.packaging.environment import ROOT, Environment

JOBS = Path(__file__).with_name("jobs.py")
FREE = {"trackio": ("pillow",)}  # wants an older one than we pin
WEIGHED = ("core", "full")


def extras() -> list[str]:
    """Those of pyproject.toml."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(told["project"]["optional-dependencies"])


def built(folder: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of this tree, by the build backend alone."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def job(environment: Environment, name: str) -> str:
    """Does what a case is for in an empty folder; what went wrong, or nothing."""
    shutil.rmtree(environment.cwd)
    environment.cwd.mkdir()
    done = environment.run("-P", JOBS, name, OMP_NUM_THREADS="1")
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-4000:]


def main() -> int:
    """One line for each case; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--wheel", type=Path, help="a wheel to install, for one of this tree")
    asked = parser.parse_args()
    known = ["core", *extras(), "sdist"]
    if others := {*asked.cases} - {*known}:
        parser.error(f"cases are {', '.join(known)}; got {', '.join(sorted(others))}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="rankscope-") as name:
        folder = Path(name)
        wheel, sdist = built(folder / "dist")
        wheel = asked.wheel.resolve() if asked.wheel else wheel
        environment = Environment.make(folder / "environment", folder / "elsewhere")
        environment.install(wheel)
        core = environment.packages()
        for case in asked.cases or known:
            start = time.monotonic()
            if case == "sdist":
                environment.pip("uninstall", "--yes", "rankscope")
                environment.install(sdist)
            elif case != "core":
                environment.install(wheel, case, FREE.get(case, ()))
            wrong = job(environment, "core" if case == "sdist" else case)
            came = len(environment.packages().keys() - core.keys())
            print(f"{case}: {'FAILED' if wrong else 'works'}, {came} packages more than the core, "
                  f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
            if wrong:
                failed.append(case)
                print(wrong, flush=True)
            if case in WEIGHED:
                print(json.dumps({key: round(value, 2) for key, value in environment.weight().items()}))
            environment.back_to(core)
    print(f"failed: {', '.join(failed)}" if failed else "all work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
