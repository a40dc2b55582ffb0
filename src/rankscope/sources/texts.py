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
from typing import BinaryIO, NamedTuple

from rankscope.errors import FileError, RankscopeError, one_of
from rankscope.files import must_be_text

SPLITS = ("auto", "paragraph", "line", "jsonl")
FIELD = "text"
"""What is read of a JSON line, unless told."""
SUFFIXES = (".txt", ".jsonl", ".md")
"""The files of a folder that are read."""
LONGEST = 2**16
"""Characters kept of an excerpt, unless told: some 15,000 tokens of prose."""
PIECE = 2**16
"""Bytes read at once."""
LONGEST_JSON = 2**24
"""Characters of a JSON line, which can be understood only as a whole."""


class Excerpts(Iterator[str]):
    """The excerpts of a corpus, one after another, and how far the reading has come."""

    def __init__(self, path: str | Path, split: str, field: str, longest: int) -> None:
        if split not in SPLITS:
            raise FileError(one_of("split", split, SPLITS), subject="split")
        if longest < 1:
            raise FileError(f"longest must be at least 1 character; got {longest}", subject="longest")
        self.path, self.split, self.field, self.longest = str(path), split, field, longest
        self.bytes_read = 0
        self.bytes_total = _size(self.path)
        """None where it cannot be known: stdin and pipes."""
        self.cut = 0
        """How many excerpts were longer than `longest`."""
        if field != FIELD and not any(map(self._is_json, self._names())):
            raise FileError(
                f"a field must go with JSON lines, of which {_file_label(self.path)} has none; got "
                f"{field!r}: leave it out, or split by jsonl",
                subject="field",
            )
        self._stream = self._excerpts()

    def __next__(self) -> str:
        return next(self._stream)

    def _excerpts(self) -> Iterator[str]:
        any_text = False
        if self.path == "-" and sys.stdin is None:
            raise FileError(
                "stdin must be open where --text is -; it is closed: name a file", subject="stdin"
            )
        for name in self._names():
            with (
                _readable(name, "file"),
                nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file,
            ):
                for text in self._of_file(file, name):
                    any_text = True
                    yield text
        if not any_text:
            raise FileError(
                f"{_file_label(self.path)} must hold at least one excerpt; there is no text in it",
                subject="text",
            )

    def _names(self) -> Iterator[str]:
        return iter([self.path]) if self.path == "-" else map(str, _files(Path(self.path)))

    def _is_json(self, name: str) -> bool:
        return self.split == "jsonl" or Path(name).suffix.lower() == ".jsonl"

    def _of_file(self, file: BinaryIO, name: str) -> Iterator[str]:
        if self._is_json(name):
            yield from self._fields(file, name)
            return
        # A person at a terminal, or a program in a pipe, speaks in lines.
        by_line = self.split == "line" or (self.split == "auto" and name == "-")
        buffer, blank = _ExcerptBuffer(self.longest), True
        for piece in self._pieces(file, _file_label(name)):
            buffer.add(piece.text)
            blank = blank and not piece.text.strip()
            if piece.ends_line:
                if by_line or blank:
                    yield from self._done(buffer)
                    buffer = _ExcerptBuffer(self.longest)
                blank = True
        yield from self._done(buffer)

    def _done(self, buffer: "_ExcerptBuffer") -> Iterator[str]:
        text = buffer.text()
        if text:
            self.cut += buffer.cut
            yield text

    def _fields(self, file: BinaryIO, name: str) -> Iterator[str]:
        name = _file_label(name)
        parts: list[str] = []
        size, line_number = 0, 1
        for piece in self._pieces(file, name):
            parts.append(piece.text)
            size, line_number = size + len(piece.text), piece.line
            if size > LONGEST_JSON:
                raise FileError(
                    f"{name}, line {line_number}: a JSON line must be shorter than {LONGEST_JSON:,} "
                    "characters; this one is not: put one object on a line",
                    subject="JSON line",
                )
            if piece.ends_line:
                yield from self._field("".join(parts), name, line_number)
                parts, size = [], 0
        yield from self._field("".join(parts), name, line_number)

    def _field(self, line: str, name: str, line_number: int) -> Iterator[str]:
        if not line.strip():
            return
        where = f"{name}, line {line_number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise FileError(
                f"{where}: each line must be a JSON object; this one is not ({reason})", subject="JSON line"
            ) from error
        if not isinstance(record, dict):
            raise FileError(
                f"{where}: each line must be a JSON object; this one is {_kind(record)}", subject="JSON line"
            )
        if self.field not in record:
            fields = ", ".join(map(repr, list(record)[:12])) or "none"
            raise FileError(
                f"{where}: the JSON object must have the field {self.field!r}; it has {fields}: name the one "
                "that holds the text with --field",
                subject="field",
            )
        if not isinstance(record[self.field], str):
            raise FileError(
                f"{where}: the field {self.field!r} must hold text; it holds {_kind(record[self.field])}",
                subject="field",
            )
        buffer = _ExcerptBuffer(self.longest)
        buffer.add(_encodable(record[self.field]))
        yield from self._done(buffer)

    def _pieces(self, file: BinaryIO, name: str) -> Iterator["_Piece"]:
        """The text, line by line, and a long line in pieces."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        line, data = 1, b" "
        while data:
            data = file.readline(PIECE)
            self.bytes_read += len(data)
            ends = data.endswith(b"\n")
            if b"\0" in data:
                raise FileError(
                    f"{name}, line {line}: text must be UTF-8; this holds zero bytes, as binary files and "
                    "UTF-16 do: save it as UTF-8",
                    subject="encoding",
                )
            try:
                text = decoder.decode(data, ends or not data)
            except UnicodeDecodeError as error:
                raise FileError(
                    f"{name}, line {line}: text must be UTF-8; byte 0x{error.object[error.start]:02x} is not:"
                    " save it as UTF-8, or leave out what is no text",
                    subject="encoding",
                ) from error
            yield _Piece(line, text, ends)
            line += ends


class _Piece(NamedTuple):
    line: int
    text: str
    ends_line: bool


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


def excerpts(
    path: str | Path, split: str = "auto", field: str = FIELD, *, longest: int = LONGEST
) -> Excerpts:
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
        line_number = total = 0
        for file in _files(Path(path)):
            line_number, total = line_number + 1, total + file.stat().st_size
    if not line_number:
        raise FileError(
            f"the folder {path} must hold {', '.join(SUFFIXES)} files; it holds none", subject="path"
        )
    return total


@contextmanager
def _readable(path: str | Path, what: str) -> Iterator[None]:
    """What the system says of a path that cannot be read, in a sentence."""
    try:
        yield
    except RankscopeError:
        raise
    except OSError as error:
        raise FileError(
            f"{path} must be a {what} that can be read; {error.strerror}", subject="path"
        ) from error


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _encodable(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
