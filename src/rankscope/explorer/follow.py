"""Serves the page of a training run, or of several to choose from, which keeps up with them.

    GET  /                  the page;  /static/..., /figures/..., /plotly.js its parts
    GET  /api/training      ?run=INDEX&metric=NAME&mark=MARK: all that is drawn of a run, or only the mark where
                            nothing was written since the answer that had it

What is drawn is thinned to a few hundred measurements, so that an answer stays small however long the run is.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rankscope.errors import RankscopeError
from rankscope.explorer import pages
from rankscope.explorer.guard import Guard
from rankscope.figures.description import Chart
from rankscope.figures.page import page_figure
from rankscope.runs.figures import STEPS, layer_curves, layer_map, path_shares, run_curves
from rankscope.runs.training import TrainingRun, decades, read_training, stamp, title_of

PANELS, ALARMS = 6, 200  # Panels of a figure, and alarms of the list, at most


def app(folders: Sequence[str | Path], port: int, metric: str | None = None) -> Guard:
    """The page of the training runs in these folders, for a server at that port of the loopback."""
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    pages.add_pages(api, "follow.html")
    lock = Lock()

    @lru_cache(maxsize=len(folders))
    def read_at(folder: str | Path, mark: str) -> TrainingRun:
        """The run as it was at that mark, or later; it serves all requests until something is written again."""
        return read_training(folder)

    @api.get("/api/training")
    def training(run: int = 0, metric: str | None = metric, mark: str = "") -> dict[str, Any]:
        folder = folders[max(0, min(run, len(folders) - 1))]
        now = stamp(folder)
        if mark == f"{now} {run} {metric}":
            return {"mark": mark}
        with lock:
            shown = read_at(folder, now)
        return {"mark": f"{now} {run} {metric}", "runs": list(map(str, folders)), **described(shown, metric)}

    @api.exception_handler(RankscopeError)
    async def report_error(_: Request, error: RankscopeError) -> Response:
        return JSONResponse({"error": str(error)}, status_code=422)

    return Guard(api, port)


def described(training: TrainingRun, metric: str | None = None) -> dict[str, Any]:
    """All that the page shows of a training run."""
    chosen = metric if metric in training.metrics else next(iter(training.metrics), None)
    charts: dict[str, Chart] = {}
    if chosen is not None:
        charts |= {"map": layer_map(training, chosen), "curves": layer_curves(training, [chosen])}
    if training.scalars:
        charts["run"] = run_curves(training, training.scalars[:PANELS])
    if training.learning:
        charts["gradients"] = layer_curves(training, training.learning)
    if len(training.paths):
        charts["paths"] = path_shares(training)
    grid = None if chosen is None else training.grid(chosen)
    measurements = len(training.steps)
    return {
        "model": training.name,
        "since": training.manifest.created,
        "step": training.steps[-1] if training.steps else None,
        "measurements": measurements,
        "drawn": STEPS if measurements > STEPS else None,
        "metric": chosen,
        "heads": grid.heads if grid is not None and grid.heads > 1 else None,
        "zeros": grid is not None and bool((grid.value == 0).any()) and decades(grid.value) > 2,
        "noise": grid is not None and bool(grid.noise.any()),
        "metrics": [{"name": name, "says": title_of(name)} for name in training.metrics],
        "figures": {name: page_figure(chart) for name, chart in charts.items()},
        "broken": training.broken,
        "alarms": [*training.alarms.head(1).to_dicts(), *training.alarms[1:].tail(ALARMS).reverse().to_dicts()],
        "raised": training.alarms.height,
        "forecast": training.forecast,
    }
