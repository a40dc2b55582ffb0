"""A page on the loopback: the files that it is made of (`add_pages`), and what every request passes first (`Guard`): it
must be addressed to this server and come from its own page.

Any page that the visitor's browser has open can reach a server on the loopback. A name that resolves to
127.0.0.1 (DNS rebinding) shows in the Host header, a form or script of another site in the Origin header.
Both are refused before anything is read. Answers carry headers that keep a page from loading anything from
elsewhere and from being framed.

Starlette's TrustedHostMiddleware would not do: it looks neither at the port nor at a second Host header, so a
page of another server on this machine would pass; nor has Starlette a middleware for Origin or for headers.
"""

from importlib.resources import files

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}
"""Headers of every answer. plotly sets styles on the elements it draws, hence 'unsafe-inline' for styles."""


class Guard:
    """An ASGI app before the app: only requests of this server's own page get through."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on; the answer gets `HEADERS` in both cases."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refused = self.refusal(scope["method"], Headers(scope=scope))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        status, sentence = refused
        await JSONResponse({"error": sentence}, status)(scope, receive, with_headers)

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """(status, sentence) of a request that is refused; None for one that is not."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return 421, "the explorer answers to localhost and 127.0.0.1 alone, with its own port"
        if method in ("GET", "HEAD"):
            return None
        origins = {f"http://{host}" for host in self.hosts}
        if any(origin.lower() not in origins for origin in headers.getlist("origin")):
            return 403, "the explorer is asked by its own page alone; this request comes from another"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "the explorer is asked by its own page alone; this request comes from another site"
        return None


KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def add_pages(api: FastAPI, first: str) -> None:
    """Add the page `first` and the files that it loads to an API; any other path is refused in a sentence."""

    @api.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, status_code=error.status_code, headers=error.headers)

    @api.get("/")
    async def page() -> Response:
        return static(first)

    @api.get("/static/{name}")
    async def part(name: str) -> Response:
        return static(name)

    @api.get("/figures/{name}")
    async def figures(name: str) -> Response:
        return static(name, "rankscope.figures")

    @api.get("/plotly.js")
    async def plotly() -> Response:
        return FileResponse(str(files("plotly").joinpath("package_data/plotly.min.js")), media_type=KINDS[".js"])

    @api.get("/favicon.ico")
    async def icon() -> Response:
        return static("icon.svg")


def static(name: str, package: str = "rankscope_explorer") -> Response:
    """A file of the page, by its name alone: a path is not looked up."""
    kind = KINDS.get(name[name.rfind(".") :])
    folder = files(package).joinpath("static")
    if kind is None or name not in {file.name for file in folder.iterdir()}:
        raise HTTPException(404, "there is no such page")
    return Response(folder.joinpath(name).read_bytes(), media_type=kind)
