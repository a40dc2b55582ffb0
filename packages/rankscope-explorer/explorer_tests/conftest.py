from collections.abc import Iterator

import pytest

from explorer_tests.serving import Served, serving, small_networks


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(small_networks()) as explorer:
        yield explorer
