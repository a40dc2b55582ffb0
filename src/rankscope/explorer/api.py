"""The page and its API.

    GET  /                the page;  /static/..., /figures/..., /plotly.js its parts
    GET  /api/networks    the networks, the limits, the remedies, the theorems
    POST /api/answer      controls in, parts of the answer out: a line of JSON each, as soon as it is computed

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
from rankscope.explorer import controls, pages
from rankscope.explorer.answers import Answers, page_sentence
from rankscope.explorer.guard import Guard
from rankscope.explorer.jobs import Job, Jobs
from rankscope.explorer.network_cache import MOST_REMEDIES, NetworkCache, described_remedies
from rankscope.theory import THEOREMS

MOST_BYTES = 64 * 1024
"""Size of a request, at most."""
BODY_SECONDS = 5.0
"""Seconds within which the body of a request must have arrived."""
LIMITS = {
    "text": controls.MOST_TEXT, "tokens": controls.MOST_TOKENS, "depth": controls.MOST_DEPTH,
    "remedies": MOST_REMEDIES,
}  # fmt: skip
VISITOR = re.compile(r"[\w-]{1,64}", re.ASCII)


def app(networks: NetworkCache, port: int, jobs: Jobs | None = None, patience: float = BODY_SECONDS) -> Guard:
    """The explorer over these networks, for a server at this port of the loopback.

    `patience` is how many seconds it waits for the body of a request.
    """
    jobs = Jobs() if jobs is None else jobs
    answers = Answers(networks)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    pages.add_pages(api, "index.html")

    @api.get("/api/networks")
    async def described() -> dict[str, Any]:
        theorems = [
            {"name": theorem.name, "source": theorem.source, "says": theorem.says} for theorem in THEOREMS.values()
        ]
        return {
            "models": networks.described(), "limits": LIMITS, "remedies": described_remedies(),
            "theorems": theorems,
        }  # fmt: skip

    @api.post("/api/answer")
    async def answer(request: Request) -> Response:
        asked = controls.read_request(await _body(request, patience))
        visitor = request.headers.get("x-visitor", "someone")
        if not VISITOR.fullmatch(visitor):
            raise HTTPException(400, "a visitor's name is up to 64 letters, digits, - and _")
        return await _answer(answers, jobs, visitor, asked, request)

    @api.exception_handler(RankscopeError)
    async def refused(_: Request, error: RankscopeError) -> Response:
        later = isinstance(error, BusyError | LateError)
        headers = {"Retry-After": "2"} if later else None
        sentence = page_sentence(error)
        return JSONResponse({"error": sentence}, status_code=503 if later else 422, headers=headers)

    return Guard(api, port)


async def _answer(
    answers: Answers, jobs: Jobs, visitor: str, asked: controls.PageRequest, request: Request
) -> Response:
    """Start the computation and wait for its first part: until then an error sets the status."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def give(item: Any) -> None:
        line = item if item is None or isinstance(item, Exception) else _line(item)
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, line)

    job = jobs.start(visitor, lambda job: answers.parts(asked, job.check), give)
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


async def _cancel_on_disconnect(request: Request, job: Job) -> None:
    """Cancel the computation when the visitor leaves before anything was answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _lines(first: bytes, queue: "asyncio.Queue[Any]", job: Job) -> AsyncIterator[bytes]:
    """Yield the parts as they come; a visitor who stops listening cancels the computation."""
    try:
        item: Any = first
        while isinstance(item, bytes):
            yield item
            item = await queue.get()
        if isinstance(item, Exception):
            sentence = page_sentence(item) if isinstance(item, RankscopeError) else _unexpected(item)
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
        raise HTTPException(
            408, f"a request must arrive within {patience:g} s; this one did not", {"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise HTTPException(400, "a request must arrive whole; this one broke off") from None
    return bytes(body)
