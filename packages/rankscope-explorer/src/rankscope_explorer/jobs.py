"""One computation at a time, and only while someone waits for it.

A visitor's newer request cancels the older one. A computation checks whether it is still wanted between
layers or, where the code that runs has no such place, at every torch operation (`InterruptMode`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rankscope.errors import BusyError, LateError

MOST_WAITING = 8  # requests that may wait for their turn, of all visitors together
ANSWER_SECONDS = 30.0  # that a computation may take

Work = Callable[["PageJob"], Iterator[Any]]
Give = Callable[[Any], None]


class JobCancelled(BaseException):
    """Ends a computation that nobody waits for. Not an `Exception`: nothing may catch it on its way out."""


class InterruptMode(TorchFunctionMode):
    """Calls `check` at every torch operation of this thread; what it raises ends the computation.

    Switching gradients on or off is let through: a `no_grad` that is left because of what `check` raised would
    otherwise leave this thread without gradients for all that it computes later.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check, then run the operation."""
        if func is not torch._C._set_grad_enabled:
            self.check()
        return func(*args, **(kwargs or {}))


class PageJob:
    """A computation that can be cancelled, and must end within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.until = float("inf")
        self.ended = threading.Event()
        """Set when the computation has stopped."""
        self.cancelled = False

    def cancel(self) -> None:
        """Ask the computation to stop at its next check, or never to start."""
        self.cancelled = True

    def check(self) -> None:
        """Raise `JobCancelled` if the computation was cancelled, `LateError` if it takes too long."""
        if self.cancelled:
            raise JobCancelled
        if time.monotonic() > self.until:
            sentence = f"an answer may take {self.seconds:g} s; this one takes longer: take fewer layers or tokens"
            raise LateError(sentence, subject="seconds")

    def run(self, work: Work, give: Give) -> None:
        """Pass on what the work yields; at the end its exception, or None if it ended or was cancelled."""
        self.until = time.monotonic() + self.seconds
        ending: Exception | None = None
        try:
            self.check()
            for part in work(self):
                give(part)
                self.check()
        except JobCancelled:
            pass
        except Exception as error:
            ending = error
        finally:
            self.ended.set()
            give(ending)


class Jobs:
    """The computations of all visitors: one runs, a few wait, further ones are refused."""

    def __init__(self, waiting: int = MOST_WAITING, seconds: float = ANSWER_SECONDS) -> None:
        self.waiting, self.seconds = waiting, seconds
        self._latest: dict[str, PageJob] = {}
        self._beside: list[Jobs] = []
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explorer")

    def start(self, visitor: str, work: Work, give: Give) -> PageJob:
        """Begin a visitor's computation, and cancel an older one of the same visitor.

        `give` is called from another thread: with every part, and then once with None or an exception.
        """
        with self._lock:
            if (older := self._latest.pop(visitor, None)) is not None:
                older.cancel()
            if sum(not job.cancelled for job in self._latest.values()) > self.waiting:
                sentence = f"at most {max(self.waiting, 0)} requests wait for their turn; as many do: try again later"
                raise BusyError(sentence, subject="waiting")
            job = self._latest[visitor] = PageJob(self.seconds)
        self._worker.submit(self._run, visitor, job, work, give)
        return job

    def beside(self, seconds: float) -> "Jobs":
        """Further computations, in a thread of their own, each of so many seconds at most; closed with these."""
        side_jobs = Jobs(MOST_WAITING, seconds)
        self._beside.append(side_jobs)
        return side_jobs

    def close(self) -> None:
        """Cancel all computations, and accept no more."""
        with self._lock:
            self.waiting = -1
            for job in self._latest.values():
                job.cancel()
        for side_jobs in self._beside:
            side_jobs.close()
        self._worker.shutdown(wait=False)  # what waits ends at once, and says so to whoever listens

    def _run(self, visitor: str, job: PageJob, work: Work, give: Give) -> None:
        try:
            job.run(work, give)
        finally:
            with self._lock:
                if self._latest.get(visitor) is job:
                    del self._latest[visitor]
