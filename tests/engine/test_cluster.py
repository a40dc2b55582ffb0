"""On Ray the same table, bit for bit: on one node and on two, whatever is lost on the way."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.engine import Cluster, Sweep
from rankscope.engine.cluster import require_answer
from rankscope.errors import SweepError
from tests.engine.swept import same, swept
from tests.raising import raises

ray = pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.parametrize("address", ["localhost:1", "somewhere", "no-such-host.invalid:6379"])
def test_an_address_where_nobody_listens_is_refused_at_once(address: str) -> None:
    with raises(SweepError, subject="on") as caught:
        require_answer(address, seconds=60.0)
    assert address in str(caught.value) and "ray start --head" in str(caught.value)


@pytest.mark.parametrize("address", ["somewhere", ":6379", "localhost:", "localhost:ray", "localhost:²"])
def test_what_is_no_host_with_a_port_is_said_to_be_none(address: str) -> None:
    with raises(SweepError, subject="on") as caught:
        require_answer(address, seconds=60.0)
    assert f"must be HOST:PORT, as 10.0.0.1:6379; got {address!r}" in str(caught.value)


def test_an_address_of_something_else_is_refused_after_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, raises(SweepError, subject="on") as caught:
        require_answer(f"127.0.0.1:{server.getsockname()[1]}", seconds=0.5)
    assert "no Ray cluster within 0.5 s" in str(caught.value)


@pytest.mark.slow
def test_work_that_never_answers_is_tried_again_and_then_fails(nodes: Any) -> None:
    def work(number: int) -> int:
        if number == 1:
            time.sleep(1000.0)
        return number

    with Cluster(workers=1, stuck_after=20.0) as cluster:
        results = dict(cluster.run(work, ((number, (number,)) for number in range(4))))
    assert [results[number] for number in (0, 2, 3)] == [0, 2, 3]
    assert isinstance(results[1], SweepError) and "no answer within 20 s" in str(results[1])


@pytest.mark.slow  # two nodes are a dozen processes
def test_two_nodes_give_the_same_bits(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    result = swept(tmp_path / "run", on="ray")
    assert result.table.equals(alone.table) and len({node["NodeID"] for node in ray.nodes()}) == 2
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_a_cell_that_no_node_has_room_for_is_refused(nodes: Any, tmp_path: Path) -> None:
    with raises(SweepError, subject="threads"):
        swept(tmp_path / "run", on="ray", threads=3)
    with raises(SweepError, subject="gpus_per_cell"):
        swept(tmp_path / "run", on="ray", gpus_per_cell=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(done: int, of: int) -> None:
        if done in (3, 7):
            pids = [int(line) for line in _output("pgrep", "-f", "^ray::measure_cell").split()]
            mine = [pid for pid in pids if _below(pid, os.getpid())]
            killed.extend(mine[:1])
            for pid in mine[:1]:
                os.kill(pid, signal.SIGKILL)

    swept(tmp_path / "run", on="ray", progress=kill)
    assert killed
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_a_node_that_is_killed_costs_nothing(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    extra = nodes.add_node(num_cpus=2)
    gone: list[int] = []

    def kill(done: int, of: int) -> None:
        if done == 4:
            nodes.remove_node(extra, allow_graceful=False)
            gone.append(done)

    swept(tmp_path / "run", on="ray", progress=kill)
    assert gone == [4]
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_a_node_with_another_source_is_refused(nodes: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(rankscope.__file__).parent, other / "rankscope")
    with (other / "rankscope" / "errors.py").open("a") as file:
        file.write("# another version\n")
    path = os.pathsep.join([str(other), *sys.path])
    extra = nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    try:
        with raises(SweepError, subject="on") as caught:
            swept(tmp_path / "run", on="ray")
        assert "differ source of rankscope" in str(caught.value)
    finally:
        nodes.remove_node(extra)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bits(workers: int, alone: Sweep, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.swept", str(tmp_path / "run"), str(workers), "ray"]
    subprocess.run(command, check=True, timeout=600, env=_apart())
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    rng = random.Random(5)
    kept = tmp_path / "run" / "kept" / "journal.jsonl"
    command = [sys.executable, "-m", "tests.engine.swept", str(tmp_path / "run"), "2", f"ray:{nodes.address}"]
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command, env=_apart())
        aim = _lines(kept) + rng.randrange(1, 3)
        patience = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < patience and _lines(kept) < aim:
            time.sleep(0.05 * rng.random())
        killed += process.poll() is None and _lines(kept) > 0
        process.kill()
        process.wait()
    assert killed
    swept(tmp_path / "run", on="ray")
    same(alone.run, tmp_path / "run")


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _apart() -> dict[str, str]:
    """For a driver that has nothing to do with this process's cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _below(pid: int, ancestor: int) -> bool:
    """Whether it was started by that process, or by one that it started."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
