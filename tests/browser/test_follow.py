"""The page of a training run in a real browser: what is drawn, and that it keeps up."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope_explorer.follow import app
from rankscope_explorer.jobs import Jobs
from rankscope_explorer.server import bind_port, make_server
from tests.browser.waiting import Watched, until
from tests.made_trainings import ALARM, SENTENCE, learned, measurement, opened, spiking, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    at = bind_port(0)
    server = make_server(app(folders, at.getsockname()[1]), Jobs())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{at.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        at.close()


def test_it_shows_the_run_and_keeps_up(browser: "Browser", tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in (0, 10, 20):
        run_writer.write(measurement(step, more=learned(step)))
    with Watched(browser) as watched:
        page = watched.page
        with served(tmp_path) as url:
            page.goto(url)
            until(page, "document.body.dataset.measurements === '3'")
            for chart in ("map", "curves", "run", "gradients", "paths"):
                assert page.locator(f"#{chart} .main-svg").count() > 0, chart
            assert page.locator("#map .heatmaplayer image").count() == 1
            assert page.inner_text("#none") == "None so far."
            assert page.inner_text("#curves-title") == "Over the steps, a line for each layer"

            run_writer.write(measurement(30, alarms=[ALARM], more=learned(30)))
            until(page, "document.body.dataset.measurements === '4'")
            assert page.evaluate("document.getElementById('map').data[0].x") == [0, 10, 20, 30]
            assert SENTENCE in page.inner_text("#alarms")  # its tags are text
            assert "step 30 · 4 measurements" in page.inner_text("#about")
            assert page.title().startswith("(1) SmallGPT")
            assert page.locator("#map .annotation").count() == 1

            page.focus("#metric")
            page.keyboard.press("End")
            until(page, "document.body.dataset.metric === 'grad_mlp'")
            assert page.evaluate("document.getElementById('map').data[0].y") == [1, 2, 3]
            assert page.get_by_label("What is shown").input_value() == "grad_mlp"
            assert all(each.get_attribute("aria-label") for each in page.locator(".chart [role=img]").all())
            for width in (1300, 400):
                page.set_viewport_size({"width": width, "height": 900})
                until(page, "document.documentElement.scrollWidth <= innerWidth")
            assert watched.faults == [] and all(each.startswith(url) for each in watched.requests)
        until(page, "document.getElementById('error').textContent.includes('still running')")
    run_writer.close()


@pytest.mark.slow
def test_an_alarm_of_another_run_is_told_first_and_leads_to_it(browser: "Browser", tmp_path: Path) -> None:
    folders = [written(tmp_path / "good", [0, 10]), written(tmp_path / "bad")]
    with Watched(browser) as watched, served(*folders) as url:
        page = watched.page
        page.goto(url)
        until(page, "document.body.dataset.measurements === '2'")
        assert page.inner_text("#none") == "None so far in good." and page.title().startswith("(1) ")
        assert f"bad 1 alarm at step 30: {SENTENCE}" in " ".join(page.inner_text("#elsewhere").split())
        page.get_by_role("button", name="bad").click()
        until(page, "document.body.dataset.measurements === '6'")
        assert page.inner_text("#alarms-title") == "1 alarm of bad" and page.input_value("#run-choice") == "1"
        assert not page.is_visible("#none") and page.inner_text("#elsewhere") == ""
        assert watched.faults == []


@pytest.mark.slow
def test_a_loss_spike_has_a_card_with_what_came_before(browser: "Browser", tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(0, 2400, 10):
        run_writer.write(spiking(step, 2400))
    with Watched(browser) as watched, served(tmp_path) as url:
        page = watched.page
        page.goto(url)
        until(page, "document.body.dataset.measurements === '240'")
        assert not page.is_visible("#spikes-card")
        run_writer.write(spiking(2400, 2400))
        until(page, "!document.getElementById('spikes-card').hidden")
        assert page.inner_text("#spikes-title") == "1 loss spike"
        rows = [row.locator("td").all_inner_texts()[:4] for row in page.locator("#spikes tbody tr").all()]
        assert rows == [
            ["300 steps", "largest logit", "layers 2–3", "rose"], ["100 steps", "gradient: MLP", "layer 1", "fell"],
        ]  # fmt: skip
        for width in (1300, 400):
            page.set_viewport_size({"width": width, "height": 900})
            until(page, "document.documentElement.scrollWidth <= innerWidth")
        assert watched.faults == []
    run_writer.close()


@pytest.mark.slow
def test_several_runs_are_chosen_by_the_part_of_their_path_that_differs(browser: "Browser", tmp_path: Path) -> None:
    folders = [written(tmp_path / "runs" / name, steps) for name, steps in (("a/1", (0, 10)), ("b/1", (0, 10, 20, 30)))]
    with Watched(browser) as watched, served(*folders) as url:
        page = watched.page
        page.goto(url)
        until(page, "document.body.dataset.measurements === '2'")
        assert page.locator("#run-choice option").all_inner_texts() == ["a/1", "b/1"]
        page.select_option("#run-choice", label="b/1")
        until(page, "document.body.dataset.measurements === '4'")
        assert page.get_attribute("#run-choice", "title") == str(folders[1])
        assert page.inner_text("#alarms").startswith("step 30")
        assert watched.faults == []


@pytest.mark.slow
def test_a_deep_network_says_how_many_of_its_layers_have_a_line(browser: "Browser", tmp_path: Path) -> None:
    folder = written(tmp_path, steps=(0, 10), layers=23)
    with Watched(browser) as watched, served(folder) as url:
        watched.page.goto(url)
        until(watched.page, "document.body.dataset.measurements === '2'")
        lines = watched.page.evaluate("document.getElementById('curves').data.length")
        assert watched.page.inner_text("#curves-title") == f"Over the steps, {lines} of the 24 layers"
