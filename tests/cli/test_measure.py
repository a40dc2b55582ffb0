"""`rankscope measure`: the table, the numbers and the run folder."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
import torch
from transformers import BertConfig

from rankscope import Architecture, Transformer, fresh
from rankscope.cli import Interruption
from rankscope.cli.inputs import MeasureTask
from rankscope.cli.measure import measure_all, raise_if_stopped
from rankscope.cli.output import ReportTables
from rankscope.profiles import Reader, Summary
from rankscope.runs import EarlyStop, read
from rankscope.sources import bundled_excerpts
from tests.cli.conftest import WrittenRuns
from tests.cli.running import COMMAND, answered, printed, rankscope

SMALL = ["bert-tiny", "--max-length", "16", "--samples", "2"]


def test_measure_prints_a_table_that_fits_and_writes_a_run(runs: WrittenRuns) -> None:
    for variant in ("san", "transformer"):
        assert f" {variant} " in runs.outputs["measure"]
    assert "Report: measure/report.html" in runs.outputs["measure"]
    names = {path.name for path in (runs.folder / "measure").iterdir()}
    assert {"report.html", "profile.parquet", "cloud.parquet", "spectrum.parquet"} <= names


def test_measure_json_is_the_table_and_the_manifest() -> None:
    answer = answered("measure", *SMALL, "--variants", "san", "--metrics", "mu,entropy", "--seed", "3",
                      "--arithmetic", "float64,float32", "--mask", "causal", "--layers", "4")  # fmt: skip
    assert answer["manifest"]["seed"] == 3
    assert answer["manifest"]["networks"][0]["architecture"]["mask"] == "causal"
    assert {row["layer"] for row in answer["table"]} == set(range(5))
    assert {row["arithmetic"] for row in answer["table"]} == {"float64", "float32"}


def test_the_same_command_gives_the_same_numbers() -> None:
    first, second = (answered("measure", *SMALL)["table"] for _ in range(2))
    assert first == second


def test_measure_takes_an_architecture_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"layers": 2, "width": 8, "heads": 2, "norm": "rms"}')
    line = ["measure", "mine.json", "--variants", "transformer", "--samples", "1", "--max-length", "8"]
    answer = answered(*line, cwd=tmp_path)
    assert answer["manifest"]["networks"][0]["architecture"]["norm"] == "rms"


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path / "model")  # there are no weights: whoever reads them first says so
    for command in ("measure", "paths", "bounds"):
        code, out, err = rankscope(command, "model", cwd=tmp_path)
        assert code == 2 and out == "" and err.count("\n") == 1 and "tokenizer" in err and "load(" not in err


def test_odd_folder_names_are_printed_as_they_are(tmp_path: Path) -> None:
    line = ["measure", *SMALL, "--variants", "san", "--metrics", "mu", "-o", "out[a]" + "x" * 90]
    done = rankscope(*line, cwd=tmp_path)
    assert done.code == 0, done.err
    path = done.out.splitlines()[-1].removeprefix("Report: ")
    assert (tmp_path / path).is_file()


@pytest.mark.slow
def test_all_arithmetics_side_by_side(tmp_path: Path) -> None:
    line = ["measure", *SMALL, "--arithmetic", "all", "--metrics", "relative_residual"]
    out = printed(*line, "--variants", "san,san+norm+mlp+mlp_skip")
    for arithmetic in ("deviation", "float64", "float32", "bfloat16"):
        assert arithmetic in out
    printed(*line, "--variants", "san", "-o", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "arithmetics_san.png").is_file()


def test_the_first_metric_asked_for_is_the_one_printed() -> None:
    out = printed("measure", *SMALL, "--variants", "san", "--metrics", "dobrushin,mu")
    assert out.startswith("dobrushin:") and "layers 1 →" in out


@pytest.mark.slow
def test_a_kernel_without_a_rule_falls_back_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"layers": 2, "width": 8, "heads": 2, "kernel": "sigmoid"}')
    here = ["measure", "s.json", "--samples", "1", "--max-length", "8", "--variants", "san"]
    out = printed(*here, cwd=tmp_path)
    assert "san ran in float64: deviation arithmetic has no rule for kernel sigmoid." in out
    assert "bfloat16" in printed(*here, "--arithmetic", "all", cwd=tmp_path)


class PressesCtrlC(ReportTables):
    """Reads along until the second variant, where Ctrl-C comes."""

    def readers(self, variant: str) -> Sequence[Reader]:
        if variant == "transformer":
            raise KeyboardInterrupt
        return super().readers(variant)


def test_after_ctrl_c_the_variants_that_were_finished_are_kept(tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    X, padding = net.encode(["Call me Ishmael."], 8)
    variants = ["san", "transformer"]
    jobs = {name: (net.variant(name), X, padding) for name in variants}
    tables = PressesCtrlC(net, variants, X, padding, net.words(["Call me Ishmael."], 8))
    profile = measure_all(jobs, MeasureTask(["mu"]), quiet=True, tables=tables)
    assert profile.variants == ["san"] and profile.manifest.stopped == EarlyStop(finished=("san",), asked=2)
    with pytest.raises(Interruption) as stop:
        raise_if_stopped(profile, tmp_path)
    assert str(stop.value) == f"after 1 of 2 (san); these are written to {tmp_path}"


@pytest.mark.parametrize("quiet", [False, True])
def test_what_takes_long_is_announced_before_it_starts(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankscope.cli.measure.ANNOUNCED_SECONDS", 0.0)
    net = Transformer.random(Architecture(layers=1, width=8, heads=2))
    X, padding = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool)
    measure_all({"transformer": (net, X, padding)}, MeasureTask(["mu"]), quiet=quiet)
    expected = "" if quiet else "rankscope: this will take about 0 seconds by estimate\n"
    assert capsys.readouterr().err == expected


def test_few_excerpts_of_a_text_can_be_confirmed(tmp_path: Path) -> None:
    lines = tmp_path / "notes.txt"
    lines.write_text("\n\n".join(f"the whale was in the sea for day {day}" for day in range(8)))
    asked = ("measure", "bert-tiny", "--variants", "san", "--max-length", "8", "--text", str(lines), "--confirm")
    done = rankscope(*asked)
    assert done.code == 0, done.err
    assert "read the first 4 of 8 excerpts" in done.err
    told = json.loads(rankscope(*asked, "--samples", "8", "--json").out)
    assert told["manifest"]["samples"] == 8
    refused = rankscope(*asked, "--on", "ray")
    assert refused.code == 2 and "--confirm" in refused.err


def test_a_text_longer_than_the_model_takes_says_the_option(tmp_path: Path) -> None:
    arch = Architecture(layers=1, width=8, heads=2, length=6, positions="absolute")
    (tmp_path / "short.json").write_text(json.dumps(arch.to_dict()))
    refused = rankscope("measure", str(tmp_path / "short.json"), "--samples", "1", "--variants", "san")
    assert refused.code == 2 and "--max-length 6" in refused.err
    assert rankscope("measure", str(tmp_path / "short.json"), "--max-length", "6", "--variants", "san").code == 0


SHORT = ["measure", "bert-tiny", "--max-length", "8", "--variants", "san,transformer", "--batch-size", "8",
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
