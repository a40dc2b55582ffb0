"""The report of a sweep in a real browser: its figures are drawn, and its table sorts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope import sweep
from rankscope.report import write_report
from tests.browser.waiting import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec: dict[str, Any] = {
        "metrics": "relative_mu",
        "all": {"model": "bert-tiny", "samples": 1, "tokens": 6},
        "grid": {"skip": [0.0, 1.0], "init": ["xavier", "bert"], "depth": [1, 6]},
    }
    run = tmp_path_factory.mktemp("run")
    sweep(spec, run, workers=1)
    return write_report([run], run / "report.html")


@pytest.mark.slow
def test_it_is_drawn_and_its_table_sorts(browser: "Browser", report: Path) -> None:
    with Watched(browser) as found:
        page = found.page
        page.goto(report.as_uri())
        for figure in ("sweep", "factors"):
            page.evaluate(f"document.getElementById('run1-figure-{figure}').scrollIntoView()")
            page.wait_for_selector(f"#run1-figure-{figure} [role=img]")

        def column(number: int) -> list[str]:
            cells = page.locator(f"table.sortable tbody td:nth-child({number})")
            return [each.get_attribute("data-key") or "" for each in cells.all()]

        def click(name: str) -> None:
            page.locator("table.sortable thead button", has_text=name).click()

        before = column(5)
        click("relative_mu")
        assert column(5) == sorted(before, key=float) != before
        assert page.locator("th[aria-sort=ascending]").inner_text().startswith("relative_mu")
        click("relative_mu")
        assert column(5) == sorted(before, key=float, reverse=True)
        click("init")
        assert column(3) == ["bert"] * 4 + ["xavier"] * 4
    assert found.faults == [] and found.requests == [report.as_uri()]
