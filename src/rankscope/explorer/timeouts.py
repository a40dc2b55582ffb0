"""Connections over which no request arrives are closed: a few that never speak would keep everyone else out.

uvicorn limits how many connections there are and how long one may idle between two requests, not how long a
request may take to arrive.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0
"""In which a request must have arrived, head and body."""
ARRIVING = (h11.IDLE, h11.SEND_BODY)


def impatient_protocol(seconds: float = SECONDS) -> type[H11Protocol]:
    """The protocol of a server that waits so long for a request."""

    class Prompt(H11Protocol):
        _waits: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _wait(self) -> None:
            """Let the clock run while a request arrives: anew with every request, not with every byte."""
            if self.conn.their_state not in ARRIVING:
                self._stop()
            elif self._waits is None:
                self._waits = self.loop.call_later(seconds, self._late)

        def _stop(self) -> None:
            if self._waits is not None:
                self._waits.cancel()
                self._waits = None

        def _late(self) -> None:
            self._waits = None
            if self.conn.their_state in ARRIVING:
                self.transport.close()

    return Prompt
