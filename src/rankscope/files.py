"""Writing files so that an interruption never leaves half of one; a text that is not there."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankscope.errors import FileError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, moved over it only when the block ends well."""
    target = Path(path)
    if target.is_dir():
        raise FileError(f"{target} must be a file to be written; it is a folder", subject=str(target))
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp's own mode keeps others from reading the result
        with _writable(target):
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary, _writable(path):
        # Half a character, as a path of odd bytes has, cannot be written as UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="replace")


def append_whole(path: str | Path, size: int, text: str) -> int:
    """Append a text to a file of `size` bytes, or leave these as they are: what an earlier write that failed, as on a
    full disk, has left behind them is cut off first, and so is what this one leaves. Returns the new size."""
    content = memoryview(text.encode(errors="replace"))
    with _writable(path), Path(path).open("ab", buffering=0) as file:
        size = file.truncate(min(size, file.seek(0, os.SEEK_END)))
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(size)
            raise
        return file.tell()


def writable_folder(path: str | Path) -> None:
    """Make the folder, or say that it cannot be written, before hours go into what it is to hold."""
    with _writable(path):
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


@contextmanager
def _writable(path: str | Path) -> Iterator[None]:
    """Errors of the operating system become the sentence that this path cannot be written."""
    try:
        yield
    except OSError as error:
        sentence = f"{path} must be a place that can be written; {error.strerror}: choose another"
        raise FileError(sentence, subject=str(path)) from error


def must_be_text(path: str) -> None:
    """Refuse a path at which there is no text, before a model is loaded for it; - is stdin."""
    if path != "-" and not Path(path).exists():
        raise FileError(f"a text is a file, a folder, or - for stdin; there is none at {path}", subject=str(path))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that no number is counted by half."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is None:  # no Python handler to put back
        yield
        return
    pressed: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *what: pressed.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])
