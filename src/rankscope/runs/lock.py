"""One writer at a time: a lock on a folder that ends with the process that holds it."""

import fcntl
import os
from pathlib import Path

from rankscope.errors import FileError
from rankscope.files import writable_folder

NAME = ".lock"


def lock(folder: Path) -> int:
    """Make the folder and hold it; a sentence where another writer does. `unlock` takes what this gives.

    The system takes the lock from a process that is gone, so that a file left by one that was killed bars
    nobody.
    """
    writable_folder(folder)
    path = folder / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise FileError(f"{folder} must be a folder that can be locked; {error.strerror}") from error
            raise FileError(
                f"{folder} must have one writer at a time; another run is writing there: wait for its end, "
                "or give another folder"
            ) from error
        try:
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # its holder took the file away in between: what is held bars nobody


def unlock(folder: Path, handle: int) -> None:
    """Let others write."""
    (folder / NAME).unlink(missing_ok=True)
    os.close(handle)
