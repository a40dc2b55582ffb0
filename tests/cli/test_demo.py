"""`rankscope demo`: its report; with `--train`, both runs and what is said of them."""

from pathlib import Path

import pytest

from rankscope import read
from tests.cli.running import answered, printed


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
        assert found["training"] == read(tmp_path / "out" / name).table("training").to_dicts()
    out = printed(*line, cwd=tmp_path)  # what is done already is not done again
    assert "whole: 0 alarms" in out and "no-skips: 0 alarms" in out and "Report: out/report.html" in out
    for name, found in answer["runs"].items():
        assert found["training"] == read(tmp_path / "out" / name).table("training").to_dicts()


@pytest.mark.slow
def test_demo_ends_by_saying_where_its_report_lies(tmp_path: Path) -> None:
    out = printed("demo", cwd=tmp_path)
    assert out.splitlines()[-1] == "Report: runs/demo/report.html"
    assert "a trained English BERT" in out
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size < 8e6
