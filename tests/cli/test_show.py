"""What a command says while it works, and how it prints what others wrote."""

import time

import pytest

from rankscope.cli import show


def test_long_work_is_not_silent_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "SILENCE", 0.01)
    said, begun = "", time.monotonic()
    with show.progress(quiet=False) as start:
        bar = start("san, deviation")
        bar(1, 4)
        while said.count("san, deviation: 25%") < 2 and time.monotonic() - begun < 20:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.count("san, deviation: 25%") >= 2 and all(line.startswith("rankscope: ") for line in said.splitlines())
    with show.progress(quiet=True) as start:
        start("san")
        time.sleep(0.1)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "nothing is said after the end, nor where nobody wants to hear it"


def test_what_others_wrote_is_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    show.say("a[red]b[/red]\x1b[31mc\x07 :smile:")
    show.complain("d\x1b]0;e\x07\x9bf")
    show.machine({"g\x7f": "\u202eh\x85"})
    out, err = capsys.readouterr()
    assert out == 'a[red]b[/red][31mc :smile:\n{"g\\u007f": "\\u202eh\\u0085"}\n'
    assert err == "rankscope: d]0;ef\n"
