"""Work on a Ray cluster: one that is started on this machine, or one with an address.

Ray schedules, notices when a worker or node is lost, and brings shared weights to each node once (in its
object store, which workers read without a copy). Lost work is submitted again a few times by this module, not
by Ray, which would repeat a cell that needs too much memory again and again. Work that never answers is
cancelled after `stuck_after` seconds in which nothing at all ended.

`sweeping.py` runs cells here (`outcomes`), `shared_inputs.py` batches of a corpus (`in_order`); whoever has other work
that is done piece by piece gives `run` or `in_order` a function and the arguments of each piece.
"""

import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rankscope.engine.spec import SweepOptions
from rankscope.engine.work import CellOutcome, CellTask, InputsLoader, failed, measure_cell
from rankscope.errors import RankscopeError, SweepError, require
from rankscope.extras import need
from rankscope.plugins import entry_points
from rankscope.runs import difference, versions
from rankscope.workers import environment

ATTEMPTS = 4  # how often work is submitted whose worker or node is lost
STUCK_ATTEMPTS = 2  # how often work is submitted that does not answer
STUCK_AFTER = 6 * 3600.0  # seconds without any result after which the work that runs is taken to be stuck
PIECES_PER_CORE = 2  # pieces of work that are submitted for each core, so that none waits for the driver
RESIZE_SECONDS = 5.0  # after which the size of the cluster is looked up again
CONNECT_WITHIN = 20.0  # seconds within which a cluster must answer
NODE_WITHIN = 120.0  # seconds within which a node must have started a worker
ADVICE = "start one with `ray start --head`, or leave the address out for one of this machine"
Piece = tuple[int, tuple[Any, ...]]  # The index of a piece of work, and the arguments of the function that does it


class Cluster:
    """A Ray cluster at an address, or one that is started on this machine and ends with this object.

    Args:
        on: "ray:ADDRESS", HOST:PORT or another address that `ray.init` takes; "ray" for the cluster that
            `RAY_ADDRESS` names or, without one, a new one.
        workers: Pieces of work at a time; as many as there are cores if left out.
        threads: Threads, and so cores, of each piece of work.
        gpus: GPUs of each piece of work, or a share of one.
        stuck_after: Seconds without any result after which the work that runs is cancelled and submitted
            again, once; then it has failed.
    """

    def __init__(
        self,
        on: str = "ray",
        workers: int | None = None,
        threads: int = 1,
        gpus: float = 0.0,
        stuck_after: float = STUCK_AFTER,
    ) -> None:
        kind, _, address = on.partition(":")
        sentence = f"on must be 'ray' or 'ray:HOST:PORT', or left out for this machine; got {on!r}"
        require(kind == "ray", sentence, SweepError, "on")
        need("a cluster", "ray")
        import ray

        self.ray: Any = ray
        self.workers, self.threads, self.gpus, self.stuck_after = workers, threads, gpus, stuck_after
        self.started_here = not ray.is_initialized()
        self.dashboard: str | None = None
        """The address of Ray's dashboard; None if it has none, or the caller connected to Ray before."""
        self._stored_loaders: dict[str, Any] = {}
        self._size = (float("-inf"), 1)
        """When the size of the cluster was looked up, and how many pieces of work can run at a time."""
        if self.started_here:
            self._connect(address or os.environ.get("RAY_ADDRESS") or None)
        try:
            self._require_room()
            self._require_same_versions()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from Ray, unless the caller had connected before."""
        self._stored_loaders.clear()
        if self.started_here:
            self.ray.shutdown()

    def outcomes(self, tasks: Iterable[CellTask], options: SweepOptions) -> Iterator[tuple[int, CellOutcome]]:
        """Measure cells; each outcome comes with the index of its cell, in the order in which they end."""
        common = self.ray.put(options), self.threads, "cuda" if self.gpus else "cpu"
        pieces = ((index, (cell, self._stored(loader), *common)) for index, cell, loader in tasks)
        for index, result in self.run(measure_cell, pieces):
            failure = CellOutcome(reason=str(result), lasting=False)
            yield index, result if isinstance(result, CellOutcome) else failure

    def in_order(self, work: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Results of `work` in the order of its arguments, computed a little ahead of the reader.

        The first piece that fails for good raises its error here.
        """
        results: dict[int, Any] = {}
        next_index = 0
        for index, result in self.run(work, enumerate(arguments)):
            results[index] = result
            while next_index in results:
                result = results.pop(next_index)
                if isinstance(result, Exception):
                    raise result
                next_index += 1
                yield result

    def run(self, work: Callable[..., Any], pieces: Iterable[Piece]) -> Iterator[tuple[int, Any]]:
        """Run `work` on each piece; yield (index, result) as they end, of a failure its exception.

        Args:
            work: A function of a module that every node has installed; it is imported there.
            pieces: Of each piece its index, and the arguments of `work`, which are pickled; what is large goes
                in once as `cluster.ray.put(value)`.
        """
        task = self.ray.remote(_on_node).options(
            name=work.__name__,
            num_cpus=self.threads,
            num_gpus=self.gpus,
            max_retries=0,
            runtime_env={"env_vars": environment(self.threads)},
        )
        common = self.ray.put(work), software(), self.threads
        waiting, again = iter(pieces), list[Piece]()
        running: dict[Any, Piece] = {}
        losses: Counter[int] = Counter()
        try:
            while True:
                while len(running) < self._most_running():
                    piece = again.pop() if again else next(waiting, None)
                    if piece is None:
                        break
                    running[task.remote(*common, *piece[1])] = piece
                if not running:
                    return
                for reference, result in self._results(list(running)):
                    piece = running.pop(reference)
                    if isinstance(result, _LostError):
                        losses[piece[0]] += 1
                        if losses[piece[0]] < result.attempts:
                            again.append(piece)
                            continue
                    yield piece[0], result
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def _results(self, references: list[Any]) -> list[tuple[Any, Any]]:
        """Wait for the next result among running tasks, or until they are taken to be stuck.

        Ray starts tasks in the order of their submission, so the oldest ones are those that run and do not
        answer: they are cancelled, and the tasks that wait behind them can start.
        """
        ready, _ = self.ray.wait(references, num_returns=1, timeout=self.stuck_after)
        if ready:
            return [(reference, self._result(reference)) for reference in ready]
        stuck = references[: self._places()]
        for reference in stuck:
            self.ray.cancel(reference, force=True)
        waited = f"{self.stuck_after:g} s, {STUCK_ATTEMPTS} times"
        lost = _LostError(f"no answer within {waited}: take smaller cells, or raise stuck_after", STUCK_ATTEMPTS)
        return [(reference, lost) for reference in stuck]

    def _result(self, reference: Any) -> Any:
        """The result of a task that has ended, or the exception in which it ended."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.OutOfMemoryError:
            return _LostError("out of memory: Ray ended its worker; fewer tokens, or fewer at a time", attempts=1)
        except errors.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, RankscopeError) else SweepError(str(failed(cause).reason))
        except errors.RayError as error:
            return _LostError(f"its worker or node was lost {ATTEMPTS} times ({type(error).__name__})")

    def _stored(self, loader: InputsLoader) -> Any:
        """A loader of large inputs as a reference into Ray's object store, where it is put once."""
        if not loader.large:
            return loader
        if loader.name not in self._stored_loaders:
            self._stored_loaders[loader.name] = self.ray.put(loader)
        return self._stored_loaders[loader.name]

    def _places(self) -> int:
        """Pieces of work that can run at a time; looked up now and then, as clusters grow and shrink."""
        if time.monotonic() - self._size[0] > RESIZE_SECONDS:
            resources = self.ray.cluster_resources()
            places = int(resources.get("CPU", 1) // self.threads)
            places = min(places, int(resources.get("GPU", 0) / self.gpus)) if self.gpus else places
            self._size = time.monotonic(), max(1, places)
        return self._size[1]

    def _most_running(self) -> int:
        """Pieces of work that may be submitted and not yet answered."""
        if self.workers is None or self.started_here:
            return self._places() * PIECES_PER_CORE
        return min(self.workers, self._places())

    def _connect(self, address: str | None) -> None:
        """Start Ray on this machine, or connect to the cluster at an address."""
        options: dict[str, Any] = {"address": address or "local"}
        if address is None:
            options["num_cpus"] = None if self.workers is None else self.workers * self.threads
        elif address != "local":
            require_answer(address, CONNECT_WITHIN)
        try:
            context = self.ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            where, why = address or "this machine", " ".join(str(error).split())
            raise SweepError(f"Ray must run at {where}; it does not ({why})", subject="on") from error
        self.dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else None

    def _require_same_versions(self) -> None:
        """Refuse a cluster with a node whose software differs from ours: numbers could differ with it."""
        ray = self.ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(software)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        answers = [task.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
        for node, reference in zip(nodes, answers, strict=True):
            name = f"node {node['NodeID'][:8]} ({node['NodeManagerAddress']})"
            try:
                theirs = ray.get(reference, timeout=NODE_WITHIN)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {listed["NodeID"] for listed in ray.nodes() if listed["Alive"]}:
                    continue  # it is gone: Ray lists a node that was killed until its heartbeats are missed
                why = " ".join(str(getattr(error, "cause", None) or error).split())[:200]
                raise SweepError(f"every node must have rankscope; {name} has not ({why})", subject="on") from error
            require_same_software(theirs, name)

    def _require_room(self) -> None:
        """Refuse a cluster where no node has the cores and GPUs of one cell: Ray would wait for ever."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if any(node.get("CPU", 0) >= self.threads and node.get("GPU", 0) >= self.gpus for node in nodes):
            return
        cores, gpus = (max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU"))
        raise SweepError(
            f"some node must have {self.threads} cores and {self.gpus:g} GPUs of a cell; the largest have "
            f"{cores:g} and {gpus:g}: ask for fewer with --threads or --gpus-per-cell",
            subject="threads" if cores < self.threads else "gpus_per_cell",
        )


class _LostError(SweepError):
    """Work without a result, because its worker or node is gone; it may be submitted `attempts` times."""

    def __init__(self, message: str, attempts: int = ATTEMPTS) -> None:
        super().__init__(message)
        self.attempts = attempts


def _on_node(work: Callable[..., Any], driver: dict[str, str], threads: int, *arguments: Any) -> Any:
    """The task that Ray runs for a piece of work; `driver` is the software of the process that submitted it."""
    require_same_software(software(), "a node that joined since", driver)
    torch.set_num_threads(threads)
    return work(*arguments)


def software() -> dict[str, str]:
    """What must be equal in all processes for numbers to be equal: versions, those of plugins too, and the source of
    rankscope."""
    plugins = {entry.package: entry.version for entry in entry_points() if not entry.shipped}
    return {**versions(), **plugins, "python": platform.python_version(), "source of rankscope": _source_digest()}


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def require_same_software(theirs: dict[str, str], where: str, mine: dict[str, str] | None = None) -> None:
    """Refuse a node whose `software()` differs from the driver's, and say in what."""
    if differences := difference(mine or software(), theirs):
        sentence = f"every node must have the versions of the driver; on {where} differ {differences}: install the same"
        raise SweepError(sentence, subject="on")


def require_answer(address: str, seconds: float) -> None:
    """Refuse an address at which no Ray cluster answers within so many seconds.

    `ray.init` itself would try for minutes. So it is tried in a process of its own, which can be ended; a
    port at which nothing listens is found out even before.
    """
    try:
        if "://" not in address and address != "auto":
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                sentence = f"an address of Ray must be HOST:PORT, as 10.0.0.1:6379; got {address!r}: {ADVICE}"
                raise SweepError(sentence, subject="on")
            socket.create_connection((host.strip("[]"), int(port)), seconds).close()
        why = _failed_connection(address, seconds)
    except (OSError, OverflowError) as error:
        why = str(error)
    require(not why, f"Ray must answer at its address; {address} does not ({why}): {ADVICE}", SweepError, "on")


def _failed_connection(address: str, seconds: float) -> str:
    """Why a new process cannot connect to Ray at an address; empty if it can."""
    connect = "import sys, ray; print(flush=True); ray.init(sys.argv[1], logging_level='ERROR')"
    command = [sys.executable, "-c", connect, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trial:
        assert trial.stdout is not None
        trial.stdout.readline()  # Ray is imported: the time begins
        try:
            _, errors = trial.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            trial.kill()
            return f"no Ray cluster within {seconds:g} s"
    return "" if trial.returncode == 0 else (errors.strip().splitlines() or ["no reason given"])[-1]
