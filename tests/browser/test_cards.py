"""Cards as a notebook that trusts nobody shows them: no script, no network, any width."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope import certify, decompose, fresh, measure
from tests.browser.waiting import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<script>1</script><img src=x onerror=alert(1)>"
STRICT = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@pytest.fixture(scope="module")
def page_of_cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = fresh("bert-tiny")
    encoded = net.encode(["Call me Ishmael. Some years ago"], 8)
    things: list[Any] = [
        measure(net, *encoded, variant=HOSTILE),
        decompose(net, *encoded),
        certify(net.variant("san"), *encoded),
    ]
    cards = "".join(thing._repr_html_() for thing in things)
    path = tmp_path_factory.mktemp("cards") / "cards.html"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{STRICT}">'
    path.write_text(f"<!doctype html>{head}<body style='background:#111'>{cards}")
    return path


def opened(browser: "Browser", path: Path, width: int) -> Watched:
    found = Watched(browser, viewport={"width": width, "height": 900})
    found.page.goto(path.as_uri())
    return found


@pytest.mark.parametrize("width", [390, 1400])
def test_every_image_is_there_and_the_page_stays_in_its_width(
    browser: "Browser", page_of_cards: Path, width: int
) -> None:
    with opened(browser, page_of_cards, width) as found:
        assert HOSTILE in found.page.inner_text("body")
        images = found.page.evaluate("[...document.images].map(i => [i.naturalWidth, i.width])")
        assert len(images) >= 1 + 2 + 3 and all(natural > shown > 200 for natural, shown in images)
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    assert found.faults == [] and found.requests == [page_of_cards.as_uri()]


@pytest.mark.slow
def test_panels_stand_side_by_side_where_there_is_room(browser: "Browser", page_of_cards: Path) -> None:
    tops = "[...document.querySelectorAll('body > div:nth-of-type(2) img')].map(i => Math.round(i.offsetTop))"
    for width, rows in ((1400, 1), (390, 2)):
        with opened(browser, page_of_cards, width) as found:
            assert len(set(found.page.evaluate(tops))) == rows


CONTRAST = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, k) => {
        const part = rgb[k] / 255;
        return sum + weight * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    }, 0);
    const ground = parts(getComputedStyle(document.body).backgroundColor);
    const written = [...document.querySelectorAll('th, td, div')].filter(
        (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
    return written.map((each) => {
        const [ink, part] = [parts(getComputedStyle(each).color), Number(getComputedStyle(each).opacity)];
        const own = parts(getComputedStyle(each).backgroundColor);
        if (own.length < 4 || own[3] > 0) return 0;
        const pair = [light(ink.map((value, k) => part * value + (1 - part) * ground[k])), light(ground)];
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    });
}"""
"""The contrast of every word with what it stands on, 0 where it has brought a ground of its own."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ground", "ink"), [("#111", "#ddd"), ("#fff", "#222"), ("#1e1e1e", "#ccc")])
def test_text_is_readable_in_any_theme(browser: "Browser", page_of_cards: Path, ground: str, ink: str) -> None:
    with opened(browser, page_of_cards, 1000) as found:
        found.page.evaluate("c => Object.assign(document.body.style, {background: c[0], color: c[1]})", [ground, ink])
        contrasts = found.page.evaluate(CONTRAST)
        assert len(contrasts) > 40 and min(contrasts) > 4.5
