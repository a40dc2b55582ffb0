"""`python -m tests.mutations --draw 150 --seed 1`: change one operator at a time; do the tests notice?

Operators are drawn over all rooms (`sites.py` has which are changed, and how). Each change is made in a copy of the
library, and the tests that run the changed line are run there until one fails: first those of the file that mirrors
the changed one, then those of its room, then all others. Which tests run a line is recorded once, by running all tests
under coverage (`--covered`: the file; made where it is missing). A change that no test notices is printed; whether it
changes a result is for a reader to say. Results are written as they come, and a second run goes on where one stopped.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutations.sites import Site, sites

TREE = Path(__file__).parents[2]
SOURCE = TREE / "src" / "rankscope"
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "pythonpath=. docs packages/rankscope-studies",
]
TESTS = ("tests/", "packages/rankscope-studies/study_tests/")
Line = dict[str, Any]


def main() -> None:
    """Draw, change, run, write each answer as it comes, and print what went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=150, help="how many operators are changed")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", help="only changes whose name holds this text, such as a file's path: all of them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", type=int, default=400, help="the most tests that are asked about one change")
    parser.add_argument("--seconds", type=float, default=900, help="the most that the tests of one change may take")
    parser.add_argument("--covered", type=Path, default=Path("runs/mutations.coverage"), help="which test runs what")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/mutations.jsonl"))
    asked = parser.parse_args()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    if not asked.covered.exists():
        record(asked.covered.resolve(), asked.workers)
    places = sites(SOURCE)
    if asked.only:
        drawn = [site for site in places if asked.only in site.name]
    else:
        drawn = random.Random(asked.seed).sample(places, asked.draw)
    known = asked.output.read_text().splitlines() if asked.output.exists() else []
    done = {line["name"]: line for line in map(json.loads, known)}
    covering = Covering(asked.covered)
    with tempfile.TemporaryDirectory() as folder, asked.output.open("a") as file:
        copies: SimpleQueue[Path] = SimpleQueue()
        for worker in range(asked.workers):
            copy = Path(folder) / str(worker)
            shutil.copytree(SOURCE, copy / "rankscope", ignore=shutil.ignore_patterns("__pycache__"))
            copies.put(copy)

        def answer(site: Site) -> None:
            copy = copies.get()
            line = asdict(site) | {"name": site.name}
            line |= outcome(site, copy, covering.tests(site, asked.tests), covering.failing, asked.seconds)
            copies.put(copy)
            done[site.name] = line
            file.write(json.dumps(line) + "\n")
            file.flush()

        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(answer, [site for site in drawn if site.name not in done]))
    answers = [done[site.name] for site in drawn]
    print(dict(Counter(line["outcome"] for line in answers)))
    for line in answers:
        if line["outcome"] != "noticed":
            print(f"{line['outcome']:9} {line['tests']:4} tests  {line['name']}")


def record(covered: Path, workers: int) -> None:
    """Run all tests under coverage, and keep which test ran which line."""
    command = [
        *PYTEST,
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        "--cov=rankscope",
        "--cov-context=test",
        "--cov-report=",
    ]
    environment = importing(SOURCE.parent) | {"COVERAGE_FILE": str(covered)}
    ran = subprocess.run(command, cwd=TREE, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    failed = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failing(covered).write_text("\n".join(failed))
    print(ran.stdout[-3000:])


def importing(folder: Path) -> dict[str, str]:
    """The environment of a process that imports the library from a folder; `CI` fixes what hypothesis draws."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {"CI": "true", "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, others)])}


def failing(covered: Path) -> Path:
    """The file that lists tests that fail on this machine without any change: they are not asked."""
    return covered.with_suffix(".failed")


class Covering:
    """Which tests run which line of the library, from coverage's file."""

    def __init__(self, covered: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(covered))
        self.data.read()
        self.failing = set(failing(covered).read_text().splitlines())
        self.files = {name.rpartition("/rankscope/")[2]: name for name in self.data.measured_files()}

    def tests(self, site: Site, most: int) -> list[str]:
        """Tests that run the line of a change, nearest first: of the mirrored file, of the room, of others.

        A line that runs while a fixture is made, or once for a whole file of tests, stands for all tests of that file.
        """
        contexts = self.data.contexts_by_lineno(self.files.get(site.path, "")).get(site.line, [])
        room, _, name = site.path.removesuffix(".py").rpartition("/")
        mirrored, near = f"tests/{room}/test_{name}", f"tests/{room.partition('/')[0]}/"
        found: dict[str, tuple[int, int]] = {}
        for context in contexts:
            test, _, phase = context.partition("|")
            test = test if phase == "run" else test.partition("::")[0]
            if not test.startswith(TESTS) or test in self.failing or not (TREE / test.partition("::")[0]).exists():
                continue
            rank = 0 if test.startswith(mirrored) else 1 if test.startswith(near) else 2
            found[test] = (rank, len(found))
        ordered = sorted(found, key=found.__getitem__)
        return [
            test for test in ordered[:most] if test.partition("::")[0] == test or test.partition("::")[0] not in found
        ]


def outcome(site: Site, copy: Path, tests: list[str], failed: set[str], seconds: float) -> Line:
    """What the tests say of one change: noticed, unnoticed, or too slow to say; the copy is as before afterwards."""
    if not tests:
        return {"outcome": "uncovered", "tests": 0}
    path = copy / "rankscope" / site.path
    source = path.read_bytes()
    environment = importing(copy) | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        path.write_bytes(site.changed(source))
        command = [*PYTEST, "-x", *tests, *(f"--deselect={test}" for test in failed)]
        ran = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"outcome": "too slow", "tests": len(tests)}
    finally:
        path.write_bytes(source)
    first = next((line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    # pytest's exit codes; 4 and more: a conftest could not be imported, or pytest itself came to an end; 5: no test ran
    answers = {0: "unnoticed", 5: "uncovered"}
    return {"outcome": answers.get(ran.returncode, "noticed"), "tests": len(tests), "by": first or ran.stdout[-200:]}


if __name__ == "__main__":
    main()
