"""The files of a page, and the answer for one that does not exist: used by `api` and `follow`."""

from importlib.resources import files

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

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


def static(name: str, package: str = "rankscope.explorer") -> Response:
    """A file of the page, by its name alone: a path is not looked up."""
    kind = KINDS.get(name[name.rfind(".") :])
    folder = files(package).joinpath("static")
    if kind is None or name not in {file.name for file in folder.iterdir()}:
        raise HTTPException(404, "there is no such page")
    return Response(folder.joinpath(name).read_bytes(), media_type=kind)
