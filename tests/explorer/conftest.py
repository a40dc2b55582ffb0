from collections.abc import Iterator

import pytest

from tests.explorer.serving import Served, serving, small_shelf


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(small_shelf()) as explorer:
        yield explorer
