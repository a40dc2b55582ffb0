"""`rankscope report`, and that the other commands leave what it is made of."""

from pathlib import Path

from tests.cli.test_commands import rankscope


def test_several_runs_become_one_page(tmp_path: Path) -> None:
    small = ("bert-tiny", "--tokens", "12", "--samples", "1", "-q")
    for command in (("measure", "--variants", "san,transformer"), ("paths",), ("bounds",)):
        done = rankscope(command[0], *small, *command[1:], "-o", command[0], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / command[0] / "report.html").is_file()
    assert {"cloud.parquet", "spectrum.parquet"} <= {path.name for path in (tmp_path / "measure").iterdir()}
    done = rankscope("report", "measure", "paths", "bounds", "-o", "all.html", cwd=tmp_path)
    assert done.stdout == "Report: all.html\n"
    html = (tmp_path / "all.html").read_text()
    for section in (
        "run1-residual",
        "run1-cloud",
        "run1-spectrum",
        "run2-paths",
        "run2-heads",
        "run3-bounds",
    ):
        assert f'id="{section}"' in html


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = rankscope("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("rankscope: ") and "must be a run directory" in done.stderr
