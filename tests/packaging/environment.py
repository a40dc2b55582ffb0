"""An environment outside the tree, as `pip install` makes it, and what it weighs."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
TOOLS = ("pip",)
"""Not of rankscope: an environment has it before anything is installed."""
COUNT = """
import json, pathlib
from importlib.metadata import distributions
found = {each.name: sum(each.locate_file(file).stat().st_size for file in each.files or ()
                        if each.locate_file(file).is_file()) for each in distributions()}
print(json.dumps(found))
"""
TIMED = {
    "import rankscope": ["-c", "import rankscope"],
    "from rankscope import measure": ["-c", "from rankscope import measure"],
    "rankscope --help": ["-m", "rankscope", "--help"],
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the empty folder that things are run in."""

    folder: Path
    cwd: Path
    wheels: Path
    """The folder of packages of this tree, which no index has yet."""

    @classmethod
    def make(cls, folder: Path, cwd: Path, wheels: Path) -> "Environment":
        """With nothing in it but pip."""
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        cwd.mkdir(parents=True)
        made = cls(folder, cwd, wheels)
        made.pip("uninstall", "--yes", "setuptools")  # Python 3.11 puts one there, newer ones do not
        return made

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Its interpreter with these words: it sees nothing of the tree, of this process or of a hub."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ways = {**kept, "HF_HUB_OFFLINE": "1", **more}
        return subprocess.run([self.python, *words], cwd=self.cwd, env=ways, text=True, capture_output=True)

    def pip(self, *words: str | Path) -> None:
        """pip; what it says when it fails is the error."""
        done = self.run("-m", "pip", "--quiet", "--disable-pip-version-check", *words)
        if done.returncode:
            raise SystemExit(f"pip {' '.join(map(str, words))}\n{done.stdout}{done.stderr}")

    def install(self, archive: str | Path, extra: str = "", free: tuple[str, ...] = ()) -> None:
        """A wheel, an sdist or a package by its name, with an extra; all versions as pinned but those of `free`."""
        pins = self.folder / "pins.txt"
        lines = PINS.read_text(encoding="utf-8").splitlines()
        pins.write_text("\n".join(line for line in lines if line.partition("==")[0].lower() not in free))
        self.pip("install", "-c", pins, "--find-links", self.wheels, f"{archive}[{extra}]" if extra else archive)

    def packages(self) -> dict[str, int]:
        """{name: bytes} of what is installed."""
        found: dict[str, int] = json.loads(self.run("-c", COUNT).stdout)
        return {name: size for name, size in found.items() if name not in TOOLS}

    def back_to(self, before: dict[str, int]) -> None:
        """Takes out what came since."""
        if came := self.packages().keys() - before.keys():
            self.pip("uninstall", "--yes", *sorted(came))

    def seconds(self) -> dict[str, float]:
        """Seconds of processor time, the best of five: the numbers of docs/install.md. `python -X importtime` has the
        same imports by module."""
        return {name: min(self._seconds(words) for _ in range(5)) for name, words in TIMED.items()}

    def _seconds(self, words: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
