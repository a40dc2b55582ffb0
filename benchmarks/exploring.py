"""How soon the explorer answers a slider: MiniLM, 32 tokens, end to end through HTTP.

Each request has another skip weight, so nothing is remembered from the one before.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.timing import Row, forward, least_seconds
from rankscope.sources import named_network
from rankscope_explorer.api import app
from rankscope_explorer.jobs import Jobs
from rankscope_explorer.network_cache import NetworkCache
from rankscope_explorer.server import bind_port, make_server

TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, "
    "and nothing particular to interest me on shore, I thought I would sail about a little"
)
TOKENS = 32
SLOWEST = 40
"""Turns of the slider of which the slowest is told."""


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio); the parts of an answer are named with the seconds after which they are
    there."""
    model = "bert-tiny" if small else "minilm"
    net = named_network(model)
    X = net.encode([TEXT], TOKENS).X
    assert X.shape[1] == TOKENS
    found = []
    with _served(NetworkCache({model: net})) as url, httpx.Client(timeout=60) as client:
        for name, turns in (("transformer", {}), ("attention and skip", {"mlp": False, "norm": False})):
            ask = _asker(client, url, {"model": model, **turns})
            variant = net.variant(skip=0.5, mlp=turns.get("mlp", True), norm=turns.get("norm", True))
            ask()  # the norms of the weights are taken once
            cases = {"forward": lambda variant=variant: forward(variant, X)}
            seconds = least_seconds(cases, rounds=1 if small else 9)
            runs = [ask() for _ in range(1 if small else SLOWEST)]
            against = f"float64 forward, {1000 * seconds['forward']:.0f} ms"
            for part in ("curve", "cloud", "paths", "bounds"):
                best, worst = min(run[part] for run in runs), max(run[part] for run in runs)
                what = f"{name}, {part} at {best:.2f} s (slowest {worst:.2f})"
                found.append((what, against, best / seconds["forward"]))
    return found


def _asker(client: httpx.Client, url: str, turns: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """Ask with a new skip weight each time; the seconds after which each part had arrived."""
    skip = 0.0

    def ask() -> dict[str, float]:
        nonlocal skip
        skip += 0.01
        setting = {"text": TEXT, "tokens": TOKENS, "skip": skip, **turns}
        start, came = time.perf_counter(), {}
        with client.stream("POST", f"{url}/api/answer", json={"setting": setting}) as answer:
            for line in answer.iter_lines():
                came[json.loads(line)["part"]] = time.perf_counter() - start
        assert "end" in came, came
        return came

    return ask


@contextmanager
def _served(networks: NetworkCache) -> Iterator[str]:
    at, jobs = bind_port(0), Jobs()
    port = at.getsockname()[1]
    server = make_server(app(networks, port, jobs), jobs)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        jobs.close()
        at.close()
