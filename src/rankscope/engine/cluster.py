"""Work on a Ray cluster: a laptop's own, or one with an address.

Ray schedules, finds out when a worker or node is lost, and brings shared weights to each node once (in its
object store, which workers read without a copy). What was lost is given to Ray again, a few
times; not by Ray itself, which would do a cell that has not the memory again and again.
"""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rankscope.engine.factors import Cell
from rankscope.engine.laid import Laid, laid
from rankscope.engine.pool import Task
from rankscope.engine.shared import Shared
from rankscope.engine.spec import Asked
from rankscope.engine.work import Opener, Outcome, Ready, Worker, failed
from rankscope.errors import RankscopeError, SweepError
from rankscope.extras import need
from rankscope.runs.key import difference
from rankscope.runs.manifest import versions
from rankscope.workers import environment

TRIES = 4
"""Workers or nodes that a piece of work may lose."""
AHEAD = 2
"""Pieces of work for each core that wait in the cluster."""
PATIENCE = 5.0
"""Seconds in which an address must answer, and after which the size of the cluster is looked up again."""
SLOW = 120.0
"""Seconds in which a node must have started a worker."""
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
"""How HTTP/2, on which gRPC is built, is begun; and the kind of frame with which any server answers."""


class Cluster:
    """Ray at an address, or one of its own on this machine."""

    def __init__(
        self, address: str | None = None, workers: int | None = None, threads: int = 1, gpus: float = 0.0
    ) -> None:
        self.ray = _imported()
        self.workers, self.threads, self.gpus = workers, threads, gpus
        self.own = not self.ray.is_initialized()
        self._opened: dict[str, Any] = {}
        self._size = (float("-inf"), 1)
        if self.own:
            self._begin(address or os.environ.get("RAY_ADDRESS") or None)
        try:
            self._roomy()
            self._agree()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dashboard(self) -> str | None:
        """Where Ray shows itself; None where it does not."""
        found = self.ray._private.worker.get_dashboard_url()
        return f"http://{found}" if found else None

    def close(self) -> None:
        """Let the cluster go, if it was not there before."""
        self._opened.clear()
        if self.own:
            self.ray.shutdown()

    def outcomes(self, tasks: Iterable[Task], asked: Asked) -> Iterator[tuple[int, Outcome]]:
        """What came of each cell, by its number, in the order in which they end."""
        said, device = self.ray.put(asked), "cuda" if self.gpus else "cpu"
        given = (
            (number, (cell, said, self._sent(opener), self.threads, device, agreed()))
            for number, cell, opener in tasks
        )
        for number, found in self.run(_do, given):
            yield number, found if isinstance(found, Outcome) else Outcome(reason=str(found), lasting=False)

    def in_order(self, work: Callable[..., Any], given: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """What `work` gives of each, first to last, a little ahead of who asks; what is lost for good is an
        error."""
        waiting: dict[int, Any] = {}
        next_one = 0
        for number, found in self.run(work, enumerate(given)):
            waiting[number] = found
            while next_one in waiting:
                found = waiting.pop(next_one)
                if isinstance(found, Exception):
                    raise found
                next_one += 1
                yield found

    def run(
        self, work: Callable[..., Any], given: Iterable[tuple[int, tuple[Any, ...]]]
    ) -> Iterator[tuple[int, Any]]:
        """What `work` gives, by number, as it ends; an error in its place where it ended in one."""
        ray = self.ray
        task = ray.remote(work).options(
            num_cpus=self.threads, num_gpus=self.gpus, max_retries=0,
            runtime_env={"env_vars": environment(self.threads)},
        )  # fmt: skip
        waiting, again = iter(given), list[tuple[int, tuple[Any, ...]]]()
        running: dict[Any, tuple[int, tuple[Any, ...]]] = {}
        lost: dict[int, int] = {}
        try:
            while True:
                while len(running) < self._room():
                    piece = again.pop() if again else next(waiting, None)
                    if piece is None:
                        break
                    running[task.remote(*piece[1])] = piece
                if not running:
                    return
                ready, _ = ray.wait(list(running), num_returns=1)
                for reference in ready:
                    piece = running.pop(reference)
                    found = self._found(reference)
                    if isinstance(found, _LostError):
                        lost[piece[0]] = lost.get(piece[0], 0) + 1
                        if lost[piece[0]] < TRIES and not found.memory:
                            again.append(piece)
                            continue
                    yield piece[0], found
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _found(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.OutOfMemoryError:
            return _LostError("out of memory: Ray ended its worker; fewer tokens, or fewer at a time", True)
        except errors.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, RankscopeError) else SweepError(str(failed(cause).reason))
        except errors.RayError as error:
            return _LostError(f"its worker or node was lost {TRIES} times ({type(error).__name__})")

    def _sent(self, opener: Opener) -> Any:
        """In the object store once, whoever needs it."""
        if not isinstance(opener, Opened):
            return opener
        if opener.name not in self._opened:
            self._opened[opener.name] = self.ray.put(opener)
        return self._opened[opener.name]

    def _room(self) -> int:
        """Pieces of work that may be in the cluster at a time. Clusters grow and shrink."""
        if time.monotonic() - self._size[0] > PATIENCE:
            there = self.ray.cluster_resources()
            places = int(there.get("CPU", 1) // self.threads)
            places = min(places, int(there.get("GPU", 0) / self.gpus)) if self.gpus else places
            self._size = time.monotonic(), max(1, places)
        return self._size[1] * AHEAD if self.workers is None or self.own else min(self.workers, self._size[1])

    def _begin(self, address: str | None) -> None:
        given: dict[str, Any] = {"address": address or "local"}
        if address is None:
            given["num_cpus"] = None if self.workers is None else self.workers * self.threads
        elif "://" not in address and address not in ("auto", "local"):
            _reachable(address)
        try:
            self.ray.init(**given, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SweepError(
                f"Ray must run at {address or 'this machine'}; it does not ({' '.join(str(error).split())})"
            ) from error

    def _agree(self) -> None:
        """Every node must have the versions that this process has: else numbers are not the same."""
        ray = self.ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(agreed)
        nodes = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU")]
        places = [NodeAffinitySchedulingStrategy(each["NodeID"], soft=False) for each in nodes]
        asked = [task.options(num_cpus=0, scheduling_strategy=each).remote() for each in places]
        for node, reference in zip(nodes, asked, strict=True):
            name = f"node {node['NodeID'][:8]} ({node['NodeManagerAddress']})"
            try:
                theirs = ray.get(reference, timeout=SLOW)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                why = " ".join(str(cause).split())[:200]
                raise SweepError(f"every node must have rankscope; {name} has not ({why})") from error
            refuse_other(theirs, name)

    def _roomy(self) -> None:
        """Some node must be able to do one cell: else Ray would wait for ever."""
        there = [each["Resources"] for each in self.ray.nodes() if each["Alive"]]
        if any(each.get("CPU", 0) >= self.threads and each.get("GPU", 0) >= self.gpus for each in there):
            return
        most = (
            max((each.get("CPU", 0) for each in there), default=0),
            max((each.get("GPU", 0) for each in there), default=0),
        )
        raise SweepError(
            f"some node must have {self.threads} cores and {self.gpus:g} GPUs of a cell; the largest have "
            f"{most[0]:g} and {most[1]:g}: ask for fewer with --threads or --gpus-per-cell"
        )


def cluster(on: str, workers: int | None = None, threads: int = 1, gpus: float = 0.0) -> Cluster:
    """What `--on` names: "ray", or "ray:HOST:PORT"."""
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise SweepError(f"on must be 'ray' or 'ray:HOST:PORT', or left out for this machine; got {on!r}")
    return Cluster(address or None, workers, threads, gpus)


class _LostError(SweepError):
    """Work that a worker or node took with it."""

    def __init__(self, said: str, memory: bool = False) -> None:
        super().__init__(said)
        self.memory = memory


@dataclass(frozen=True)
class Opened:
    """Weights and tokens that Ray keeps in memory that all workers of a node read."""

    name: str
    ready: Laid

    def __call__(self) -> Ready:
        """The network and its tokens."""
        return self.ready.taken()


class Stored(Shared):
    """Shared through Ray."""

    def put(self, name: str, ready: Ready) -> Opener:
        """It goes into the object store with the first cell; where the network came from stays here."""
        return Opened(name, laid(replace(ready, net=replace(ready.net, origin=None))))


_worker: Worker | None = None


def _do(
    cell: Cell, asked: Asked, opener: Opener, threads: int, device: str, driver: dict[str, str]
) -> Outcome:
    """A cell, as a task of Ray."""
    global _worker
    refuse_other(agreed(), "a node that joined since", driver)
    if _worker is None or (_worker.threads, _worker.device) != (threads, device):
        _worker = Worker(threads, device)
    return _worker.do(cell, asked, opener)


def agreed() -> dict[str, str]:
    """What must be the same in all processes for numbers to be: versions, and our own source."""
    return {**versions(), "python": platform.python_version(), "source of rankscope": _source()}


@cache
def _source() -> str:
    found = hashlib.sha256()
    home = Path(__file__).parents[1]
    for path in sorted(home.rglob("*.py")):
        found.update(str(path.relative_to(home)).encode() + path.read_bytes())
    return found.hexdigest()[:8]


def refuse_other(theirs: dict[str, str], where: str, mine: dict[str, str] | None = None) -> None:
    """Say in what a node differs from the driver, where it does."""
    if theirs != (mine := agreed() if mine is None else mine):
        raise SweepError(
            f"every node must have the versions of the driver; on {where} differ {difference(mine, theirs)}: "
            "install the same there"
        )


def _imported() -> Any:
    need("a cluster", "ray")
    import ray

    return ray


def _reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    advice = "start one with `ray start --head`, or leave the address out for one of this machine"
    if not host or not port.isdigit():
        raise SweepError(f"an address of Ray must be HOST:PORT, as 10.0.0.1:6379; got {address!r}: {advice}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                # Ray would wait minutes for an answer: whether this speaks gRPC is seen at once.
                line.sendall(PREFACE)
                if line.recv(9)[3:4] != SETTINGS:
                    raise OSError("what is there is not Ray")
    except (OSError, OverflowError) as error:
        raise SweepError(f"Ray must answer at its address; {address} does not ({error}): {advice}") from error
