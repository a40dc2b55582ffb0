"""Every figure of the 2024 paper is written, and a rerun gives it again."""

from pathlib import Path

import pytest

from rankscope_studies import Setup, chosen, reproduce
from study_tests.wu2024.small import small_run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "figure",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fig2", "fig3", "fig6")), "fig4", "fig8", "fig9"],
)
def test_each_figure_is_written_and_a_rerun_gives_the_same(tmp_path: Path, figure: str) -> None:
    (study,), run = chosen("wu2024", figure), small_run(figure)
    first = reproduce(study, Setup(tmp_path), run)
    home = tmp_path / "quick" / "wu2024" / figure
    assert first.figures and first.comparisons and first.notes
    for name in first.figures:
        assert (home / f"{name}.png").stat().st_size > 5000 and (home / f"{name}.svg").exists()
    parts = sorted((home / "parts").iterdir())
    before = [path.stat().st_mtime_ns for path in parts]
    second, third = run(Setup(home)), run(Setup(tmp_path / "elsewhere"))
    assert [path.stat().st_mtime_ns for path in sorted((home / "parts").iterdir())] == before
    for name, table in first.tables.items():
        assert table.equals(second.tables[name])
        assert table.equals(third.tables[name])
