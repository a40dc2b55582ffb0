"""One computation at a time, and only while someone waits for it.

A visitor's newer request takes the place of the older. Whether a computation is still wanted is asked between
layers, and where nobody says when a layer is done at every torch operation (`Interruptible`): nothing beneath
this floor has to know.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.overrides import TorchFunctionMode

from rankscope.errors import BusyError, LateError

WAITING = 8
"""Requests that may wait for their turn, of all visitors together."""
SECONDS = 30.0
"""What a computation may take."""

Work = Callable[["Job"], Iterator[Any]]
Give = Callable[[Any], None]


class Cancelled(BaseException):
    """Nobody waits for this computation any more. No error: nothing may catch it on its way out."""


class Interruptible(TorchFunctionMode):
    """Asks at every torch operation of this thread; what the question raises ends the computation."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, if it is still wanted."""
        self.check()
        return func(*args, **(kwargs or {}))


class Job:
    """A computation that can be called off."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.until = float("inf")
        self.ended = threading.Event()
        """Set when the computation has really stopped."""
        self._off = threading.Event()

    def cancel(self) -> None:
        """Call it off. It stops at its next torch operation, or never starts."""
        self._off.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was called off."""
        return self._off.is_set()

    def check(self) -> None:
        """Raise `Cancelled` if it was called off, and a sentence if it takes too long."""
        if self._off.is_set():
            raise Cancelled
        if time.monotonic() > self.until:
            raise LateError(
                f"an answer may take {self.seconds:g} s; this one takes longer: take fewer layers or tokens"
            )

    def run(self, work: Work, give: Give) -> None:
        """Hand out what the work yields; last an exception, or None when all went well or it was called
        off."""
        self.until = time.monotonic() + self.seconds
        ending: Exception | None = None
        try:
            self.check()
            for part in work(self):
                give(part)
                self.check()
        except Cancelled:
            pass
        except Exception as error:
            ending = error
        finally:
            self.ended.set()
            give(ending)


class Jobs:
    """The computations of all visitors: one runs, few wait, the rest are sent away."""

    def __init__(self, waiting: int = WAITING, seconds: float = SECONDS) -> None:
        self.waiting, self.seconds = waiting, seconds
        self._latest: dict[str, Job] = {}
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explorer")

    def start(self, visitor: str, work: Work, give: Give) -> Job:
        """Begin a visitor's computation, in place of an older one of the same visitor. `give` is called from
        another thread: with every part, and then once with None or an exception."""
        with self._lock:
            older = self._latest.pop(visitor, None)
            if older is not None:
                older.cancel()
            if sum(not job.cancelled for job in self._latest.values()) > self.waiting:
                raise BusyError(
                    f"at most {max(self.waiting, 0)} requests wait for their turn; as many do: try again in "
                    "a moment"
                )
            job = self._latest[visitor] = Job(self.seconds)
        self._worker.submit(self._run, visitor, job, work, give)
        return job

    def close(self) -> None:
        """Call off everything, and take nothing more."""
        with self._lock:
            self.waiting = -1
            for job in self._latest.values():
                job.cancel()
        self._worker.shutdown(wait=False)  # what waits ends at once, and says so to whoever listens

    def _run(self, visitor: str, job: Job, work: Work, give: Give) -> None:
        try:
            job.run(work, give)
        finally:
            with self._lock:
                if self._latest.get(visitor) is job:
                    del self._latest[visitor]
