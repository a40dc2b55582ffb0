"""What figures and pages show of a sweep: medians, ranges, and how much each factor matters."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rankscope import read
from rankscope.engine import Sweep, sweep
from rankscope.engine.views import SweepView, view_of
from rankscope.errors import FileError
from tests.cli.running import printed
from tests.raising import raises

SPEC: dict[str, Any] = {
    "metrics": ["relative_mu", "entropy"],
    "all": {"model": "bert-tiny", "samples": 2, "tokens": 6},
    "grid": {"skip": [0.0, 1.0], "depth": [1, 3], "seed": {"range": 3}},
    "list": [{"depth": 2, "variant": "none such"}],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(SPEC, tmp_path_factory.mktemp("runs") / "<study>", workers=1)


def drawn(values: list[float], **factors: list[Any]) -> SweepView:
    """A sweep of one layer with these numbers."""
    cells = pl.DataFrame(
        {
            "cell": range(len(values)),
            **factors,
            "value": values,
            "log10": np.log10(values),
            "noise": False,
            "seconds": 0.0,
        }
    )
    layers = cells.select("cell", pl.lit(0).alias("layer"), "value", "log10")
    return SweepView("mu", list(factors), cells, layers)


def test_a_curve_is_the_median_of_its_cells(study: Sweep) -> None:
    view = view_of(read(study.run))
    assert view.log and view.arranged == ("skip", "depth")
    means = (
        study.table.filter(metric="relative_mu", skip=0.0, depth=3)
        .group_by("seed", "layer")
        .agg(pl.col("log10").mean())
    )
    mine = means.group_by("layer").agg(pl.col("log10").median()).sort("layer")["log10"].to_list()
    curve = next(each for each in view.curves("skip", "depth") if (each.colour, each.panel) == (0, 1))
    assert curve.centre.tolist() == pytest.approx(mine) and curve.cells == 3
    assert (curve.low <= curve.centre).all() and (curve.centre <= curve.high).all()


def test_a_curve_ends_with_the_shallowest_of_its_cells(study: Sweep) -> None:
    assert {len(each.centre) for each in view_of(read(study.run)).curves("skip", "seed")} == {2}


def test_a_factor_that_decides_all_has_all_of_the_differences() -> None:
    values = [float(10**k) for k in (-300, -299, -9, -8, 1, 2)]
    view = drawn(values, first=[0, 0, 1, 1, 2, 2], second=[0, 1, 0, 1, 0, 1])
    assert list(view.effects) == ["first", "second"]
    # Places 1 to 6: squares about their mean sum to 17.5, within the pairs of `first` to 1.5.
    assert view.effects["first"] == pytest.approx(1 - (1.5 / 3) / (17.5 / 5)) and view.effects["second"] == 0


def test_noise_explains_nothing_however_many_levels_it_has() -> None:
    rng = np.random.default_rng(0)
    effects = [
        drawn((1 + rng.random(120)).tolist(), level=rng.integers(0, 40, 120).tolist()).effects["level"]
        for _ in range(40)
    ]
    assert np.mean(effects) < 0.06  # the plain share of variance would be 39 / 119


def test_many_numbers_are_gathered_and_words_are_not() -> None:
    view = drawn([1.0] * 30, draw=[k / 30 for k in range(30)], word=[f"w{k}" for k in range(30)])
    levels = view.levels("draw")
    assert len(levels.labels) == 5 and np.bincount(levels.of).tolist() == [6] * 5
    assert len(view.levels("word").labels) == 30


def test_a_factor_that_some_cells_lack_has_a_level_for_them() -> None:
    levels = drawn([1.0, 2.0, 3.0], skip=[None, 0.5, 1.0]).levels("skip")
    assert levels.labels == ["0.5", "1", "not given"] and levels.of.tolist() == [2, 0, 1]


def test_the_figure_and_the_report_are_written(study: Sweep, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        "metrics = ['mu']\n[all]\nmodel = 'bert-tiny'\nsamples = 1\ntokens = 4\n[grid]\nskip = [0.0, 1.0]\n"
    )
    said = printed("sweep", "study.toml", "--workers", "1", cwd=tmp_path)
    assert "2 cells, the least first" in said and "report.html" in said
    assert (tmp_path / "runs" / "study" / "figure.svg").stat().st_size > 1000
    page = (tmp_path / "runs" / "study" / "report.html").read_text()
    assert "study: a sweep of 2 cells" in page and 'class="sortable"' in page


def test_the_page_has_cells_failures_and_escapes_names(study: Sweep, tmp_path: Path) -> None:
    from rankscope.report import write_report

    page = write_report([study.run], tmp_path / "report.html").read_text()
    assert "&lt;study&gt;: a sweep of 13 cells" in page and "<study>" not in page
    assert "1 cell of 13 failed" in page and "none such" in page
    found = re.search(r'id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    figures = json.loads(found[1])
    assert {key.partition("figure-")[2] for key in figures} == {"sweep", "factors"}
    assert page.count("data-key=") == 12 * 7  # cell, three factors, two metrics, seconds


def test_a_metric_that_was_not_asked_for_is_a_sentence(study: Sweep) -> None:
    with raises(FileError, subject="metric"):
        study.plot("relative_m")
