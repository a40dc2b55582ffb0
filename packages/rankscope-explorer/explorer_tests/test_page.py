"""Who may ask: the server's own page alone, whose answers carry their headers."""

import json
import re
from importlib.resources import files

import httpx
import pytest

from explorer_tests.serving import QUICK, Served, raw, status
from rankscope_explorer.controls import Controls, RandomShape


def test_every_answer_has_its_headers(served: Served) -> None:
    answers = [
        httpx.get(served.url), httpx.get(f"{served.url}/nothing"), httpx.get(f"{served.url}/api/networks"),
        served.ask(QUICK), httpx.get(served.url, headers={"Host": "example.com"}),
    ]  # fmt: skip
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        for part in ("script-src 'self'", "default-src 'none'", "frame-ancestors 'none'", "connect-src 'self'"):
            assert part in policy
        assert "unsafe-eval" not in policy
        assert "'unsafe-inline'" not in policy.split("style-src")[0]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "localhost:1", "127.0.0.1.example.com:{port}", ""])
def test_another_host_is_refused(served: Served, host: str) -> None:
    name = host.format(port=served.port)
    assert httpx.get(served.url, headers={"Host": name}).status_code == 421
    assert served.ask(QUICK, Host=name).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_our_own_names_are_answered(served: Served, host: str) -> None:
    name = host.format(port=served.port)
    assert httpx.get(served.url, headers={"Host": name}).status_code == 200
    assert served.ask(QUICK, Host=name, Origin=f"http://{name}").status_code == 200


def test_two_hosts_or_none_are_refused(served: Served) -> None:
    own = f"Host: 127.0.0.1:{served.port}\r\n".encode()
    assert 400 <= status(raw(served, b"GET / HTTP/1.1\r\n" + own + b"Host: example.com\r\n\r\n")) < 500
    assert 400 <= status(raw(served, b"GET / HTTP/1.1\r\n\r\n")) < 500
    assert status(raw(served, b"GET / HTTP/1.0\r\n\r\n")) == 421


@pytest.mark.parametrize("origin", ["http://example.com", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_another_origin_is_refused(served: Served, origin: str) -> None:
    answer = served.ask(QUICK, Origin=origin.format(port=served.port))
    assert answer.status_code == 403 and "another" in answer.json()["error"]


def test_another_site_is_refused_by_what_its_browser_says(served: Served) -> None:
    assert served.ask(QUICK, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


STATIC = files("rankscope_explorer").joinpath("static")
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
