"""Who may ask: the server's own page alone, whose answers carry their headers."""

import httpx
import pytest

from tests.explorer.serving import QUICK, Served, raw, status


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
