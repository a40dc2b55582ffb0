"""Figures of a sweep, alone and in the report."""

import json
import re
from pathlib import Path

import pytest

from rankscope.engine import Sweep
from rankscope.errors import FileError
from rankscope.report import write_report
from tests.cli.running import printed
from tests.raising import raises


@pytest.mark.slow
def test_the_figure_and_the_report_are_written(views_study: Sweep, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        "metrics = ['mu']\n[all]\nmodel = 'bert-tiny'\nsamples = 1\ntokens = 4\n[grid]\nskip = [0.0, 1.0]\n"
    )
    said = printed("sweep", "study.toml", "--workers", "1", cwd=tmp_path)
    assert "Least and most mu" in said and "report.html" in said
    assert said.count("\n least ") == said.count("\n most ") == 1
    assert (tmp_path / "runs" / "study" / "figure.svg").stat().st_size > 1000
    page = (tmp_path / "runs" / "study" / "report.html").read_text()
    assert "study: a sweep of 2 cells" in page and 'class="sortable"' in page


@pytest.mark.slow
def test_the_page_has_cells_failures_and_escapes_names(views_study: Sweep, tmp_path: Path) -> None:
    page = write_report([views_study.run], tmp_path / "report.html").read_text()
    assert "&lt;study&gt;: a sweep of 13 cells" in page and "<study>" not in page
    assert "1 cell of 13 failed" in page and "none such" in page
    found = re.search(r'id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    figures = json.loads(found[1])
    assert {key.partition("figure-")[2] for key in figures} == {"sweep", "factors"}
    assert page.count("data-key=") == 12 * 7  # cell, three factors, two metrics, seconds


def test_a_metric_that_was_not_asked_for_is_a_sentence(views_study: Sweep) -> None:
    with raises(FileError, subject="metric"):
        views_study.plot("relative_m")
