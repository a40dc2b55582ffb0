"""`rankscope measure --text` as a person or a program meets it."""

import json
import signal
import subprocess
from pathlib import Path

import polars as pl
import pytest

from rankscope import fresh
from rankscope.profiles import Summary
from rankscope.runs import read
from rankscope.sources import bundled_excerpts
from tests.cli.running import COMMAND, answered, printed, rankscope

SHORT = ["measure", "bert-tiny", "--tokens", "8", "--variants", "san,transformer", "--batch", "8",
         "--metrics", "relative_residual,mu"]  # fmt: skip
HERE = ["--text", "corpus.txt", "--split", "line"]
LINES = [" ".join(text.split()[:12]) for text in bundled_excerpts(12)[:30]]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    return tmp_path


@pytest.mark.slow
def test_a_table_that_fits_and_a_run_folder(corpus: Path) -> None:
    out = printed(*SHORT, *HERE, "-o", "out", "--samples", "20", cwd=corpus)
    assert "median of 20 excerpts" in out
    for variant in ("san", "transformer"):
        assert f" {variant} " in out
    assert out.splitlines()[-1] == "Report: out/report.html"
    names = {path.name for path in (corpus / "out").iterdir()}
    assert {"summary.parquet", "manifest.json", "report.html", "rows", "mu.png"} <= names
    assert {"cloud.parquet", "spectrum.parquet"} <= names
    assert Summary.read(corpus / "out" / "summary.parquet").excerpts == 20
    run = read(corpus / "out")
    text = run.manifests["corpus"].text
    assert text is not None and text.limit == 20 and text.read_to_the_end
    assert run.table("rows")["sample"].n_unique() == 20
    html = (corpus / "out" / "report.html").read_text()
    assert "median of 20 excerpts" in html and "over excerpts, at the last layer" in html
    assert f"The first excerpt of 20: “{' '.join(LINES[0].split()[:4])}" in html


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(corpus: Path) -> None:
    printed(*SHORT, *HERE, "-o", "out", "--samples", "20", cwd=corpus)
    longer = answered(*SHORT, *HERE, "-o", "out", cwd=corpus)
    anew = answered(*SHORT, *HERE, "-o", "anew", cwd=corpus)
    assert longer["table"] == anew["table"] and anew["manifest"]["excerpts"] == len(LINES)
    for name in ("cloud.parquet", "spectrum.parquet"):  # a run that goes on has read past its first excerpts
        assert pl.read_parquet(corpus / "out" / name).equals(pl.read_parquet(corpus / "anew" / name))
    words = pl.read_parquet(corpus / "anew" / "cloud.parquet").filter(variant="san", layer=0)["text"]
    assert words.to_list() == fresh("bert-tiny").words(LINES[0], 8)[0]

    other = rankscope(*SHORT, *HERE, "-o", "out", "--seed", "1", cwd=corpus)
    assert other.code == 2 and len(other.err.splitlines()) == 1
    assert "out/rows must be of this run; it is of one with other embedding, variants of san" in other.err


def test_stdin_folders_and_json_lines_give_the_same(corpus: Path) -> None:
    (corpus / "folder").mkdir()
    records = [json.dumps({"body": line}) for line in LINES[:10]]
    (corpus / "folder" / "a.jsonl").write_text("\n".join(records[:4]))
    (corpus / "folder" / "b.jsonl").write_text("\n".join(records[4:]))
    folder = answered(*SHORT, "--text", "folder", "--field", "body", cwd=corpus)
    piped = answered(*SHORT, "--text", "-", cwd=corpus, text="\n".join(LINES[:10]))
    assert folder["table"] == piped["table"] != []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--text", "absent.txt"], "there is none at absent.txt"),
        (["--text", "corpus.txt", "--split", "lines"], "split must be one of auto, paragraph, line, jsonl"),
        (["--text", "-", "--split", "jsonl"], "stdin, line 1: each line must be a JSON object"),
        (["--text", "corpus.txt", "--metrics", "mew"], "metric must be one of"),
        (["--text", "corpus.txt", "--arithmetic", "float8"], "arithmetic must be one of"),
        (["--text", "corpus.txt", "-o", "corpus.txt"], "corpus.txt must be a place that can be written"),
    ],
)
def test_bad_input_is_one_sentence(corpus: Path, arguments: list[str], sentence: str) -> None:
    done = rankscope(*SHORT, *arguments, cwd=corpus, text="no json")
    assert done.code == 2 and sentence in done.err, done.err
    assert len(done.err.splitlines()) == 1 and done.out == ""


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_done_and_the_command_goes_on(corpus: Path) -> None:
    """The last line is longer than a pipe holds: once it is written, the run has come to it and waits there
    for its end, with two chunks of eight behind it."""
    # As from a shell: what runs in the background may have been told to ignore Ctrl-C.
    run = subprocess.Popen(
        [*COMMAND, *SHORT, "--text", "-", "-o", "out"], cwd=corpus, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert run.stdin is not None
    run.stdin.write("\n".join(LINES[:16]) + "\n" + "endless " * 2**18)
    run.stdin.flush()
    run.send_signal(signal.SIGINT)
    out, said = run.communicate(timeout=120)
    assert run.returncode == 130, said
    assert "median of 16 excerpts" in out
    assert "stopped after 16 excerpts; the same command resumes from here" in said
    again = answered(*SHORT, "--text", "-", "-o", "out", cwd=corpus, text="\n".join(LINES))
    once = answered(*SHORT, "--text", "-", cwd=corpus, text="\n".join(LINES))
    assert again["table"] == once["table"]


@pytest.mark.slow
def test_a_bad_line_far_down_is_said_after_what_was_done(corpus: Path) -> None:
    (corpus / "bad.txt").write_bytes("\n".join(LINES[:20]).encode() + b"\n\xff\n")
    done = rankscope(*SHORT, "--text", "bad.txt", "--split", "line", "-o", "out", cwd=corpus)
    assert done.code == 2 and "median of 16 excerpts" in done.out
    assert done.err.splitlines() == [
        "rankscope: stopped after 16 excerpts; the same command resumes from here",
        "rankscope: bad.txt, line 21: text must be UTF-8; byte 0xff is not: save it as UTF-8",
    ]
    assert Summary.read(corpus / "out" / "summary.parquet").excerpts == 16
