from pathlib import Path

import pytest

from rankscope.profiles import Profile
from rankscope.report import write_run_directory
from tests.report.runs import profile_of, whole_run


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with everything in it, to read and to copy."""
    return whole_run(tmp_path_factory.mktemp("everything")).parent


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """(a profile, the page of its run)."""
    profile = profile_of()
    return profile, write_run_directory(profile, tmp_path_factory.mktemp("run"), "a title")
