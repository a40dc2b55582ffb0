"""Corpora as they come: long, broken, nested, endless."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import FileError
from rankscope.sources import excerpts
from rankscope.sources.texts import LONGEST, PIECE
from tests.raising import raises

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"), max_size=60)


@pytest.mark.slow
@given(st.lists(PLAIN, min_size=1, max_size=20))
def test_paragraphs_and_lines_are_those_of_a_whole_reading(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    text = "\n".join([*parts, "end"])
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(text.encode())
    lines = text.split("\n")
    assert list(excerpts(path, "line")) == [line.strip() for line in lines if line.strip()]
    paragraphs = "\n".join(line if line.strip() else "\0" for line in lines).split("\0")
    assert list(excerpts(path)) == [part.strip() for part in paragraphs if part.strip()]


@given(st.lists(PLAIN, max_size=10))
def test_fields_of_json_lines(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in [*texts, "end"]))
    assert list(excerpts(path, field="body")) == [text.strip() for text in [*texts, "end"] if text.strip()]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "c.TXT", ".hidden/x.txt", "a/.y.txt", "d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        (tmp_path / name).write_text(text)
    assert list(excerpts(tmp_path)) == ["a/b/c.jsonl", "a/z.md", "b.txt", "c.TXT"]


def test_how_far_the_reading_has_come_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    corpus = excerpts(tmp_path)
    assert corpus.bytes_total == 14 and corpus.bytes_read == 0
    assert next(corpus) == "one" and 0 < corpus.bytes_read < 14
    assert list(corpus) == ["two", "three"] and corpus.bytes_read == 14


def test_windows_text_and_its_mark_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\nhalf\r\n\r\ntwo\r\n".encode())
    assert list(excerpts(path)) == ["one\r\nhalf", "two"]


@pytest.mark.parametrize("split", ["line", "paragraph"])
def test_what_is_too_long_is_cut_and_the_next_is_found(tmp_path: Path, split: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n".join([b" " * 3 * PIECE, b"ab" * PIECE * 2, b"", b"next", b""]))
    corpus = excerpts(path, split)
    assert list(corpus) == [("ab" * LONGEST)[:LONGEST], "next"]
    assert corpus.cut == 1
    assert list(excerpts(path, split, longest=3)) == ["aba", "nex"]


def test_a_character_across_two_pieces_survives(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (PIECE - 1) + "é".encode() + b"y")
    assert next(excerpts(path, longest=2 * PIECE))[-3:] == "xéy"


def test_an_endless_pipe_is_read_as_far_as_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`yes` never ends: neither reading its excerpts nor one endless line may wait for it to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pipe.open("r+b", buffering=0) as end:  # both ends open: no one waits
        end.write(b"one\n\ntwo\n")
        corpus = excerpts(pipe, "line")
        assert (next(corpus), next(corpus), corpus.bytes_total) == ("one", "two", None)
    with subprocess.Popen(["yes", "call me"], stdout=subprocess.PIPE) as endless:
        stdout: Any = endless.stdout
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdout))
        corpus = excerpts("-")
        assert (next(corpus), next(corpus)) == ("call me", "call me")
        endless.kill()


def test_lines_come_from_stdin_and_json_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(text: str, *arguments: Any) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return [*excerpts("-", *arguments)]

    assert read("one\ntwo\n\nthree") == ["one", "two", "three"]
    assert read("one\ntwo\n\nthree", "paragraph") == ["one\ntwo", "three"]
    assert read('{"a": "b"}\n', "jsonl", "a") == ["b"]


@pytest.mark.parametrize(
    ("name", "content", "subject", "names"),
    [
        ("a.txt", b"good\n\nb\xe9d", "encoding", "a.txt, line 3|0xe9"),
        ("a.txt", "cut short é".encode()[:-1], "encoding", "a.txt, line 1|0xc3"),
        ("a.txt", "utf-16".encode("utf-16-le"), "encoding", "a.txt, line 1"),
        ("a.txt", b" \n\t\n", "text", ""),
        ("a.jsonl", b'{"text": "a"}\n{"text', "JSON line", "a.jsonl, line 2"),
        ("a.jsonl", b"[1]", "JSON line", "a.jsonl, line 1|a list"),
        ("a.jsonl", b'{"a": 1, "b": 2}', "field", "'text'|'a', 'b'"),
        ("a.jsonl", b"{}", "field", "'text'|none"),
        ("a.jsonl", b'{"text": 3}', "field", "line 1|'text'|a number"),
        ("a.jsonl", b"[" * 100_000, "JSON line", "line 1"),
        ("a.jsonl", b"\n\n", "text", ""),
        ("a.py", b"text", "path", ".txt, .jsonl, .md"),
    ],
)
def test_a_corpus_that_is_none_is_a_sentence(
    tmp_path: Path, name: str, content: bytes, subject: str, names: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(FileError, subject) as caught:
        list(excerpts(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert all(part in str(caught.value) for part in names.split("|"))


def test_what_came_before_a_mistake_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\nb\xe9d")
    corpus = excerpts(tmp_path)
    assert next(corpus) == "good"
    with pytest.raises(FileError):
        next(corpus)


def test_asking_for_what_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with raises(FileError, str(tmp_path / "absent")):
        excerpts(tmp_path / "absent")
    with raises(FileError, "split"):
        excerpts(tmp_path, "lines")
    with raises(FileError, "longest"):
        excerpts(tmp_path, longest=0)


def test_half_a_character_in_json_becomes_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    (text,) = excerpts(tmp_path / "a.jsonl")
    assert text.encode().decode() == text and text.endswith("b 😀")


@pytest.mark.parametrize("name", ["a.txt", "folder"])
def test_a_field_that_nothing_has_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "a.txt", folder / "a.txt"):
        path.write_text("words")
    with raises(FileError, "field"):
        excerpts(tmp_path / name, field="body")
    (folder / "b.jsonl").write_text('{"body": "more"}')
    assert list(excerpts(folder, field="body")) == ["words", "more"]
    assert list(excerpts(folder / "b.jsonl", field="body")) == ["more"]
