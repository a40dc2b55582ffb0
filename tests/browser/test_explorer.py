"""The explorer in a real browser: what a person turns, sees, pins, links and reaches by keyboard."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from explorer_tests.serving import Served, serving, small_networks
from tests.browser.waiting import Watched, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

WINDOW: "ViewportSize" = {"width": 1366, "height": 768}
HOSTILE = "<script>alert(1)</script> <b>bold</b> <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def explorer() -> Iterator[Served]:
    with serving(small_networks()) as served:
        yield served


@pytest.fixture(scope="module")
def watched(browser: "Browser") -> Iterator[Watched]:
    """One browser window for all tests, so that scripts are compiled once."""
    with Watched(browser, viewport=WINDOW, reduced_motion="reduce") as found:
        yield found


@pytest.fixture
def page(watched: Watched, explorer: Served) -> "Iterator[Page]":
    """An empty page; when the test ends it must have complained of nothing and asked nobody else."""
    watched.page.goto("about:blank")
    watched.page.set_viewport_size(WINDOW)
    watched.faults.clear()
    watched.requests.clear()
    yield watched.page
    asked = [url for url in watched.requests if url != "about:blank"]
    assert [url for url in asked if not url.startswith(explorer.url)] == []
    assert [fault for fault in watched.faults if "422" not in fault] == []  # browsers log a refused answer


def opened(page: "Page", explorer: Served, fragment: str = "", whole: bool = False) -> "Page":
    """The page with its curve drawn, or with its `whole` answer."""
    page.goto(f"{explorer.url}/{fragment}")
    page.wait_for_selector(f"body[data-{'answered' if whole else 'shown'}]")
    return page


def turned(page: "Page", act: Any, whole: bool = False) -> str:
    """Do something and wait for its curve, or its whole answer; the verdict and what the page knows."""
    before = page.evaluate("Number(document.body.dataset.asked)")
    act()
    until(page, f"Number(document.body.dataset.asked) > {before}")
    until(page, f"document.body.dataset.{'answered' if whole else 'shown'} === document.body.dataset.asked")
    return page.inner_text("#verdict") + page.inner_text("#about")


def slide(page: "Page", control: str, value: float) -> None:
    page.eval_on_selector(
        f"#{control}", "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", str(value)
    )


def test_the_first_look(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    assert page.inner_text("#verdict").startswith("Tokens")
    for chart in ("curve", "cloud", "paths", "bounds"):
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "3 layers" in page.inner_text("#about")


@pytest.mark.slow
def test_every_control_changes_what_it_should(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    assert "skip 0 " in turned(page, lambda: slide(page, "skip", 0))
    curve = "document.getElementById('curve').data.at(-1).y"
    for act in (lambda: page.uncheck("#mlp"), lambda: page.uncheck("#norm")):
        before = page.evaluate(curve)
        turned(page, act)
        assert page.evaluate(curve) != before
    assert "mask causal " in turned(page, lambda: page.select_option("#mask", "causal"))
    assert "mask causal&window:2 " in turned(page, lambda: slide(page, "window", 2))
    divisor = re.search(r"scores / ([\d.]+)", turned(page, lambda: slide(page, "temperature", 1)))
    assert divisor and float(divisor[1]) == pytest.approx(10 * 8**0.5, rel=0.01)
    assert "scores / 20 " in turned(page, lambda: page.fill("#divisor", "2"))
    assert "7 layers" in turned(page, lambda: slide(page, "layers", 7))
    assert "4 tokens" in turned(page, lambda: slide(page, "tokens", 4))
    said = turned(page, lambda: page.select_option("#model", "random"))
    assert "width 64" in said and page.is_visible("#shape")
    assert "width 32" in turned(page, lambda: page.fill("#shape-width", "32"))
    assert "2 tokens" in turned(page, lambda: page.fill("#text", "two words"))
    assert "own" in page.inner_text("output[for=skip]") or page.inner_text("output[for=skip]") == "0"
    turned(page, lambda: page.click("text=Transformer"))
    assert page.get_attribute("#presets button:first-child", "aria-pressed") == "true"
    assert page.is_checked("#mlp") and page.is_checked("#norm")


@pytest.mark.slow  # forecasts beside a browser take half a minute
def test_the_forecast_comes_after_everything_else_and_goes_with_its_setting(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    until(page, "document.body.dataset.forecast === 'shown'")
    sentences = page.inner_text("#forecast-sentences")
    assert sentences.startswith("3 layers, 300 steps") and page.is_visible("#forecast-mend")
    probability = float(page.inner_text("#forecast-numbers dd >> nth=0"))
    assert 0 <= probability <= 1 and f"probability {probability:.2f}" in sentences
    assert f"({probability:.2f})" in page.inner_text("#forecast-line")
    before = page.evaluate("performance.getEntriesByName(location.origin + '/api/forecast').length")
    turned(page, lambda: page.fill("#text", "another text"), whole=True)  # which is of no concern to a forecast
    assert page.inner_text("#forecast-sentences") == sentences
    turned(page, lambda: slide(page, "layers", 5))
    assert page.inner_text("#forecast-line") == "" and page.is_hidden("#forecast-mend")
    until(page, "document.body.dataset.forecast === 'shown'")
    assert page.inner_text("#forecast-sentences").startswith("5 layers, 300 steps")
    assert "repeat those, with the same weights" in page.inner_text("#forecast-sentences")
    after = page.evaluate("performance.getEntriesByName(location.origin + '/api/forecast').length")
    assert after == before + 1


@pytest.mark.slow
def test_a_large_network_is_forecast_on_demand_alone(page: "Page", explorer: Served) -> None:
    opened(page, explorer, "#model=random&shape.layers=2&shape.width=480&shape.heads=8&tokens=4", whole=True)
    until(page, "document.body.dataset.forecast === 'shown'")
    assert page.is_hidden("#forecast-ask") and page.is_visible("#forecast")
    turned(page, lambda: slide(page, "layers", 6), whole=True)
    until(page, "document.body.dataset.forecast === 'shown'")
    assert "6 layers of width 480 takes half a minute" in page.inner_text("#forecast-note")
    assert page.is_visible("#forecast-ask") and page.is_hidden("#forecast")
    page.click("#forecast-ask")
    until(page, "document.getElementById('forecast-note').textContent === 'Forecasting …'")
    turned(page, lambda: slide(page, "layers", 2))  # nobody waits for it any more
    until(page, "document.body.dataset.forecast === 'shown'")
    assert page.inner_text("#forecast-sentences").startswith("2 layers")


@pytest.mark.slow
def test_pure_attention_falls_and_the_cloud_can_be_scrubbed(page: "Page", explorer: Served) -> None:
    opened(page, explorer, "#model=random")
    said = turned(page, lambda: page.click("text=Pure attention"))
    assert "Tokens become the same: uniform to" in said
    spread = "Math.max(...document.getElementById('cloud').data[0].x.map(Math.abs))"
    until(page, f"{spread} < 1e-9")
    page.eval_on_selector(
        ".rs-player input", "e => { e.value = 0; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    until(page, f"{spread} > 0.1")
    assert page.inner_text(".rs-player output") == "layer 0"
    page.check("input[name=cloud][value=magnified]", force=True)
    page.check("input[name=curve][value=linear]", force=True)
    assert page.evaluate("document.getElementById('curve').data.at(-1).y.at(-1)") < 1e-12


@pytest.mark.slow
def test_a_link_restores_the_setting_and_the_pins(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    turned(page, lambda: slide(page, "skip", 0.25))
    turned(page, lambda: page.click("#pinA"))
    turned(page, lambda: page.click("text=Causal"))
    turned(page, lambda: page.click("#pinB"))
    turned(page, lambda: page.fill("#text", "a & b = c # d"))
    turned(page, lambda: page.check("input[name=focus][value=A]", force=True))
    link, said = page.url, page.inner_text("#verdict") + page.inner_text("#pins")
    page.goto("about:blank")
    opened(page, explorer, link.removeprefix(f"{explorer.url}/"))
    assert page.inner_text("#verdict") + page.inner_text("#pins") == said
    assert page.input_value("#text") == "a & b = c # d" and page.input_value("#mask") == "causal"
    assert page.is_checked("input[name=focus][value=A]") and page.url == link
    assert page.locator("#pins li").count() == 2
    until(page, "document.getElementById('cloud').data.length === 3")
    turned(page, lambda: page.click("#pinA"))
    assert page.locator("#pins li").count() == 1


@pytest.mark.slow
def test_remedies_go_on_with_their_numbers_and_come_off_again(page: "Page", explorer: Served) -> None:
    curve = "document.getElementById('curve').data.at(-1).y"
    opened(page, explorer, "#model=random&skip=0&mlp=false&norm=false")
    bare = page.evaluate(curve)
    turned(page, lambda: page.select_option("#remedies", "attnscale"))
    assert page.evaluate(curve) == bare  # as published it starts at nothing
    assert "C + (1 + w) (P - C)" in page.inner_text("#remedied") and page.input_value("#remedied input") == "0"
    said = turned(page, lambda: page.fill("#remedied input", "0.5"))
    assert page.evaluate(curve) != bare and "with attnscale:w=0.5 " in said
    said = turned(page, lambda: page.select_option("#remedies", "neutreno"), whole=True)
    assert "with attnscale:w=0.5, then neutreno " in said
    assert "neutreno" in page.inner_text("#paths-said")  # which paths refuse
    turned(page, lambda: page.click("#pinA"))
    link = page.url
    turned(page, lambda: page.click("#remedied button >> nth=1"))
    said = turned(page, lambda: page.click("#remedied button"))
    assert bare in page.evaluate("document.getElementById('curve').data.map(each => each.y)")
    assert "with " not in said and page.is_hidden("#remedied")
    page.goto("about:blank")
    opened(page, explorer, link.removeprefix(f"{explorer.url}/"))
    assert [each.input_value() for each in page.locator("#remedied input").all()] == ["0.5", "0.6"]
    assert page.url == link and page.locator("#pins li").count() == 1


@pytest.mark.slow
def test_a_remedy_that_does_not_fit_says_so_and_can_be_taken_out(page: "Page", explorer: Served) -> None:
    opened(page, explorer)  # a pre-norm network
    turned(page, lambda: page.select_option("#remedies", "deepnorm"))
    assert "Deepnorm weighs skips under a norm" in page.inner_text("#error")
    turned(page, lambda: page.click("#remedied button"))
    assert page.is_hidden("#error")
    page.goto("about:blank")
    opened(page, explorer, "#remedies=nothing:x=1")
    assert "remedy must be one of" in page.inner_text("#error").lower()
    turned(page, lambda: page.click("#remedied button"))
    assert page.is_hidden("#error") and page.inner_text("#verdict").startswith("Tokens")


@pytest.mark.slow
def test_hostile_text_stays_text(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    turned(page, lambda: page.fill("#text", HOSTILE), whole=True)
    assert page.input_value("#text") == HOSTILE
    assert page.evaluate("document.getElementById('cloud').data[0].x.length") == 31
    assert page.locator("main img, main script, main b:not(#pins b)").count() == 0
    page.hover("#cloud .points path >> nth=0", force=True)
    page.wait_for_selector("#cloud .hoverlayer .hovertext")
    hover = page.text_content("#cloud .hoverlayer") or ""
    assert hover.startswith("<token 0") and "&lt;" not in hover  # the text begins with this mark
    assert page.locator("#cloud .hoverlayer img").count() == 0


@pytest.mark.slow
def test_a_mistake_is_said_in_the_page_and_goes_with_its_cause(page: "Page", explorer: Served) -> None:
    opened(page, explorer, "#skip=lots")
    assert "the skip weight must be" in page.inner_text("#error").lower()
    turned(page, lambda: slide(page, "skip", 0.5))
    assert page.is_hidden("#error")
    turned(page, lambda: page.select_option("#mask", "write"))
    turned(page, lambda: page.fill("#mask-text", "causl"))
    assert "did you mean 'causal'" in page.inner_text("#error")
    turned(page, lambda: page.fill("#mask-text", "causal&window:1"))
    assert page.is_hidden("#error") and "causal&window:1" in page.inner_text("#about")


ODD = ["#model=random&focus=__proto__", "#focus=constructor", "#nothing=1", "#constructor=2", "#%%%",
       "#shape=5&shape.width=32", "#model=tiny&shape.layers=many"]  # fmt: skip


OVERLAPS = """[...document.querySelectorAll('.xaxislayer-above, .yaxislayer-above')].flatMap(axis => {
    const boxes = [...axis.querySelectorAll('.xtick text, .ytick text')].map(e => e.getBoundingClientRect());
    return boxes.flatMap((a, k) => boxes.slice(k + 1).filter(b => a.left < b.right && b.left < a.right
        && a.top + 3 < b.bottom && b.top + 3 < a.bottom));
}).length"""
"""Pairs of an axis's labels that stand on each other; boxes have some air above and below their ink."""


DEEP = "model=random&shape.width=16&shape.heads=2&skip=0&mlp=false&norm=false&layers=12&tokens=8"


@pytest.mark.slow
def test_labels_of_axes_stand_apart_however_deep_the_fall(page: "Page", explorer: Served) -> None:
    opened(page, explorer, f"#{DEEP}&A=model%3Drandom%26shape.width%3D16%26tokens%3D8", whole=True)
    for width in (1366, 360):
        page.set_viewport_size({"width": width, "height": 768})
        until(page, f"document.querySelector('#curve .main-svg').clientWidth <= {width}")
        for view in ("log", "linear"):
            page.check(f"input[name=curve][value={view}]", force=True)
            assert page.locator("#curve .ytick, #bounds .ytick, #paths .xtick").count() > 10
            until(page, f"{OVERLAPS} === 0")


@pytest.mark.slow
def test_a_pin_says_how_it_differs_from_what_is_shown(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    turned(page, lambda: page.click("#pinA"))
    assert page.inner_text("#pins li").startswith("A: the same as now. Tokens")
    turned(page, lambda: page.click("text=Causal"))
    assert page.inner_text("#pins li").startswith(
        "A: the model's own skips, with MLP, with norm, the model's own mask. Tokens"
    )
    assert "the model's own mask" in (page.get_attribute("#pinA", "title") or "")


@pytest.mark.slow
def test_an_empty_text_is_no_mistake(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    turned(page, lambda: page.fill("#text", "  "))
    assert page.inner_text("#verdict").startswith("There is no text yet: write a few words")
    assert page.is_hidden("#error")
    assert page.locator(".card.stale").count() == 5  # residual, cloud, paths, bounds and forecast are older
    assert "4 tokens" in turned(page, lambda: page.fill("#text", "four words and more"))


@pytest.mark.slow
def test_shares_above_all_of_the_output_are_explained(page: "Page", explorer: Served) -> None:
    shape = "shape.layers=3&shape.width=16&shape.heads=2&shape.init=xavier"
    text = "Call me Ishmael. Some years ago, never mind how long precisely"
    opened(page, explorer, f"#model=random&{shape}&norm=false&skip=0.3&text={text}", whole=True)
    shares = page.evaluate("document.getElementById('paths').data[0].y")
    assert max(shares) > 1.01 and min(shares) < -0.01  # some paths take back what others write
    assert f"{max(shares):.0%} of it. It is more than all of it" in page.inner_text("#paths-said")
    assert "the shares of all add up to 100%" in page.inner_text("#paths-said")


@pytest.mark.slow
def test_whatever_a_link_says_the_next_turn_is_answered(page: "Page", explorer: Served) -> None:
    for fragment in ODD:
        page.goto("about:blank")
        opened(page, explorer, fragment)
        assert page.is_visible("#error") == (page.inner_text("#verdict") == "Nothing to show yet."), fragment
        assert "skip 0.5 " in turned(page, lambda: slide(page, "skip", 0.5)), fragment
        assert page.is_hidden("#error"), fragment


@pytest.mark.slow
def test_a_link_names_its_model_for_it_may_be_opened_on_another_explorer(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    turned(page, lambda: page.click("#pinA"))
    turned(page, lambda: slide(page, "skip", 0.5))
    assert "#model=tiny&" in page.url and "A=model%3Dtiny" in page.url


@pytest.mark.slow
def test_an_error_marks_what_is_left_of_the_setting_before(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    turned(page, lambda: page.select_option("#mask", "write"))
    turned(page, lambda: page.fill("#mask-text", "causl"))
    assert page.locator(".card.stale").count() == 5  # the forecast as well
    turned(page, lambda: page.fill("#mask-text", "causal"))
    until(page, "document.querySelectorAll('.stale').length === 0")


@pytest.mark.slow
def test_an_answer_that_breaks_off_is_said(browser: "Browser") -> None:
    page = browser.new_page()
    with serving(small_networks()) as explorer:
        opened(page, explorer, "#model=random&layers=24&tokens=64&shape.width=256&shape.layers=8")
        page.wait_for_selector("#bounds-card[aria-busy=true]")
    page.wait_for_selector("#error:not([hidden])")
    assert "still running?" in page.inner_text("#error")
    assert page.locator("#bounds-card.stale").count() == 1 and page.locator("#curve-card.stale").count() == 0
    page.close()


@pytest.mark.slow
def test_the_theory_is_one_key_away(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    for button in page.locator("button.theory").all():
        button.focus()
        page.keyboard.press("Enter")
        assert page.inner_text("#theory-title") and page.inner_text("#theory-text")
        page.keyboard.press("Escape")
        assert page.is_hidden("#theory")
    page.check("input[name=bounds][value=table]", force=True)
    assert page.locator("#bounds-table tr").count() == 18
    page.locator("#bounds-table button").first.click()
    assert page.is_visible("#theory")
    page.click("#theory-close")


@pytest.mark.slow
def test_every_control_is_reached_by_keyboard_and_has_a_name(page: "Page", explorer: Served) -> None:
    opened(page, explorer, whole=True)
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name || ''"))
    wanted = {"text", "tokens", "model", "skip", "mlp", "norm", "mask", "window", "temperature", "divisor",
              "layers", "remedies", "pinA", "pinB", "copy", "curve", "cloud", "paths", "bounds"}  # fmt: skip
    assert wanted <= reached
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')].filter(e => "
        "e.checkVisibility() && "
        "!(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim())"
        ".map(e => e.id)"
    )
    assert nameless == []
    page.focus("#skip")
    turned(page, lambda: page.keyboard.press("ArrowLeft"))
    assert page.inner_text("output[for=skip]") == "0.99"


@pytest.mark.slow
def test_it_fits_a_phone_and_the_dark(page: "Page", explorer: Served) -> None:
    opened(page, explorer)
    for width, scheme in ((390, "light"), (1366, "dark"), (1366, "light")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        until(page, "document.documentElement.scrollWidth <= innerWidth")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(ground) < 200) == (scheme == "dark")
