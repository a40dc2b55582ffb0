"""The page and its API.

    GET  /                the page;  /static/..., /figures/..., /plotly.js its parts
    GET  /api/networks    the networks, the limits, the remedies, the theorems
    POST /api/answer      controls in, parts of the answer out: a line of JSON each, as soon as it is computed
    POST /api/forecast    controls in, the forecast of their network out, in the same way

Forecasts take longer than everything else, so they are computed by a thread of their own: nobody waits for one who did
not ask for it. The page breaks one off when a control is turned, which cancels it.

An answer that fails before its first part has an error status; one that fails later ends with a line
`{"part": "error"}`. One that ends without `{"part": "end"}` was cancelled.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from rankscope.errors import BusyError, LateError, RankscopeError
from rankscope.theory import THEOREMS
from rankscope_explorer import controls
from rankscope_explorer.answers import Answers, page_sentence
from rankscope_explorer.forecast_panel import FORECAST_SECONDS, ForecastPanel
from rankscope_explorer.jobs import Jobs, PageJob, Work
from rankscope_explorer.network_cache import MOST_REMEDIES, NetworkCache, described_remedies
from rankscope_explorer.page import Guard, add_pages

MOST_BYTES = 64 * 1024  # of a request
BODY_SECONDS = 5.0  # within which the body of a request must have arrived
VISITOR = re.compile(r"[\w-]{1,64}", re.ASCII)


def app(networks: NetworkCache, port: int, jobs: Jobs | None = None, patience: float = BODY_SECONDS) -> Guard:
    """The explorer over these networks, for a server at this port of the loopback.

    `patience` is how many seconds it waits for the body of a request.
    """
    jobs = Jobs() if jobs is None else jobs
    answers = Answers(networks)
    panel, forecasts = ForecastPanel(networks), jobs.beside(FORECAST_SECONDS)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    add_pages(api, "index.html")

    @api.get("/api/networks")
    async def described() -> dict[str, Any]:
        most = {"text": controls.MOST_TEXT, "tokens": controls.MOST_TOKENS, "depth": controls.MOST_DEPTH}
        return {
            "models": networks.described(),
            "limits": {**most, "remedies": MOST_REMEDIES},
            "remedies": described_remedies(),
            "theorems": [
                {name: getattr(theorem, name) for name in ("name", "source", "says")} for theorem in THEOREMS.values()
            ],
        }

    @api.post("/api/answer")
    async def answer(request: Request) -> Response:
        page_request = controls.read_request(await _body(request, patience), controls.PageRequest)
        return await _answer(lambda job: answers.parts(page_request, job.check), jobs, _visitor(request), request)

    @api.post("/api/forecast")
    async def forecast(request: Request) -> Response:
        asked = controls.read_request(await _body(request, patience), controls.ForecastRequest)
        return await _answer(lambda job: panel.parts(asked, job.check), forecasts, _visitor(request), request)

    @api.exception_handler(RankscopeError)
    async def refused(_: Request, error: RankscopeError) -> Response:
        later = isinstance(error, BusyError | LateError)
        headers = {"Retry-After": "2"} if later else None
        return JSONResponse({"error": page_sentence(error)}, status_code=503 if later else 422, headers=headers)

    return Guard(api, port)


def _visitor(request: Request) -> str:
    visitor = request.headers.get("x-visitor", "someone")
    if not VISITOR.fullmatch(visitor):
        raise HTTPException(400, "a visitor's name is up to 64 letters, digits, - and _")
    return visitor


async def _answer(work: Work, jobs: Jobs, visitor: str, request: Request) -> Response:
    """Start the computation and wait for its first part: until then an error sets the status."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def give(part: Any) -> None:
        line = part if part is None or isinstance(part, Exception) else _line(part)
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, line)

    job = jobs.start(visitor, work, give)
    leaving = asyncio.create_task(_cancel_on_disconnect(request, job))
    try:
        first = await queue.get()
    except asyncio.CancelledError:
        job.cancel()
        raise
    finally:
        leaving.cancel()
    if isinstance(first, RankscopeError):
        raise first
    if isinstance(first, Exception):
        raise HTTPException(500, _unexpected(first)) from first
    if first is None:
        raise HTTPException(409, "a newer request of the same visitor took the place of this one")
    return StreamingResponse(_lines(first, queue, job), media_type="application/x-ndjson")


async def _cancel_on_disconnect(request: Request, job: PageJob) -> None:
    """Cancel the computation when the visitor leaves before anything was answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _lines(first: bytes, queue: "asyncio.Queue[Any]", job: PageJob) -> AsyncIterator[bytes]:
    """Yield the parts as they come; a visitor who stops listening cancels the computation."""
    try:
        line: Any = first
        while isinstance(line, bytes):
            yield line
            line = await queue.get()
        if isinstance(line, Exception):
            sentence = page_sentence(line) if isinstance(line, RankscopeError) else _unexpected(line)
            yield _line({"part": "error", "error": sentence})
        elif not job.cancelled:
            yield _line({"part": "end"})
    finally:
        job.cancel()


def _unexpected(error: Exception) -> str:
    return f"Something unexpected went wrong ({type(error).__name__}): please report this setting."


def _line(part: dict[str, Any]) -> bytes:
    return json.dumps(part, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


async def _body(request: Request, patience: float) -> bytes:
    """The body of a request: declared as JSON, not too large, and complete within `patience` seconds."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "a request must be application/json")
    too_large = HTTPException(413, f"a request may have {MOST_BYTES // 1024} KiB; this one has more")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:12]) > MOST_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        late = f"a request must arrive within {patience:g} s; this one did not"
        raise HTTPException(408, late, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(400, "a request must arrive whole; this one broke off") from None
    return bytes(body)
