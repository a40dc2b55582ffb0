"""The page's own files: nothing from elsewhere, and a text behind every button that promises one."""

import json
import re
from importlib.resources import files

import httpx
import pytest

from rankscope.explorer.controls import Controls, RandomShape
from tests.explorer.serving import Served, raw, status

STATIC = files("rankscope.explorer").joinpath("static")
PAGE = STATIC.joinpath("index.html").read_text(encoding="utf-8")
SCRIPTS = {
    name: STATIC.joinpath(name).read_text(encoding="utf-8")
    for name in ("explorer.js", "link.js", "ask.js", "remedies.js", "theory.js")
}


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for text in (PAGE, *SCRIPTS.values(), STATIC.joinpath("explorer.css").read_text(encoding="utf-8")):
        assert not re.search(r"https?://(?!www\.w3\.org)|//cdn", text)
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", PAGE)
    assert "innerHTML" not in "".join(SCRIPTS.values())


def test_every_question_has_an_answer() -> None:
    for about in re.findall(r'data-about="(\w+)"', PAGE):
        assert f"  {about}: {{" in SCRIPTS["theory.js"]


def test_every_field_of_a_setting_has_a_control() -> None:
    for field in Controls.model_fields:
        assert f'id="{field}"' in PAGE
    for field in RandomShape.model_fields:
        assert f'id="shape-{field}"' in PAGE


def test_links_leave_out_what_is_usual_as_settings_have_it() -> None:
    for fields, name in ((RandomShape.model_fields, "SHAPE"), (Controls.model_fields, "USUAL")):
        pattern = rf"export const {name} = Object.freeze\(\{{(.*?)\}}\)"
        (body,) = re.findall(pattern, SCRIPTS["link.js"], re.DOTALL)
        usual = dict(re.findall(r"(\w+): ([^,]+),", body))
        for field, about in fields.items():
            if field not in ("shape", "text"):  # the page has a text of its own
                assert json.loads(usual[field]) == about.default, field


def test_the_page_and_all_it_asks_for_are_there(served: Served) -> None:
    page = httpx.get(served.url).text

    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert httpx.get(served.url + path).status_code == 200, path
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..", "/static/", "/docs",
     "/openapi.json", "/static/explorer.js/", "/api/answer"],
)  # fmt: skip
def test_nothing_else_is_to_be_had(served: Served, path: str) -> None:
    answer = raw(served, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode())
    assert status(answer) in (404, 405, 307)
