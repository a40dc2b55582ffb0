"""`rankscope demo`: its report; with `--train`, both runs and what is said of them; with `--decoder`, another model."""

from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks import shipped_models
from rankscope import read
from rankscope.cli.inputs import bundled_text
from rankscope.runs import read as read_run
from tests.cli.running import answered, printed, rankscope


def test_the_training_demo_trains_with_skips_and_without(tmp_path: Path) -> None:
    answer = answered("demo", "--train", "--steps", "1", "-o", "out", cwd=tmp_path)
    assert (tmp_path / answer["report"]).is_file()
    for name in ("whole", "no-skips"):
        assert {row["step"] for row in answer["runs"][name]["training"]} == {0}  # the next is due at step 20


@pytest.mark.slow
def test_the_training_demo_trains_shows_and_goes_on(tmp_path: Path) -> None:
    line = ["demo", "--train", "--steps", "20", "-o", "out"]
    answer = answered(*line, cwd=tmp_path)
    assert (tmp_path / answer["report"]).is_file()
    assert [*answer["runs"]] == ["whole", "no-skips"]
    for name, found in answer["runs"].items():
        assert {row["step"] for row in found["training"]} == {0, 20}
        assert found["training"] == read(tmp_path / "out" / name).tables["training"].to_dicts()
    out = printed(*line, cwd=tmp_path)  # what is done already is not done again
    assert "relative_mu at step 20, the last that all have" in out and " loss " in out and " layer 6 " in out
    assert "whole: 0 alarms" in out and "no-skips: 0 alarms" in out and "Report: out/report.html" in out
    for name, found in answer["runs"].items():
        assert found["training"] == read(tmp_path / "out" / name).tables["training"].to_dicts()


@pytest.mark.slow
def test_demo_ends_by_saying_where_its_report_lies(tmp_path: Path) -> None:
    out = printed("demo", cwd=tmp_path)
    assert out.splitlines()[-1] == "Report: runs/demo/report.html"
    assert "a trained English BERT" in out
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size < 8e6


def test_the_demo_of_a_decoder_trains_nothing() -> None:
    assert "--decoder" in printed("demo", "--help")
    code, _, err = rankscope("demo", "--decoder", "--train")
    assert code == 2 and "leave one out" in err


@pytest.mark.slow
def test_the_demo_of_a_decoder_reads_what_its_training_held_out(tmp_path: Path) -> None:
    said = " ".join(printed("demo", "--decoder", cwd=tmp_path).split())
    assert "moby-gpt, a trained Llama of 8 layers, reads 4 excerpts of Moby Dick, held out of its" in said
    assert said.endswith("Report: runs/demo-decoder/report.html")
    (manifest,) = read_run(tmp_path / "runs" / "demo-decoder").manifests.values()
    assert manifest.model == "moby-gpt" and manifest.origin is not None and manifest.origin["family"] == "llama"
    # What it reads lies in the first chapter, which the script of its training holds out.
    assert shipped_models.is_held_out("moby-dick", 0)
    prose = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    first_chapter = prose.partition("like a snow hill in the air.")[0]
    assert all(excerpt in first_chapter for excerpt in bundled_text(4, 128))
