from pathlib import Path

import pytest

from tests.report.runs import whole_run


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with everything in it, to read and to copy."""
    return whole_run(tmp_path_factory.mktemp("everything")).parent
