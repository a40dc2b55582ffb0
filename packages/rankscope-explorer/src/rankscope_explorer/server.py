"""Runs the explorer at a port of the loopback until Ctrl-C.

Its address is printed as soon as the port is bound, so this file imports nothing that takes long: no torch.
"""

import asyncio
import signal
import socket
import threading
import webbrowser
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankscope.errors import ExplorerError

if TYPE_CHECKING:
    from rankscope_explorer.jobs import Jobs
    from rankscope_explorer.network_cache import NetworkCache
    from rankscope_explorer.page import Guard

LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 10.0  # within which a request must have arrived, head and body
ARRIVING = (h11.IDLE, h11.SEND_BODY)  # states of a connection over which a request is still to arrive


def bind_port(port: int) -> socket.socket:
    """A listening socket at this port of the loopback, or at any free one for 0.

    It is bound before networks are loaded: whoever connects meanwhile waits for the server to run.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        sentence = f"the explorer needs a free port; {port} cannot be had ({error.strerror}): leave --port out"
        raise ExplorerError(sentence, subject="port") from error
    return listening


def make_server(asgi: "Guard", jobs: "Jobs | None" = None, patience: float = REQUEST_SECONDS) -> uvicorn.Server:
    """The uvicorn server of an app, to be run with `server.run(sockets=[bind_port(0)])`.

    `jobs` are its computations, if it has any, which end with it. `patience` is how many seconds it waits for a
    request to arrive.
    """
    config = uvicorn.Config(
        asgi,
        http=impatient_protocol(patience),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        limit_concurrency=64,
        h11_max_incomplete_event_size=32768,
    )
    return _PageServer(config, jobs)


def serve(networks: "NetworkCache", listening: socket.socket, page: str | None = None) -> None:
    """Run the explorer over these networks until Ctrl-C, and open a browser at `page`."""
    from rankscope_explorer.api import app
    from rankscope_explorer.jobs import Jobs

    jobs = Jobs()
    serve_forever(app(networks, listening.getsockname()[1], jobs), listening, page, jobs)


def serve_forever(asgi: "Guard", listening: socket.socket, page: str | None = None, jobs: "Jobs | None" = None) -> None:
    """Run an app until Ctrl-C, and open a browser at `page`."""
    server = make_server(asgi, jobs)
    if page is not None:
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    server.run(sockets=[listening])


class _PageServer(uvicorn.Server):
    """A server that Ctrl-C ends without a traceback, together with the answers under way."""

    def __init__(self, config: uvicorn.Config, jobs: "Jobs | None") -> None:
        super().__init__(config)
        self.jobs = jobs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second Ctrl-C does not wait for open connections."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        if self.jobs is not None:
            self.jobs.close()


def impatient_protocol(seconds: float = REQUEST_SECONDS) -> type[H11Protocol]:
    """A protocol for uvicorn that closes a connection over which no request arrives within so many seconds.

    A few connections that never speak would keep everyone else out. uvicorn limits how many there are and how
    long one may idle between two requests, but not how long a request may take to arrive; a middleware is
    only called once its head has arrived.
    """

    class ImpatientProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._update_timer(lost=True)

        def _update_timer(self, lost: bool = False) -> None:
            """Let the timer run while a request arrives: started with every request, not with every byte."""
            arriving = not lost and self.conn.their_state in ARRIVING
            if arriving and self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)
            elif not arriving and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return ImpatientProtocol
