"""Every kind of result, networks and a monitor, in a real kernel and then in a browser that trusts nobody."""

from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from tests.browser.waiting import Watched
from tests.results.test_every_kind import MADE, UNDRAWN

if TYPE_CHECKING:
    from playwright.sync_api import Browser


SHOWN = """
import tempfile
from pathlib import Path
from tests.results.test_every_kind import MADE, net
"""
LIVE = """
import torch
from rankscope import Monitor
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
monitor = Monitor(stack, "relative_mu", every=2, probe=torch.randn(2, 5, 8), run=tempfile.mkdtemp())
for _ in range(4):
    monitor.step(loss=1.0)
monitor
"""


@pytest.mark.slow
def test_every_kind_of_result_shows_itself_in_a_kernel_and_in_a_browser(
    browser: "Browser", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And networks and a monitor: each as the last line of a cell, looked at with scripts and addresses forbidden."""
    last = [f"MADE[{kind!r}](Path(tempfile.mkdtemp()))" for kind in MADE]
    cells = [SHOWN, *last, "net()", "net().arch", LIVE]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    where = {"metadata": {"path": Path(__file__).parents[2]}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [cell.outputs[-1] for cell in book.cells[1:]]
    assert all({"text/html", "text/plain"} <= set(output.data) for output in outputs)
    assert all(output.data["text/plain"].count("\n") < 12 for output in outputs)
    cards = [output.data["text/html"] for output in outputs]
    page = tmp_path / "cards.html"
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    page.write_text(f"<!doctype html>{head}<body>{''.join(cards)}")
    with Watched(browser, viewport={"width": 1000, "height": 900}) as found:
        found.page.goto(page.as_uri())
        assert found.page.evaluate("document.body.children.length") == len(cards)
        drawn = found.page.evaluate("[...document.images].map(i => i.naturalWidth)")
        assert len(drawn) >= len(MADE) - len(UNDRAWN) + 1 and all(width > 200 for width in drawn)
        assert found.page.evaluate("document.documentElement.scrollWidth") <= 1000
        found.page.screenshot(path=tmp_path / "cards.png", full_page=True)
    assert found.faults == [] and found.requests == [page.as_uri()]
