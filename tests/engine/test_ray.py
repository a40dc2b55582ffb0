"""On Ray the same table, bit for bit: on one node and on two, whatever is lost on the way."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

import rankscope
from rankscope import fresh, read
from rankscope.engine import Sweep, sweep
from rankscope.engine.cluster import Cluster
from rankscope.engine.ray_jobs import CorpusJob
from rankscope.errors import SweepError
from rankscope.profiles.corpus import gathering, measure_corpus
from rankscope.runs import Store
from rankscope.sources import bundled_excerpts
from tests.cli.running import answered
from tests.engine.swept import same, swept

ray = pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of one core each; this process is connected to the first."""
    from ray.cluster_utils import Cluster as Nodes

    found = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.parametrize(
    ("address", "said"),
    [("localhost:1", "localhost:1 does not"), ("somewhere", "must be HOST:PORT")],
)
def test_an_address_where_nobody_answers_is_a_sentence(address: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=said):
        sweep({}, tmp_path / "run", on=f"ray:{address}")
    assert not (tmp_path / "run").exists()


def test_an_address_of_something_else_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SweepError, match="what is there is not Ray"):
            sweep({}, tmp_path / "run", on=f"ray:127.0.0.1:{server.getsockname()[1]}")
        thread.join()


@pytest.mark.slow  # two nodes are a dozen processes
def test_two_nodes_give_the_same_bits(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    found = swept(tmp_path / "run", on="ray")
    assert found.table.equals(alone.table) and len({each["NodeID"] for each in ray.nodes()}) == 2
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_a_cell_that_no_node_has_room_for_is_refused(nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="some node must have 3 cores and 0 GPUs"):
        swept(tmp_path / "run", on="ray", threads=3)
    with pytest.raises(SweepError, match="some node must have 1 cores and 1 GPUs"):
        swept(tmp_path / "run", on="ray", gpus_per_cell=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("excerpts", [200, 10_000])
def test_a_corpus_has_the_statistics_of_one_process(excerpts: int, nodes: Any, tmp_path: Path) -> None:
    words = " ".join(bundled_excerpts(20)).split()
    texts = [
        " ".join(words[7 * n % 4000 :][: 1 + n % 9]) + (f" {n}" if n % 11 else "") for n in range(excerpts)
    ]
    net = fresh("bert-tiny")
    nets = {"transformer": net, "san": net.variant(skip=0.0)}
    given: dict[str, Any] = {"metrics": ["relative_mu", "entropy"], "tokens": 8, "batch": 32}
    alone = measure_corpus(nets, texts, **given)
    with Cluster() as cluster, Store(tmp_path) as store:
        steps = list(gathering(nets, iter(texts), store, **given, spread=CorpusJob(cluster)))
        there = steps[-1].summary()
    assert there.excerpts == alone.excerpts == excerpts
    assert_frame_equal(there.table, alone.table, check_exact=True)


@pytest.mark.slow
def test_measure_goes_to_the_cluster(nodes: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(bundled_excerpts(12)[:6]))
    asked = ["measure", "minilm", "--text", str(text), "--tokens", "8", "--variants", "san", "--batch", "2"]
    assert answered(*asked, "--on", "ray")["table"] == answered(*asked)["table"]


@pytest.mark.slow
def test_reproduce_goes_to_the_cluster(nodes: Any, tmp_path: Path) -> None:
    for name, on in (("here", []), ("there", ["--on", "ray"])):
        answered("reproduce", "dong2021", "lengths", *on, "-o", str(tmp_path / name))
    tables = [read(tmp_path / each / "quick" / "dong2021" / "lengths") for each in ("here", "there")]
    assert (tmp_path / "there" / "quick" / "REPRODUCTION.md").is_file()
    assert tables[0].names == tables[1].names
    for name in tables[0].names:
        assert_frame_equal(tables[0].table(name), tables[1].table(name), check_exact=True)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(nodes: Any, alone: Sweep, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(done: int, of: int) -> None:
        if done in (3, 7):
            pids = [int(line) for line in _output("pgrep", "-f", "^ray::_do").split()]
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
    with (other / "rankscope" / "cards.py").open("a") as file:
        file.write("# another version\n")
    path = os.pathsep.join([str(other), *sys.path])
    extra = nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    try:
        with pytest.raises(SweepError, match="differ source of rankscope"):
            swept(tmp_path / "run", on="ray")
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
    for _ in range(3):
        process = subprocess.Popen(command, env=_apart())
        aim = _lines(kept) + rng.randrange(1, 4)
        patience = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < patience and _lines(kept) < aim:
            time.sleep(0.05 * rng.random())
        process.kill()
        process.wait()
    assert _lines(kept) > 0
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
