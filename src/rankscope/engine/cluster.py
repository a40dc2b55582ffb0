"""Cells on a Ray cluster: a laptop's own, or one with an address.

Ray schedules, retries what a lost worker or node took with it, and brings shared weights to each node once
(as numpy arrays in its object store, which workers read without a copy). A task is one cell; what its process
had prepared for the last one serves the next.
"""

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rankscope.engine.factors import Cell
from rankscope.engine.pool import Numbered
from rankscope.engine.shared import Opener, Shared, packed, unpacked
from rankscope.engine.spec import Asked
from rankscope.engine.work import Outcome, Ready, Worker
from rankscope.errors import MissingExtraError, SweepError
from rankscope.runs.key import difference
from rankscope.runs.manifest import versions

TRIES = 3
"""How often Ray does a cell again whose worker or node was lost."""
AHEAD = 2
"""Cells for each core that wait in the cluster."""
PATIENCE = 5.0
"""Seconds in which an address must answer."""


class Cluster:
    """Ray at an address, or one of its own on this machine."""

    def __init__(
        self, address: str | None = None, workers: int | None = None, threads: int = 1, gpus: float = 0.0
    ) -> None:
        self.ray = _imported()
        self.threads, self.gpus = threads, gpus
        self.own = not self.ray.is_initialized()
        if self.own:
            self._begin(address, workers)
        self._agree()

    @property
    def dashboard(self) -> str | None:
        """Where Ray shows itself."""
        found = self.ray._private.worker.get_dashboard_url()
        return f"http://{found}" if found else None

    def close(self) -> None:
        """Let the cluster go, if it was not there before."""
        if self.own:
            self.ray.shutdown()

    def share(self) -> Shared:
        """What is prepared goes into the object store."""
        return _Stored(self.ray)

    def outcomes(
        self, cells: Iterable[Numbered], asked: Asked, shared: Shared
    ) -> Iterator[tuple[int, Outcome]]:
        """What came of each cell, by its number, in the order in which they end."""
        ray = self.ray
        task = ray.remote(_do).options(
            num_cpus=self.threads, num_gpus=self.gpus, max_retries=TRIES, retry_exceptions=False
        )
        said, running = ray.put(asked), dict[Any, int]()
        waiting, device = iter(cells), "cuda" if self.gpus else "cpu"
        try:
            while True:
                room = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)) // self.threads)
                while len(running) < room and (cell := next(waiting, None)) is not None:
                    opener = shared.opener(cell[1])
                    stored = opener.reference if isinstance(opener, _Reference) else None
                    running[task.remote(cell[1], said, stored, self.threads, device)] = cell[0]
                if not running:
                    return
                ready, _ = ray.wait(list(running), num_returns=1)
                for reference in ready:
                    yield running.pop(reference), self._outcome(reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _outcome(self, reference: Any) -> Outcome:
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)  # type: ignore[no-any-return]
        except errors.OutOfMemoryError:
            said = "out of memory: Ray ended its worker; fewer tokens, or more cores for each cell"
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError) as error:
            said = f"its worker was lost {TRIES + 1} times ({type(error).__name__})"
        except errors.RayTaskError as error:
            said = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
        return Outcome(reason=said, lasting=False)

    def _begin(self, address: str | None, workers: int | None) -> None:
        if address is not None and "://" not in address and address != "auto":
            _reachable(address)
        given: dict[str, Any] = {"address": address} if address is not None else {"num_cpus": workers}
        try:
            self.ray.init(**given, include_dashboard=None, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SweepError(
                f"no Ray at {address or 'this machine'}: {str(error).splitlines()[0]}"
            ) from error

    def _agree(self) -> None:
        """Every node must have the versions that this process has: else numbers are not the same."""
        ray, mine = self.ray, versions()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = ray.remote(versions)
        nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU")]
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        for node, theirs in zip(
            nodes, ray.get([asked.options(num_cpus=0, scheduling_strategy=each).remote() for each in places]),
            strict=True,
        ):  # fmt: skip
            if theirs != mine:
                raise SweepError(
                    f"every node must have the versions of the driver; on node {node[:8]} differ "
                    f"{difference(mine, theirs)}: install the same there"
                )


class _Reference:
    """Finds what was prepared in the object store."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def __call__(self) -> Ready:
        import ray

        return _unpacked(ray.get(self.reference))


class _Stored(Shared):
    """Shared through Ray."""

    def __init__(self, ray: Any) -> None:
        super().__init__()
        self.ray = ray

    def put(self, name: str, ready: Ready) -> Opener:
        given = packed(ready)
        arrays = {key: each.numpy() for key, each in given.pop("weights").items()}
        tokens = {key: given[key].numpy() for key in ("X", "padding")}
        return _Reference(self.ray.put({"arch": given["arch"], "weights": arrays, **tokens}))


def _unpacked(given: dict[str, Any]) -> Ready:
    """Without a copy: nothing writes to weights."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        weights = {name: torch.from_numpy(each) for name, each in given["weights"].items()}
        tokens = {name: torch.from_numpy(given[name]) for name in ("X", "padding")}
    return unpacked({"arch": given["arch"], "weights": weights, **tokens})


_worker: Worker | None = None


def _do(cell: Cell, asked: Asked, stored: dict[str, Any] | None, threads: int, device: str) -> Outcome:
    """A task: Ray has brought `stored` here."""
    global _worker
    if _worker is None:
        _worker = Worker(threads, device)
    return _worker.do(cell, asked, None if stored is None else lambda: _unpacked(stored))


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "a sweep on a cluster needs Ray, which is not installed: pip install 'rankscope[ray]'"
        ) from error
    return ray


def _reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except (OSError, ValueError) as error:
        raise SweepError(
            f"Ray must answer at its address; {address} does not ({error}): start one with `ray start "
            "--head`, or leave the address out for one of this machine"
        ) from error
