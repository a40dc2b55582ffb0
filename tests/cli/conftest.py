"""Run folders that several tests of commands look at, written once."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.running import SMALL, printed

COMMANDS = {"measure": ["--variants", "san,transformer", "--metrics", "relative_residual,mu"], "paths": ["--top", "3"],
            "bounds": ["--variant", "san"]}  # fmt: skip


class WrittenRuns(NamedTuple):
    folder: Path
    """Has a run folder named after each command."""
    outputs: dict[str, str]
    """What each command has printed."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> WrittenRuns:
    """`measure`, `paths` and `bounds` of a small network, each with `-o`; nobody changes these folders."""
    folder = tmp_path_factory.mktemp("runs")
    outputs = {name: printed(name, *SMALL, *more, "-o", name, cwd=folder) for name, more in COMMANDS.items()}
    return WrittenRuns(folder, outputs)
