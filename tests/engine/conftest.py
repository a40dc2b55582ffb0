import pytest

from rankscope.engine import Sweep
from tests.engine.swept import swept


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The small sweep, done by one worker, without Ray."""
    return swept(tmp_path_factory.mktemp("alone"), workers=1)
