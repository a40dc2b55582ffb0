from collections.abc import Iterator
from typing import Any

import pytest

from rankscope.engine import Sweep, sweep
from tests.engine.swept import swept

VIEWED: dict[str, Any] = {
    "metrics": ["relative_mu", "entropy"],
    "all": {"model": "bert-tiny", "samples": 2, "tokens": 6},
    "grid": {"skip": [0.0, 1.0], "depth": [1, 3], "seed": {"range": 3}},
    "list": [{"depth": 2, "variant": "none such"}],
}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The small sweep, measured by one worker, without Ray."""
    return swept(tmp_path_factory.mktemp("alone"), workers=1)


@pytest.fixture(scope="package")
def nodes() -> Iterator[Any]:
    """Two nodes of one core each; this process is connected to the first."""
    ray = pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
    from ray.cluster_utils import Cluster

    # Ray keeps the arguments of a driver that was killed (2.60): in the 150 MiB that it gives nodes of a test, the next
    # driver's would wait for room for ever.
    room: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 2**30}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    cluster.add_node(**room)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def views_study(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(VIEWED, tmp_path_factory.mktemp("runs") / "<study>", workers=1)
