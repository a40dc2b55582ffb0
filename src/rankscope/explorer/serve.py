"""The explorer at a port of the loopback, until Ctrl-C."""

import signal
import socket
import threading
import webbrowser
from types import FrameType

import uvicorn

from rankscope.errors import ExplorerError
from rankscope.explorer.guard import Guard
from rankscope.explorer.jobs import Jobs
from rankscope.explorer.server import app
from rankscope.explorer.shelf import Shelf
from rankscope.explorer.timeouts import SECONDS, impatient_protocol

LOOPBACK = "127.0.0.1"


def bound(port: int) -> socket.socket:
    """A socket at that port of the loopback, 0 for any that is free: taken before anything is loaded. Whoever
    comes before the server runs waits in line."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((LOOPBACK, port))
        taken.listen(128)
    except OSError as error:
        taken.close()
        raise ExplorerError(
            f"the explorer needs a free port; {port} cannot be had ({error.strerror}): leave --port out"
        ) from error
    return taken


def server_of(asgi: Guard, jobs: Jobs, patience: float = SECONDS) -> uvicorn.Server:
    """The server of an app and its computations; `server.run(sockets=[bound(0)])` runs it. `patience` is how
    long it waits for a request."""
    config = uvicorn.Config(
        asgi, http=impatient_protocol(patience), log_level="error", access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=1, limit_concurrency=64, ws="none",
        h11_max_incomplete_event_size=32768,
    )  # fmt: skip
    return _Quiet(config, jobs)


def serve(shelf: Shelf, at: socket.socket, page: str | None = None) -> None:
    """The explorer over these networks, until Ctrl-C."""
    jobs = Jobs()
    serve_app(app(shelf, at.getsockname()[1], jobs), at, page, jobs)


def serve_app(asgi: Guard, at: socket.socket, page: str | None = None, jobs: Jobs | None = None) -> None:
    """Serve until Ctrl-C, and open a browser at `page`."""
    server = server_of(asgi, jobs or Jobs())
    if page is not None:
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    server.run(sockets=[at])


class _Quiet(uvicorn.Server):
    """Ends on Ctrl-C without raising it again: it is how one leaves. Answers under way end with it."""

    def __init__(self, config: uvicorn.Config, jobs: Jobs) -> None:
        super().__init__(config)
        self.jobs = jobs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second Ctrl-C does not wait for anyone."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.jobs.close()
