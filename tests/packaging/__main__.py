"""Installs the wheel into an empty environment, without extras and with each in turn, and does there what
each is for: `python -m tests.packaging [CASE ...]`, or `make wheel-check`.

Cases are `core`, every extra of pyproject.toml, and `sdist`. Each begins with rankscope and its core alone:
what an extra brought is taken out again before the next. With a torch for CPUs an environment takes 1.4 GB of
disk, and a case a minute or two.

At the end stands what each case weighs, as the table of docs/install.md has it; `--weigh` does this alone. torch and
all that it needs are installed first: the core is what rankscope and its dependencies add to them, an extra what it
adds to the core.
"""

import argparse
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
TIMED = ("core", "full")


def row(name: str, added: dict[str, int]) -> str:
    """A row of the table of docs/install.md: what a case adds, in packages and megabytes."""
    return f"| `{name}` | {len(added)} | {sum(added.values()) / 1e6:.0f} |"


def extras() -> list[str]:
    """Those of pyproject.toml."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(told["project"]["optional-dependencies"])


def built(folder: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of this tree, by the build backend alone; those of our clients lie beside them."""
    for tree in (ROOT, *(ROOT / "packages" / name for name in ("rankscope-studies", "rankscope-explorer"))):
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=tree, check=True)
    (wheel,), (sdist,) = folder.glob("rankscope-[0-9]*.whl"), folder.glob("rankscope-[0-9]*.tar.gz")
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
    parser.add_argument("--weigh", action="store_true", help="say what each case weighs, and try nothing")
    parser.add_argument("--wheel", type=Path, help="a wheel to install, for one of this tree")
    asked = parser.parse_args()
    known = ["core", *extras(), "sdist"]
    if others := {*asked.cases} - {*known}:
        parser.error(f"cases are {', '.join(known)}; got {', '.join(sorted(others))}")
    failed, rows = [], []
    with tempfile.TemporaryDirectory(prefix="rankscope-") as name:
        folder = Path(name)
        wheel, sdist = built(folder / "dist")
        wheel = asked.wheel.resolve() if asked.wheel else wheel
        environment = Environment.make(folder / "environment", folder / "elsewhere", folder / "dist")
        environment.install("torch")
        torch = environment.packages()
        environment.install(wheel)
        core = environment.packages()
        rows.append(row("torch", torch))
        size = f"{wheel.stat().st_size / 1e6:.1f} MB as a wheel, {core['rankscope'] / 1e6:.1f} MB installed"
        for case in asked.cases or known:
            start = time.monotonic()
            if case == "sdist":
                environment.pip("uninstall", "--yes", "rankscope")
                environment.install(sdist)
            elif case != "core":
                environment.install(wheel, case, FREE.get(case, ()))
            before = torch if case == "core" else core
            added = {name: size for name, size in environment.packages().items() if name not in before}
            if case != "sdist":
                rows.append(row(case, added))
            wrong = "" if asked.weigh else job(environment, "core" if case == "sdist" else case)
            says = "weighed" if asked.weigh else "FAILED" if wrong else "works"
            print(f"{case}: {says}, {time.monotonic() - start:.0f} s", flush=True)
            if wrong:
                failed.append(case)
                print(wrong, flush=True)
            if case in TIMED:
                print(", ".join(f"{name}: {seconds:.2f} s" for name, seconds in environment.seconds().items()))
            environment.back_to(core)
    print("| | packages | megabytes |", "|---|---|---|", *rows, f"rankscope itself: {size}", sep="\n")
    print(f"failed: {', '.join(failed)}" if failed else "all work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
