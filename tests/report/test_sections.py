"""The sections of a page: one for each table of each run, with names that this version does not know."""

from pathlib import Path

import polars as pl
import pytest

from rankscope.profiles import Profile
from rankscope.report import write_report
from rankscope.theory import Certificates, certify
from tests.report.runs import NET, X, links_within, parsed


@pytest.mark.slow
def test_a_section_for_each_table_and_a_chapter_for_each_run(
    everything: Path, written: tuple[Profile, Path], tmp_path: Path
) -> None:
    html = write_report([everything, written[1].parent], tmp_path / "both.html").read_text()
    assert html.count("<article") == 2
    assert 'id="run1-cloud"' in html and 'id="run2-residual"' in html and 'id="run2-cloud"' not in html
    links_within(html)
    assert len(parsed(html).found) == 4  # the scripts stand in it once, whatever the number of runs


@pytest.mark.slow
def test_names_of_ones_own_are_shown(written: tuple[Profile, Path], tmp_path: Path) -> None:
    """A metric and a theorem that this version does not know."""
    own = written[0].table.with_columns(pl.col("metric").replace({"mu": "my_metric"}))
    found = certify(NET, X[:1], theorems="dobrushin")
    bound = found.table.with_columns(pl.lit("my_theorem").alias("theorem"), pl.lit("size").alias("quantity"))
    Certificates(bound, found.manifest).save(tmp_path / "certificates.parquet")
    Profile(own, written[0].manifest).save(tmp_path / "profile.parquet")
    html = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "my_metric" in html and "my_theorem" in html and "run1-figure-bounds-0" in html
