"""Settings of every test: hypothesis profiles, one torch thread a worker, reproducible draws."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test waits for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start; two workers share two cores

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: `interpreted.py` says why

# `pytest --hypothesis-profile=thorough`, as `make nightly` does, draws far more.
settings.register_profile("dev", deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the marker `sampled(n)`, n cases at even distances stay in `make test`; the others become slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in cases.values():
        (count,) = grid[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {round(k * (len(grid) - 1) / max(1, count - 1)) for k in range(count)}
        for k, item in enumerate(grid):
            if k not in kept:
                item.add_marker(pytest.mark.slow)
