"""The parts of a page, and what is said where there is none: the same for every page that is served here."""

from importlib.resources import files

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def put_on(api: FastAPI, first: str) -> None:
    """The page `first`, and what it may ask for; whatever else is asked for is refused in a sentence."""

    @api.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> Response:
        return JSONResponse(
            {"error": str(error.detail)}, status_code=error.status_code, headers=error.headers
        )

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
        return FileResponse(
            str(files("plotly").joinpath("package_data/plotly.min.js")), media_type=KINDS[".js"]
        )

    @api.get("/favicon.ico")
    async def icon() -> Response:
        return static("icon.svg")


def static(name: str, package: str = "rankscope.explorer") -> Response:
    """A file of the page, by a name without any path in it."""
    kind = KINDS.get(name[name.rfind(".") :])
    found = files(package).joinpath("static")
    if kind is None or name not in {each.name for each in found.iterdir()}:
        raise HTTPException(404, "there is no such page")
    return Response(found.joinpath(name).read_bytes(), media_type=kind)
