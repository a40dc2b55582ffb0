"""Requests: what is refused and how, and that nothing makes the server fall over."""

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from explorer_tests.serving import HEAVY, QUICK, Served, posted, raw, serving, small_networks, status
from rankscope_explorer.jobs import Give, Jobs, PageJob, Work

JSON = "application/json"


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


def test_a_request_that_breaks_off_is_no_error_of_the_server(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        line.sendall(posted(served, 90, b'{"setting'))
    assert served.ask(QUICK).status_code == 200
    assert "Exception" not in caplog.text


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


@pytest.mark.slow
@settings(max_examples=15)
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
        reject()
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_too_many_are_sent_away_and_told_when_to_come_back() -> None:
    with serving(small_networks(), Jobs(waiting=0)) as explorer:
        url = f"{explorer.url}/api/answer"
        with httpx.stream("POST", url, json=HEAVY, headers={"X-Visitor": "a"}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = explorer.ask(QUICK, **{"X-Visitor": "b"})
        assert refused.status_code == 503 and refused.headers["retry-after"]


@pytest.mark.slow
def test_what_takes_too_long_says_so_in_its_last_line() -> None:
    with serving(small_networks(), Jobs(seconds=0.7)) as explorer:
        lines = [json.loads(line) for line in explorer.ask(HEAVY).text.splitlines()]
        said = lines[-1].get("error", "")
        assert "may take 0.7 s" in said
