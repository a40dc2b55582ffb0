"""`rankscope sweep`: the table that it prints, what it says and how it ends where cells fail."""

import math
from pathlib import Path

import polars as pl
import pytest

import rankscope as package
from rankscope.cli.show import show_tables
from rankscope.engine import Sweep, spec_of
from rankscope.runs import begun
from tests.cli.running import rankscope


@pytest.mark.slow
def test_a_sweep_all_of_whose_cells_fail_says_so_and_does_not_end_well(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('[all]\nmodel = "bert-tiny"\nsamples = 1\nheads = 5\n[grid]\ndepth = [1, 2]\n')
    for asked in (["--json"], []):  # the second time nothing is tried again
        done = rankscope("sweep", "study.toml", "-o", "run", "--workers", "1", *asked, cwd=tmp_path)
        assert done.code == 2 and "all failed" in done.err and done.out, done
    assert "2 cells, as 0" in " ".join(done.out.split())
    assert package.read(tmp_path / "run").tables["cells"]["reason"].null_count() == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_specification_without_a_cell_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    done = rankscope("sweep", "empty.toml", cwd=tmp_path)
    assert done.code == 2 and "at least one cell" in done.err and not (tmp_path / "runs").exists()


def test_what_overflowed_is_no_rounding_noise(tmp_path: Path) -> None:
    sizes = {"model": "bert-tiny", "samples": 2, "tokens": 6, "depth": 2}
    spec = {"metrics": ["mu"], "arithmetic": "float32", "all": sizes, "grid": {"skip": [1.0, 1e200]}}
    swept = package.sweep(spec, tmp_path, workers=1)
    assert swept.table.filter(skip=1e200, layer=2)["value"].is_nan().all()
    (table,) = swept.overview().tables
    assert (
        not table.marked
        and "floor" not in table.note
        and "1 cell without a number, as after an overflow." in table.note
    )
    assert package.read(tmp_path).view().cells["noise"].to_list() == [False, False]


@pytest.mark.parametrize("count", [1, 10, 11, 40])
def test_of_many_cells_five_at_either_end_are_printed(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up sweep: the number of cell k is 2^-k at its last layer, and larger before, so that the last is least."""
    grid = {"skip": [float(k) for k in range(count)]}
    spec = spec_of({"metrics": ["mu"], "all": {"model": "bert-tiny", "depth": 1}, "grid": grid})
    logs = [(k, layer, 9 * (1 - layer) - k) for k in range(count) for layer in (0, 1)]
    rows = [
        {**spec.cells[k], "cell": k, "metric": "mu", "layer": layer, "value": 2.0**log, "log10": log * math.log10(2),
         "below_floor": False}
        for k, layer, log in logs
    ]  # fmt: skip
    told = begun("cpu").adding(asked=spec.options.asked, factors=list(spec.factors), varied=list(spec.varied))
    cells = pl.DataFrame([{**cell, "cell": k, "done": True, "reason": None} for k, cell in enumerate(spec.cells)])
    swept = Sweep(pl.DataFrame(rows), cells.with_columns(seconds=0.0), told, run=tmp_path)
    show_tables(*swept.overview().tables)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = [(line[0], int(line[1])) for line in printed if line and line[0] in ("least", "most")]
    ends = min(5, count // 2) or 1
    least, most = [*reversed(range(count))][:ends], [*range(ends)] if count > 1 else []
    assert numbers == [*(("least", k) for k in least), *(("most", k) for k in most)]
