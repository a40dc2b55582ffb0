"""The page and its API.

    GET  /                the page;  /static/..., /figures/..., /plotly.js its parts
    GET  /api/shelf       the networks, the limits, the theorems
    POST /api/answer      a setting in, its parts out: a line of JSON each, as soon as it is there

An answer that fails before its first part has the status that says so; one that fails later ends with a line
`{"part": "error"}`. One that ends without `{"part": "end"}` was called off.
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
from rankscope.explorer import pages, remedies, settings
from rankscope.explorer.answer import Answers, why
from rankscope.explorer.guard import Guard
from rankscope.explorer.jobs import Job, Jobs
from rankscope.explorer.shelf import Shelf
from rankscope.theory import THEOREMS

MOST_BYTES = 64 * 1024
"""Of a request."""
BODY_SECONDS = 5.0
"""In which a request must have arrived."""
LIMITS = {"text": settings.MOST_TEXT, "tokens": settings.MOST_TOKENS, "depth": settings.MOST_DEPTH}
VISITOR = re.compile(r"[\w-]{1,64}", re.ASCII)


def app(shelf: Shelf, port: int, jobs: Jobs | None = None, patience: float = BODY_SECONDS) -> Guard:
    """The explorer over these networks, for a server at that port of the loopback. `patience` is how long it
    waits for a request to arrive."""
    running = Jobs() if jobs is None else jobs
    answers = Answers(shelf)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        running.close()

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    pages.put_on(api, "index.html")

    @api.get("/api/shelf")
    async def described() -> dict[str, Any]:
        return {
            "models": shelf.described(),
            "limits": LIMITS | {"remedies": remedies.MOST},
            "remedies": remedies.described(),
            "theorems": [
                {"name": each.name, "source": each.source, "says": each.says} for each in THEOREMS.values()
            ],
        }

    @api.post("/api/answer")
    async def answer(request: Request) -> Response:
        asked = settings.read_request(await _body(request, patience))
        visitor = request.headers.get("x-visitor", "someone")
        if not VISITOR.fullmatch(visitor):
            raise HTTPException(400, "a visitor's name is up to 64 letters, digits, - and _")
        return await _answered(answers, running, visitor, asked, request)

    @api.exception_handler(RankscopeError)
    async def said(_: Request, error: RankscopeError) -> Response:
        late = isinstance(error, BusyError | LateError)
        headers = {"Retry-After": "2"} if late else None
        return JSONResponse({"error": why(error)}, status_code=503 if late else 422, headers=headers)

    return Guard(api, port)


async def _answered(
    answers: Answers, jobs: Jobs, visitor: str, asked: settings.Request, request: Request
) -> Response:
    """Start the computation and wait for its first part: until then an error has a status of its own."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def give(item: Any) -> None:
        line = item if item is None or isinstance(item, Exception) else _line(item)
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, line)

    job = jobs.start(visitor, lambda job: answers.parts(asked, job.check), give)
    leaving = asyncio.create_task(_left(request, job))
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


async def _left(request: Request, job: Job) -> None:
    """Call the computation off when the visitor leaves before anything was answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _lines(first: bytes, queue: "asyncio.Queue[Any]", job: Job) -> AsyncIterator[bytes]:
    """The parts as they come. Whoever stops listening calls the computation off."""
    try:
        item: Any = first
        while isinstance(item, bytes):
            yield item
            item = await queue.get()
        if isinstance(item, Exception):
            said = why(item) if isinstance(item, RankscopeError) else _unexpected(item)
            yield _line({"part": "error", "error": said})
        elif not job.cancelled:
            yield _line({"part": "end"})
    finally:
        job.cancel()


def _unexpected(error: Exception) -> str:
    return f"Something unexpected went wrong ({type(error).__name__}): please report this setting."


def _line(part: dict[str, Any]) -> bytes:
    return json.dumps(part, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


async def _body(request: Request, patience: float) -> bytes:
    """The body of a request: JSON by its own word, not too large, not too slow."""
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
        raise HTTPException(
            408, f"a request must arrive within {patience:g} s; this one did not", {"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise HTTPException(400, "a request must arrive whole; this one broke off") from None
    return bytes(body)
