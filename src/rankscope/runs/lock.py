"""A lock on a run folder, so that it has one writer at a time. The system releases it when the process ends.

`Store` takes the lock when it is opened and releases it when it is closed; studies lock single parts of their work in
the same way (`rankscope_studies.study`). `fcntl` locks the file on Unix, `msvcrt` on Windows; whichever the system has
is imported when a lock is taken.

Why not filelock, which comes with torch: it locks a file, and does not tell whether that is still the one in the folder
(`is_held`). Where a folder was renamed, deleted or made again under a run, its lock would be kept on the old file, and
two writers would write into the new folder.
"""

import contextlib
import os
from importlib import import_module
from pathlib import Path

from rankscope.errors import FileError
from rankscope.files import writable_folder

LOCK_FILE = ".lock"


def lock_if_free(folder: Path, file: str = LOCK_FILE) -> int | None:
    """Make the folder and lock it: the handle that `unlock` takes, or None where another process holds the lock. A lock
    file that a killed process has left does not block: the system has released its lock.

    Args:
        folder: The folder that the lock file lies in.
        file: The name of the lock file: another one for each thing in the folder that is locked by itself.

    Raises:
        FileError: The folder cannot be locked.
    """
    writable_folder(folder)
    path = folder / file
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _acquire(handle)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            os.close(handle)
            sentence = f"{folder} must be a folder that can be locked; {error.strerror}"
            raise FileError(sentence, subject=str(folder)) from error
        if is_held(folder, handle, file):
            return handle
        os.close(handle)  # another writer removed the file in between: a lock on it would keep nobody out


def is_held(folder: Path, handle: int, file: str = LOCK_FILE) -> bool:
    """True while the lock file in the folder is the one that was locked: False once the folder was renamed, deleted or
    made again, when another writer may be in the place of it."""
    try:
        return os.path.samestat((folder / file).stat(), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        return False


def unlock(folder: Path, handle: int, file: str = LOCK_FILE) -> None:
    """Release the lock, and remove its file, unless another writer's is in the place of it.

    Args:
        folder, file: As `lock_if_free` was given them.
        handle: What that returned.
    """
    held = is_held(folder, handle, file)
    if os.name == "nt":  # where a file that somebody has open cannot be removed
        os.close(handle)
    if held:
        with contextlib.suppress(OSError if os.name == "nt" else FileNotFoundError):
            (folder / file).unlink()
    if os.name != "nt":
        os.close(handle)


def _acquire(handle: int) -> None:
    """Lock an open file; raises BlockingIOError if another process has locked it."""
    try:
        fcntl = import_module("fcntl")
    except ImportError:
        msvcrt = import_module("msvcrt")
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
