"""How soon a report is on the screen: the demo's, in Chromium, against a page of plotly with one figure."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.timing import Row
from rankscope.figures.page import plotly_script

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
PLAIN = """<!doctype html><meta charset="utf-8"><div id="figure"></div><script>{}</script>
<script>Plotly.newPlot("figure", [{{y: [1, 2, 3]}}])
  .then(() => document.documentElement.dataset.drawn = "")</script>"""


def chromium() -> str | None:
    """Where it is, if it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio): from the start of navigation to the figures about the first
    screen, the best of five."""
    found = chromium()
    if found is None:
        print("  no Chromium here: apt-get install chromium")
        return []
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        run = "measure bert-tiny --max-length 8 --metrics relative_residual" if small else "demo"
        command = [sys.executable, "-m", "rankscope", *run.split(), "-q", "-o", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report, plain = folder / "report.html", folder / "plain.html"
        plain.write_text(PLAIN.format(plotly_script()), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=found, args=list(SWITCHES))
        rounds = range(1 if small else 5)
        seconds = {page: [_opened(browser, page) for _ in rounds] for page in (report, plain)}
        browser.close()
        best, worst, bare = min(seconds[report]), max(seconds[report]), min(seconds[plain])
        what = f"report, {report.stat().st_size / 1e6:.1f} MB, {best:.2f} s (slowest {worst:.2f})"
        return [(what, f"plotly and one figure, {bare:.2f} s", best / bare)]


def _opened(browser: "Browser", path: Path) -> float:
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_selector("html[data-drawn]", state="attached")
    seconds = float(page.evaluate("performance.now()")) / 1000
    page.close()
    return seconds
