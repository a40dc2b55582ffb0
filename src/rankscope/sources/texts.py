"""A corpus as a stream of excerpts: any number, any size, a bounded piece of it in memory.

An excerpt is a line, a paragraph (lines up to a blank one), or a field of a JSON line. Of a longer one than
`longest` characters the rest is read past and dropped: a network takes only so many tokens anyway.
"""

import codecs
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from rankscope.errors import FileError, RankscopeError, require, require_one_of
from rankscope.files import must_be_text

SPLITS = ("auto", "paragraph", "line", "jsonl")
FIELD = "text"  # What is read of a JSON line, unless told
SUFFIXES = (".txt", ".jsonl", ".md")  # The files of a folder that are read
LONGEST = 2**16  # Characters kept of an excerpt, unless told: some 15,000 tokens of prose
PIECE = 2**16  # Bytes read at once
LONGEST_JSON = 2**24  # Characters of a JSON line, which can be understood only as a whole


class Excerpts(Iterator[str]):
    """The excerpts of a corpus, one after another, and how far the reading has come."""

    def __init__(self, path: str | Path, split: str, field: str, longest: int) -> None:
        require_one_of("split", split, SPLITS, FileError)
        require(longest >= 1, f"longest must be at least 1 character; got {longest}", FileError, "longest")
        self.path, self.split, self.field, self.longest = str(path), split, field, longest
        self.bytes_read = 0
        self.bytes_total = _size(self.path)
        """None where it cannot be known: stdin and pipes."""
        self.cut = 0
        """How many excerpts were longer than `longest`."""
        if field != FIELD and not any(map(self._is_json, self._names())):
            reason = f"a field must go with JSON lines, of which {_file_label(self.path)} has none"
            raise FileError(f"{reason}; got {field!r}: leave it out, or split by jsonl", subject="field")
        self._stream = self._excerpts()

    def __next__(self) -> str:
        return next(self._stream)

    def _excerpts(self) -> Iterator[str]:
        any_text = False
        is_open = self.path != "-" or sys.stdin is not None
        require(is_open, "stdin must be open where --text is -; it is closed: name a file", FileError, "stdin")
        for name in self._names():
            stdin = nullcontext(sys.stdin.buffer) if name == "-" else None
            with _readable(name, "file"), stdin or Path(name).open("rb") as file:
                for text in self._of_file(file, name):
                    any_text = True
                    yield text
        message = f"{_file_label(self.path)} must hold at least one excerpt; there is no text in it"
        require(any_text, message, FileError, "text")

    def _names(self) -> Iterator[str]:
        return iter([self.path]) if self.path == "-" else map(str, _files(Path(self.path)))

    def _is_json(self, name: str) -> bool:
        return self.split == "jsonl" or Path(name).suffix.lower() == ".jsonl"

    def _of_file(self, file: BinaryIO, name: str) -> Iterator[str]:
        json_lines = self._is_json(name)
        # A person at a terminal, or a program in a pipe, speaks in lines.
        by_line = json_lines or self.split == "line" or (self.split == "auto" and name == "-")
        room = LONGEST_JSON if json_lines else self.longest
        buffer, blank, where = _ExcerptBuffer(room), True, ""
        for line, text, ends_line in self._pieces(file, _file_label(name)):
            buffer.add(text)
            blank = blank and not text.strip()
            where = f"{_file_label(name)}, line {line}" if json_lines else ""
            if json_lines and buffer.cut:
                message = f"{where}: a JSON line must be shorter than {LONGEST_JSON:,} characters"
                raise FileError(f"{message}; this one is not: put one object on a line", subject="JSON line")
            if ends_line:
                if by_line or blank:
                    yield from self._done(buffer, where)
                    buffer = _ExcerptBuffer(room)
                blank = True
        yield from self._done(buffer, where)

    def _done(self, buffer: "_ExcerptBuffer", where: str) -> Iterator[str]:
        """The excerpt in a buffer, if there is any; of a JSON line, which is `where`, its field."""
        if where and buffer.text():
            buffer = self._field(buffer.text(), where)
        if text := buffer.text():
            self.cut += buffer.cut
            yield text

    def _field(self, line: str, where: str) -> "_ExcerptBuffer":
        expected = f"{where}: each line must be a JSON object; this one is"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise FileError(f"{expected} not ({reason})", subject="JSON line") from error
        require(isinstance(record, dict), f"{expected} {_kind(record)}", FileError, "JSON line")
        if self.field not in record:
            fields = ", ".join(map(repr, list(record)[:12])) or "none"
            message = f"{where}: the JSON object must have the field {self.field!r}; it has {fields}: name another"
            raise FileError(f"{message} with --field", subject="field")
        text = record[self.field]
        message = f"{where}: the field {self.field!r} must hold text; it holds {_kind(text)}"
        require(isinstance(text, str), message, FileError, "field")
        buffer = _ExcerptBuffer(self.longest)
        # JSON can spell half a character (a lone surrogate), which no tokenizer takes.
        buffer.add(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return buffer

    def _pieces(self, file: BinaryIO, name: str) -> Iterator[tuple[int, str, bool]]:
        """(line number, text, whether the line ends there): lines, and a long line in pieces."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        line, data = 1, b" "
        while data:
            data = file.readline(PIECE)
            self.bytes_read += len(data)
            ends = data.endswith(b"\n")
            expected = f"{name}, line {line}: text must be UTF-8"
            reason = "this holds zero bytes, as binary files and UTF-16 do"
            require(b"\0" not in data, f"{expected}; {reason}: save it as UTF-8", FileError, "encoding")
            try:
                text = decoder.decode(data, ends or not data)
            except UnicodeDecodeError as error:
                reason = f"byte 0x{error.object[error.start]:02x} is not"
                raise FileError(f"{expected}; {reason}: save it as UTF-8", subject="encoding") from error
            yield line, text, ends
            line += ends


class _ExcerptBuffer:
    """The first `room` characters of what is added, not counting blanks before them."""

    def __init__(self, room: int) -> None:
        self.parts: list[str] = []
        self.room = room
        self.cut = False

    def add(self, text: str) -> None:
        text = text if self.parts else text.lstrip()
        if len(text) > self.room:
            self.cut = self.cut or bool(text[self.room :].strip())
            text = text[: self.room]
        if text:
            self.parts.append(text)
            self.room -= len(text)

    def text(self) -> str:
        return "".join(self.parts).strip()


def excerpts(path: str | Path, split: str = "auto", field: str = FIELD, *, longest: int = LONGEST) -> Excerpts:
    """The excerpts of a file, of a folder, or of stdin (`-`), read as they are asked for.

    Of a folder: the .txt, .md and .jsonl files in it and below it, in the order of their names; those whose
    names begin with a dot are left out. `split` is paragraph, line or jsonl; auto takes lines from stdin and
    paragraphs from files. A .jsonl file always gives `field` of each line. Empty ones are skipped.

    >>> from importlib.resources import files
    >>> next(excerpts(str(files("rankscope") / "data/moby_dick.txt"), "line"))[:16]
    'CHAPTER 1. Loomi'
    """
    return Excerpts(path, split, field, longest)


def _file_label(name: str) -> str:
    return "stdin" if name == "-" else name


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    with _readable(path, "folder"), os.scandir(path) as entries:
        inside = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    for name in inside:
        below = path / name
        if below.is_dir() and not below.is_symlink():
            yield from _files(below)
        elif below.suffix.lower() in SUFFIXES and below.is_file():
            yield below


def _size(path: str) -> int | None:
    """Bytes in all; a corpus that is not there is found out here, before anything is read."""
    if path == "-":
        return None
    with _readable(path, "text"):
        must_be_text(path)
        if not Path(path).is_dir():
            return Path(path).stat().st_size if Path(path).is_file() else None
        sizes = [file.stat().st_size for file in _files(Path(path))]
    require(sizes, f"the folder {path} must hold {', '.join(SUFFIXES)} files; it holds none", FileError, "path")
    return sum(sizes)


@contextmanager
def _readable(path: str | Path, what: str) -> Iterator[None]:
    """What the system says of a path that cannot be read, in a sentence."""
    try:
        yield
    except RankscopeError:
        raise
    except OSError as error:
        message = f"{path} must be a {what} that can be read; {error.strerror}"
        raise FileError(message, subject="path") from error


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
