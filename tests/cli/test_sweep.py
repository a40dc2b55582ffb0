"""`rankscope sweep`: what it says and how it ends where cells fail."""

from pathlib import Path

import pytest

import rankscope as package
from tests.cli.running import rankscope


@pytest.mark.slow
def test_a_sweep_all_of_whose_cells_fail_says_so_and_does_not_end_well(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('[all]\nmodel = "bert-tiny"\nsamples = 1\nheads = 5\n[grid]\ndepth = [1, 2]\n')
    for asked in (["--json"], []):  # the second time nothing is tried again
        done = rankscope("sweep", "study.toml", "-o", "run", "--workers", "1", *asked, cwd=tmp_path)
        assert done.code == 2 and "all failed" in done.err and done.out, done
    assert "Cell 0 failed" in done.out
    assert package.read(tmp_path / "run").table("cells")["reason"].null_count() == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_specification_without_a_cell_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    done = rankscope("sweep", "empty.toml", cwd=tmp_path)
    assert done.code == 2 and "at least one cell" in done.err and not (tmp_path / "runs").exists()
