"""The server itself: who may ask, what is refused and how, and that nothing makes it fall over."""

import json
import re
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.explorer.jobs import Give, Jobs, PageJob, Work
from tests.explorer.serving import HEAVY, SMALL, Served, serving, small_networks

JSON = "application/json"
QUICK: dict[str, Any] = {"setting": {"shape": SMALL, "text": "a b c"}, "parts": ["curve"]}


def raw(served: Served, request: bytes) -> bytes:
    """The beginning of the answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        line.sendall(request)
        return line.recv(4096)


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def posted(served: Served, length: int, body: bytes = b"") -> bytes:
    """A request for an answer, with a body of that length, of which this much comes."""
    head = f"POST /api/answer HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def test_the_page_and_all_it_asks_for_are_there(served: Served) -> None:
    page = httpx.get(served.url).text

    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert httpx.get(served.url + path).status_code == 200, path
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


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


@pytest.mark.parametrize(
    ("kind", "content", "refused"),
    [("text/plain", json.dumps(QUICK).encode(), 415), (JSON, [b"x" * 4096] * 64, 413), (JSON, b"{no", 422)],
)
def test_a_form_a_huge_body_and_malformed_json_are_refused(
    served: Served, kind: str, content: Any, refused: int
) -> None:
    answer = httpx.post(f"{served.url}/api/answer", content=content, headers={"Content-Type": kind})
    assert answer.status_code == refused


def test_a_huge_request_is_refused_by_its_length(served: Served) -> None:
    assert served.ask({"setting": {"text": "x" * 10**6}}).status_code == 413
    assert 400 <= status(raw(served, posted(served, 10**30))) < 500


def test_a_request_that_does_not_arrive_is_given_up() -> None:
    with serving(small_networks(), patience=0.2) as slow:
        assert status(raw(slow, posted(slow, 90, b'{"setting'))) == 408
        assert slow.ask(QUICK).status_code == 200


def test_a_connection_without_a_request_is_closed() -> None:
    with serving(small_networks(), patience=0.2) as slow:
        own = f"Host: 127.0.0.1:{slow.port}\r\n".encode()
        for begun in (b"", b"GET / HT", b"GET / HTTP/1.1\r\n" + own):
            assert raw(slow, begun) == b""
        with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as line:
            line.sendall(b"POST / HTTP/1.1\r\n" + own + b"Content-Length: 99999999\r\n\r\nand no more")
            assert b"405" in b"".join(iter(lambda: line.recv(4096), b""))
        assert slow.ask(QUICK).status_code == 200


def test_a_request_that_breaks_off_is_no_error_of_the_server(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        line.sendall(posted(served, 90, b'{"setting'))
    assert served.ask(QUICK).status_code == 200
    assert "Exception" not in caplog.text


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..", "/static/", "/docs",
     "/openapi.json", "/static/explorer.js/", "/api/answer"],
)  # fmt: skip
def test_nothing_else_is_to_be_had(served: Served, path: str) -> None:
    answer = raw(served, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode())
    assert status(answer) in (404, 405, 307)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"skip": 9}, "The skip weight must be at most 2; got 9"),
        ({"mask": "causl"}, "did you mean 'causal'"),
        ({"mask": "edges:0>1&edges:5>6"}, "edges must join tokens"),
        ({"model": "/etc/passwd"}, "Model must be one of tiny, sigmoid, random"),
        ({"text": "   "}, "write a few words"),
        (
            {"shape": {"width": 10, "heads": 3}},
            "Width must be a multiple of the number of heads; got width 10 and 3 heads",
        ),
        ({"shape": {"layers": 24, "width": 512, "heads": 8}}, "million weights"),
        ({"shape": {"width": 6, "heads": 2, "positions": "rotary"}}, "width / heads must be even; got 6 / 2 = 3"),
    ],
)
def test_a_bad_setting_is_a_sentence_for_the_page(served: Served, setting: dict[str, Any], said: str) -> None:
    answer = served.ask({"setting": setting})
    assert answer.status_code == 422 and said.lower() in answer.json()["error"].lower()


def test_a_bad_visitor_is_refused(served: Served) -> None:
    assert served.ask(QUICK, **{"X-Visitor": "<script>"}).status_code == 400


MASKS = ["causal", "window:1", "edges:0>1", "matrix:2:1f", "strided:1&causal"]
NUMBER = st.floats(allow_nan=False, allow_infinity=False)  # httpx writes no others
SCALAR = st.none() | st.booleans() | st.integers() | NUMBER | st.text(max_size=20)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["tiny", "random", "sigmoid"]) | SCALAR,
        "text": st.text(max_size=60) | SCALAR,
        "tokens": st.integers(1, 6) | SCALAR,
        "skip": st.floats(-2, 2) | SCALAR,
        "mlp": st.booleans() | SCALAR,
        "norm": st.booleans() | SCALAR,
        "mask": st.sampled_from(MASKS) | SCALAR,
        "window": st.integers(0, 5) | SCALAR,
        "divisor": st.floats(0.001, 1e6) | SCALAR,
        "temperature": st.floats(0.01, 100) | SCALAR,
        "layers": st.integers(1, 5) | SCALAR,
        "shape": st.fixed_dictionaries(
            {"layers": st.integers(1, 3), "width": st.sampled_from([2, 8, 9]), "heads": st.integers(1, 3)},
            optional={
                "seed": st.integers(0, 9) | SCALAR,
                "norm": st.sampled_from(["layer", "rms", "scale"]),
                "place": st.sampled_from(["pre", "post", "sandwich"]),
                "mlp": st.sampled_from(["plain", "gated"]),
                "positions": st.sampled_from(["none", "rotary", "bias", "alibi", "relative"]),
                "init": st.sampled_from(["bert", "xavier", "kaiming", "orthogonal"]),
                "parallel": st.booleans(),
            },
        )
        | SCALAR,
    },
)


@settings(max_examples=30)
@given(setting=FIELDS | SCALAR, pin=st.none() | FIELDS)
def test_any_setting_is_answered_or_refused_and_the_server_goes_on(served: Served, setting: Any, pin: Any) -> None:
    request = {"setting": setting} if pin is None else {"setting": setting, "A": pin}
    answer = served.ask(request)
    assert answer.status_code in (200, 413, 422), answer.text
    if answer.status_code == 200:
        last = json.loads(answer.text.splitlines()[-1])
        assert last["part"] == "end", last
    else:
        assert "\n" not in answer.json()["error"]


PATHS = st.sampled_from(["/", "/api/answer", "/api/networks", "/static/x", "/figures/draw.js"])


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]),
    path=PATHS | st.text(max_size=9),
    body=st.binary(max_size=99),
)
def test_any_request_is_answered_without_falling_over(served: Served, method: str, path: str, body: bytes) -> None:
    try:
        url = httpx.URL(served.url).copy_with(path="/" + path.removeprefix("/"))
        answer = httpx.request(method, url, content=body, headers={"Content-Type": JSON})
    except httpx.InvalidURL:
        return
    assert answer.status_code < 500


def test_a_newer_request_ends_the_older_answer(served: Served) -> None:
    begun, older = threading.Event(), []

    def listen() -> None:
        head = {"X-Visitor": "me"}
        with httpx.stream("POST", f"{served.url}/api/answer", json=HEAVY, headers=head, timeout=60) as answer:
            for line in answer.iter_lines():
                older.append(json.loads(line)["part"])
                begun.set()

    thread = threading.Thread(target=listen)
    thread.start()
    assert begun.wait(60)
    newer = served.ask(QUICK, **{"X-Visitor": "me"})
    thread.join()
    assert newer.status_code == 200
    assert older and "bounds" not in older and "end" not in older


class Remembering(Jobs):
    """Keeps the computations it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[PageJob] = []

    def start(self, visitor: str, work: Work, give: Give) -> PageJob:
        self.started.append(super().start(visitor, work, give))
        return self.started[-1]


def test_a_closed_connection_calls_the_computation_off() -> None:
    jobs = Remembering()
    with serving(small_networks(), jobs) as explorer:
        url = f"{explorer.url}/api/answer"
        with httpx.stream("POST", url, json=HEAVY, timeout=60) as answer:
            next(answer.iter_lines())
        (job,) = jobs.started
        assert job.ended.wait(60) and job.cancelled


def test_leaving_before_anything_was_answered_calls_it_off_too() -> None:
    jobs = Remembering()
    body = json.dumps({**HEAVY, "parts": ["bounds"]}).encode()
    with serving(small_networks(), jobs) as explorer:
        with socket.create_connection(("127.0.0.1", explorer.port), timeout=30) as line:
            line.sendall(posted(explorer, len(body), body))
            while not jobs.started:
                time.sleep(0.01)
        assert jobs.started[0].ended.wait(60) and jobs.started[0].cancelled


def test_too_many_are_sent_away_and_told_when_to_come_back() -> None:
    with serving(small_networks(), Jobs(waiting=0)) as explorer:
        url = f"{explorer.url}/api/answer"
        with httpx.stream("POST", url, json=HEAVY, headers={"X-Visitor": "a"}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = explorer.ask(QUICK, **{"X-Visitor": "b"})
        assert refused.status_code == 503 and refused.headers["retry-after"]


def test_what_takes_too_long_says_so_in_its_last_line() -> None:
    with serving(small_networks(), Jobs(seconds=0.7)) as explorer:
        lines = [json.loads(line) for line in explorer.ask(HEAVY).text.splitlines()]
        said = lines[-1].get("error", "")
        assert "may take 0.7 s" in said
