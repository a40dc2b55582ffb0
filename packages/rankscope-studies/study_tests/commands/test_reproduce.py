"""`rankscope reproduce`: ours beside what was published."""

from pathlib import Path

from tests.cli.running import answered, printed


def test_reproduce_compares_with_what_was_published(tmp_path: Path) -> None:
    line = ["reproduce", "dong2021", "lengths", "-o", "out"]
    assert printed(*line, cwd=tmp_path).count("agrees") == 8
    page = (tmp_path / "out" / "quick" / "REPRODUCTION.md").read_text()
    assert "11 and 12 (.383 each)" in page and "Not run: dong2021 fig2" in page
    assert (tmp_path / "out" / "quick" / "dong2021" / "lengths" / "lengths.svg").is_file()
    assert all(each["agrees"] for each in answered(*line, cwd=tmp_path)[0]["comparisons"])
