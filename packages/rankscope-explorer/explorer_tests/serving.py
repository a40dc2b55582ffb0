"""A real server on a free port of the loopback, and how tests speak to it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from rankscope.nets import Architecture, Transformer
from rankscope.sources import fresh
from rankscope_explorer.api import app
from rankscope_explorer.controls import Controls
from rankscope_explorer.jobs import Jobs
from rankscope_explorer.network_cache import NetworkCache
from rankscope_explorer.server import bind_port, make_server

TEXT = "the sea, the sea and <b>the</b> ship"
SMALL = {"layers": 2, "width": 8, "heads": 2}
HEAVY = {
    "setting": {"model": "random", "shape": {"layers": 8, "width": 128, "heads": 8}, "layers": 24,
                "text": "one two three four five six seven eight nine ten " * 4, "tokens": 64},
}  # fmt: skip
"""Seconds of paths and bounds behind a curve."""
QUICK: dict[str, Any] = {"setting": {"shape": SMALL, "text": "a b c"}, "parts": ["curve"]}


@dataclass(frozen=True)
class Served:
    """An explorer that answers."""

    port: int
    jobs: Jobs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, request: Any, **headers: str) -> httpx.Response:
        """Post a request and wait for all of its answer."""
        return httpx.post(f"{self.url}/api/answer", json=request, headers=headers, timeout=60)

    def parts(self, request: Any) -> dict[str, dict[str, Any]]:
        """The parts of an answer by name."""
        answer = self.ask(request)
        assert answer.status_code == 200, answer.text
        return {part["part"]: part for part in map(json.loads, answer.text.splitlines())}


def small_networks() -> NetworkCache:
    """A small network with masks by layer, and one whose kernel has no rule in deviation arithmetic."""
    tiny = Architecture(layers=3, width=16, heads=2, mask="causal;complete", norm_place="pre")
    other = Architecture(layers=2, width=8, heads=2, kernel="sigmoid")
    return NetworkCache({"tiny": fresh(tiny, name="tiny"), "sigmoid": fresh(other, name="sigmoid")})


@contextmanager
def serving(networks: NetworkCache, jobs: Jobs | None = None, patience: float = 5.0) -> Iterator[Served]:
    """Run an explorer in a thread until the block ends."""
    at = bind_port(0)
    port = at.getsockname()[1]
    jobs = Jobs() if jobs is None else jobs
    server = make_server(app(networks, port, jobs, patience), jobs, 2 * patience)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Served(port, jobs)
    finally:
        server.should_exit = True
        jobs.close()
        thread.join()
        at.close()


def raw(served: Served, request: bytes) -> bytes:
    """The beginning of the answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        line.sendall(request)
        return line.recv(4096)


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def posted(served: Served, length: int, body: bytes = b"") -> bytes:
    """A request for an answer, with a body of that length, of which this much comes."""
    head = f"POST /api/answer HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def tiny() -> Transformer:
    return small_networks().network(Controls(model="tiny"))


def drawn(seed: int) -> Controls:
    """Of a small random network."""
    return Controls.model_validate({"text": "a b", "shape": {**SMALL, "seed": seed}})
