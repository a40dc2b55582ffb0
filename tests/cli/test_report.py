"""`rankscope report`, and that the other commands leave what it is made of."""

from pathlib import Path

from tests.cli.running import printed, rankscope


def test_several_runs_become_one_page(tmp_path: Path) -> None:
    small = ("bert-tiny", "--tokens", "12", "--samples", "1", "-q")
    for command in (("measure", "--variants", "san,transformer"), ("paths",), ("bounds",)):
        printed(command[0], *small, *command[1:], "-o", command[0], cwd=tmp_path)
        assert (tmp_path / command[0] / "report.html").is_file()
    assert {"cloud.parquet", "spectrum.parquet"} <= {path.name for path in (tmp_path / "measure").iterdir()}
    out = printed("report", "measure", "paths", "bounds", "-o", "all.html", cwd=tmp_path)
    assert out == "Report: all.html\n"
    html = (tmp_path / "all.html").read_text()
    for section in ("1-residual", "1-cloud", "1-spectrum", "2-paths", "2-heads", "3-bounds"):
        assert f'id="run{section}"' in html


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = rankscope("report", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith("rankscope: ") and "must be a run directory" in done.err
