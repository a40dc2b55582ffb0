"""The report in a real browser: it draws, asks for nothing, and runs nothing that it was told."""

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from rankscope import Architecture, Profile, Transformer, measure
from rankscope.report import write_run_directory
from tests.browser.waiting import Watched, until
from tests.report.runs import whole_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<script>alert(1)</script></script><img src=x onerror=alert(2)><b>bold</b><a href='javascript:1'>"


LONG = f"{HOSTILE}{'L' * 400}"
"""A name that no line is wide enough for."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("run"), LONG, LONG)


class Opened(Watched):
    """A report, drawn."""

    def __init__(self, browser: "Browser", path: Path, **context: Any) -> None:
        super().__init__(browser, **context)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def come_to(self, figure: str) -> None:
        """Scroll to a figure, and wait until it is drawn."""
        self.page.evaluate(f"document.getElementById('{figure}').scrollIntoView({{behavior: 'instant'}})")
        self.page.wait_for_selector(f"#{figure} [role=img]")

    def print(self) -> None:
        """As a browser does before it prints, which draws all that is not yet drawn."""
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        self.page.wait_for_selector("html[data-drawn=all]", state="attached")


@pytest.fixture(scope="module")
def shared(browser: "Browser", report: Path) -> Iterator[Opened]:
    """The report as a person has it open: tests leave it so that others find what they need."""
    with Opened(browser, report) as found:
        yield found


@pytest.fixture
def opened(shared: Opened, report: Path) -> Iterator[Opened]:
    """The shared page, in front; after each test nothing may have gone wrong or out."""
    shared.page.bring_to_front()  # a page behind another one is not told that the colour scheme has changed
    yield shared
    checked(shared, report)


@contextmanager
def opening(browser: "Browser", report: Path, **context: Any) -> Iterator[Opened]:
    """The report in a page of the test's own."""
    with Opened(browser, report, **context) as found:
        yield found
    checked(found, report)


def checked(found: Opened, report: Path) -> None:
    assert found.faults == []
    assert found.requests == [report.as_uri()]


PLACE = "document.querySelector('#run1-figure-cloud .points path').getAttribute('transform')"
"""Where the cloud's first token is drawn."""

INK = "getComputedStyle(document.querySelector('#run1-figure-curves .xtick text')).fill"


def brightness(colour: str) -> str:
    """Of a colour that a page tells, from 0 to 1."""
    return f"{colour}.match(/[\\d.]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 765"


@pytest.mark.slow
def test_figures_are_drawn_as_they_come_near_and_the_page_stays_in_place(browser: "Browser", report: Path) -> None:
    with opening(browser, report) as found:
        page = found.page
        far = page.evaluate("""[...document.querySelectorAll('.plot')]
            .filter(each => each.getBoundingClientRect().top > 2 * innerHeight)
            .map(each => each.querySelectorAll('.main-svg').length)""")
        assert len(far) > 2 and set(far) == {0}
        assert page.get_attribute("html", "data-drawn") == "near"
        assert page.locator("#run1-figure-curves .main-svg").count() >= 1
        before = page.evaluate("document.documentElement.scrollHeight")
        plots = page.locator(".plot").all()
        assert len(plots) >= 7
        for plot in plots:
            found.come_to(str(plot.get_attribute("id")))
            label = plot.locator("[role=img]").first.get_attribute("aria-label")
            assert label and len(label) > 10
        page.wait_for_selector("html[data-drawn=all]", state="attached")
        assert abs(page.evaluate("document.documentElement.scrollHeight") - before) <= 2


def test_what_a_model_says_stays_text(opened: Opened) -> None:
    page = opened.page
    assert HOSTILE in page.inner_text("h1")
    assert page.locator("main img, main script, main a:not([href^='#'])").count() == 0
    legend = page.locator("#run1-figure-curves .legendtext")
    assert any((name.text_content() or "").startswith(HOSTILE) for name in legend.all())
    opened.come_to("run1-figure-cloud")
    page.evaluate(
        """() => Plotly.Fx.hover(document.getElementById('run1-figure-cloud'),
                                 [{curveNumber: 0, pointNumber: 0}])"""
    )
    hover = page.locator("#run1-figure-cloud .hovertext")
    hover.first.wait_for()
    assert HOSTILE in (hover.first.text_content() or "")
    assert page.locator("svg a").count() == 0


def test_the_choice_of_axis_changes_the_figure(opened: Opened) -> None:
    page = opened.page
    before = page.evaluate("String(document.getElementById('run1-figure-curves').layout.yaxis.range)")
    choice = page.locator(".rs-controls:has(+ #run1-figure-curves) input")
    assert choice.count() == 2
    choice.first.focus()
    page.keyboard.press("ArrowRight")
    until(page, f"String(document.getElementById('run1-figure-curves').layout.yaxis.range) !== '{before}'")
    assert choice.nth(1).is_checked()
    page.keyboard.press("ArrowLeft")
    until(page, f"String(document.getElementById('run1-figure-curves').layout.yaxis.range) === '{before}'")


def test_the_cloud_moves(opened: Opened) -> None:
    page = opened.page
    controls = page.locator(".rs-controls:has(+ #run1-figure-cloud)")
    slider = controls.locator("input[type=range]")
    opened.come_to("run1-figure-cloud")
    slider.focus()
    last = page.evaluate(PLACE)
    assert controls.locator("output").inner_text() == "layer 5"
    page.keyboard.press("Home")
    until(page, f"{PLACE} !== {last!r}")
    assert controls.locator("output").inner_text() == "layer 0"
    controls.locator("button").focus()
    page.keyboard.press("Enter")
    assert "pause" in controls.locator("button").inner_text()
    shown = "document.querySelector('.rs-controls:has(+ #run1-figure-cloud) output').textContent"
    until(page, f"{shown} !== 'layer 0'")


@pytest.mark.slow
def test_keys_reach_every_control(opened: Opened) -> None:
    page = opened.page
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("(a => a.className && a.className.baseVal === undefined"
                          " ? a.tagName + '.' + a.className : a.tagName)(document.activeElement)")
        )  # fmt: skip
    assert "A.skip" in seen and any(each.startswith("INPUT") for each in seen)
    assert any("modebar-btn" in each for each in seen)


def test_figures_are_saved(opened: Opened) -> None:
    page = opened.page
    saved = {}
    for kind in ("CSV", "SVG", "PNG"):
        with page.expect_download() as waiting:
            page.locator(f"#run1-figure-curves .modebar-btn[data-title*={kind}]").focus()
            page.keyboard.press("Enter")
        saved[kind] = waiting.value.path().read_bytes()
        assert waiting.value.suggested_filename == f"run1-figure-curves.{kind.lower()}"
    assert saved["PNG"].startswith(b"\x89PNG")
    drawing = saved["SVG"].decode()
    assert drawing.startswith("<svg") and "alert(1)" in drawing and "<script" not in drawing
    rows = list(csv.DictReader(io.StringIO(saved["CSV"].decode())))
    assert {row["variant"] for row in rows} >= {"san", "transformer", LONG}
    assert {int(row["layer"]) for row in rows} == set(range(6))
    last = next(row for row in rows if row["variant"] == "san" and row["layer"] == "5")
    assert float(last["log10"]) < -40


@pytest.mark.slow
def test_the_page_follows_the_theme(opened: Opened) -> None:
    page = opened.page
    for scheme, light in (("dark", False), ("light", True)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        until(page, f"{brightness(INK)} {'< 0.3' if light else '> 0.6'}")
        ground = page.evaluate(brightness("getComputedStyle(document.body).backgroundColor"))
        assert (ground > 0.9) == light
    for theme, light in (("dark", False), ("light", True)):  # of a change that nobody tells it of
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        until(page, f"{brightness(INK)} {'< 0.3' if light else '> 0.6'}")
    page.evaluate("delete document.documentElement.dataset.theme")


ANIMATIONS = """() => { let n = 0; const was = Plotly.animate;
    Plotly.animate = (...a) => { n += 1; return was(...a); };
    const s = document.querySelector('.rs-player input');
    s.value = 1;
    s.dispatchEvent(new Event('input'));
    return n; }"""
"""How many there are when a cloud is scrubbed."""


@pytest.mark.slow
def test_a_phone_shows_it_without_scrolling_aside_nor_motion(browser: "Browser", report: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with opening(browser, report, **phone, reduced_motion="reduce") as found:
        page = found.page
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for figure in ("cloud", "heads", "bounds-0"):
            found.come_to(f"run1-figure-{figure}")
        assert page.evaluate(ANIMATIONS) == 0
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        widths = page.evaluate("[...document.querySelectorAll('.main-svg')].map(e => e.getBoundingClientRect().right)")
        assert max(widths) <= 390


@pytest.mark.slow
def test_it_prints_with_all_details_open_and_in_light_colours(browser: "Browser", report: Path) -> None:
    with opening(browser, report, color_scheme="dark") as found:
        page = found.page
        assert page.locator("#run1-figure-bounds-0 .main-svg").count() == 0
        found.print()
        until(page, "document.querySelector('#run1-figure-bounds-0').layout.font.color === '#1c1e21'")
        until(page, "document.querySelectorAll('details:not([open])').length === 0")
        until(page, "document.querySelector('#run1-figure-curves').layout.font.color === '#1c1e21'")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        until(page, "document.querySelectorAll('details:not([open])').length > 0")
        assert page.pdf().startswith(b"%PDF")


@pytest.fixture(scope="module")
def of_many_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of twelve steps of a training, of a network of 24 layers."""
    net = Transformer.random(Architecture(layers=24, width=8, heads=2))
    X = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = [measure(net, X, metrics="relative_mu", variant=f"step {1000 * k:,}", check=False) for k in range(12)]
    return write_run_directory(Profile.join(steps), tmp_path_factory.mktemp("steps"), "a training")


@pytest.mark.slow
def test_many_steps_have_a_scale_and_a_wide_table_shows_that_it_goes_on(
    browser: "Browser", of_many_steps: Path
) -> None:
    with Opened(browser, of_many_steps, viewport={"width": 1300, "height": 800}) as found:
        page = found.page
        figure, table = page.locator("#run1-figure-curves"), page.locator(".wide").first
        for width in (1300, 360):
            page.set_viewport_size({"width": width, "height": 800})
            until(page, f"document.querySelector('#run1-figure-curves .main-svg').clientWidth <= {width}")
            assert figure.locator(".cbtitle").text_content() == "step"
            assert figure.locator(".legend").count() == 0
            axes, scale = (figure.locator(name).bounding_box() for name in (".xy .gridlayer", ".colorbar"))
            assert axes is not None and scale is not None
            assert axes["x"] + axes["width"] <= scale["x"] and axes["width"] > 100
        assert table.evaluate("e => e.scrollWidth > 2 * e.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        table.scroll_into_view_if_needed()

        def edge() -> float:
            """How bright the table is at its right edge."""
            box = table.bounding_box()
            assert box is not None
            clip = {"x": box["x"] + box["width"] - 5, "y": box["y"] + 40, "width": 2, "height": 60}
            return float(np.asarray(Image.open(io.BytesIO(page.screenshot(clip=clip)))).mean())  # type: ignore[arg-type]

        first, before = table.locator("td").first, edge()
        at = first.bounding_box()
        table.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
        assert first.bounding_box() == at and first.inner_text() == "step 0"
        assert edge() > before + 20


@pytest.mark.slow
def test_a_figure_that_cannot_be_printed_takes_no_other_with_it(browser: "Browser", report: Path) -> None:
    with Opened(browser, report) as found:
        found.page.evaluate("""() => { const was = Plotly.react; Plotly.react = (element, ...rest) => {
            if (element.id === 'run1-figure-curves') throw new Error('on purpose');
            return was(element, ...rest); }; }""")
        found.print()
        found.page.wait_for_selector("#run1-figure-bounds-0 [role=img]")
