"""Serves the page of a training run, or of several side by side and one after another, which keeps up with them.

    GET  /                  the page;  /static/..., /figures/..., /plotly.js its parts
    GET  /api/training      ?run=INDEX&metric=NAME&mark=MARK: all that is drawn of a run, or only the mark where
                            nothing was written since the answer that had it; of several runs also the alarms of
                            the others (their number and the first), and the loss of all and that metric at their last
                            layers, in one figure
    GET  /api/spikes        ?run=INDEX: the loss spikes of a run, and which signals left their band before each

What is drawn is thinned to a few hundred measurements, so that an answer stays small however long the run is. What came
before a spike takes seconds to find in a long run: the page asks for it by itself, and it is looked for again only when
the run has another spike or is a tenth longer (`KnownEvents`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rankscope.errors import RankscopeError
from rankscope.figures import Chart, page_figure
from rankscope.trainings import (
    STEPS,
    Spikes,
    TrainingRun,
    decades,
    find_spikes,
    layer_curves,
    layer_map,
    path_shares,
    read_training,
    run_curves,
    run_events,
    run_loss,
    side_by_side,
    stamp,
    title_of,
)
from rankscope_explorer.page import Guard, add_pages

PANELS, ALARMS = 6, 200  # Panels of a figure, and alarms of the list, at most
SPIKES, EVENTS = 4, 8  # Spikes that are shown, the latest ones, and signals before each, at most
LONGER = 1.1  # A run that is so many times as long has more quiet steps: chances are found again


def app(folders: Sequence[str | Path], port: int, metric: str | None = None) -> Guard:
    """The page of the training runs in these folders, for a server at that port of the loopback."""
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(api, "follow.html")
    lock, known = Lock(), KnownEvents()

    @lru_cache(maxsize=len(folders))
    def read_at(folder: str | Path, mark: str) -> TrainingRun:
        """The run as it was at that mark, or later; it serves all requests until something is written again."""
        return read_training(folder)

    @api.get("/api/training")
    def training(run: int = 0, metric: str | None = metric, mark: str = "") -> dict[str, Any]:
        stamps = list(map(stamp, folders))
        now = f"{' '.join(stamps)} {run} {metric}"
        if mark == now:
            return {"mark": mark}
        with lock:
            trainings = [read_at(folder, folder_stamp) for folder, folder_stamp in zip(folders, stamps, strict=True)]
        index = max(0, min(run, len(folders) - 1))
        shown = described(trainings[index], metric)
        shown["elsewhere"] = [
            {"run": k, "raised": loaded.alarms.height, **loaded.alarms.row(0, named=True)}
            for k, loaded in enumerate(trainings)
            if k != index and loaded.alarms.height
        ]
        if len(folders) > 1 and shown["metric"] is not None:
            together = side_by_side(dict(zip(short_names(folders), trainings, strict=True)), shown["metric"])
            shown["figures"]["together"] = page_figure(together)
        return {"mark": now, "runs": list(map(str, folders)), "names": short_names(folders), **shown}

    @api.get("/api/spikes")
    def spikes(run: int = 0) -> dict[str, Any]:
        folder = folders[max(0, min(run, len(folders) - 1))]
        with lock:
            shown = read_at(folder, stamp(folder))
        return described_spikes(known.of(folder, shown))

    @api.exception_handler(RankscopeError)
    async def report_error(_: Request, error: RankscopeError) -> Response:
        return JSONResponse({"error": str(error)}, status_code=422)

    return Guard(api, port)


def short_names(folders: Sequence[str | Path]) -> list[str]:
    """The paths of runs without the folders that all of them lie in.

    >>> short_names(["runs/a/1", "runs/b/1"])
    ['a/1', 'b/1']
    """
    parts = [str(folder).split("/") for folder in folders]
    shared = 0
    while all(len(names) > shared + 1 and names[shared] == parts[0][shared] for names in parts):
        shared += 1
    return ["/".join(names[shared:]) for names in parts]


def described(training: TrainingRun, metric: str | None = None) -> dict[str, Any]:
    """All that the page shows of a training run."""
    chosen = metric if metric in training.metrics else next(iter(training.metrics), None)
    charts: dict[str, Chart] = {}
    if chosen is not None:
        charts |= {"map": layer_map(training, chosen), "curves": layer_curves(training, training.of_stacks(chosen))}
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
        "notes": training.notes,
        "alarms": [*training.alarms.head(1).to_dicts(), *training.alarms[1:].tail(ALARMS).reverse().to_dicts()],
        "raised": training.alarms.height,
        "forecast": training.forecast,
    }


class KnownEvents:
    """The signals before the spikes of some runs, as they were last found."""

    def __init__(self) -> None:
        self._lock = Lock()  # a request waits for what another one is looking for
        self._found: dict[str | Path, tuple[int, Spikes | None]] = {}  # with the number of measurements of the run

    def of(self, folder: str | Path, training: TrainingRun) -> Spikes | None:
        """The spikes of the run in a folder and the signals before each; None if it has no loss."""
        loss, length = run_loss(training), len(training.steps)
        if loss is None:
            return None
        spikes = find_spikes(loss)
        with self._lock:
            before, report = self._found.get(folder, (0, None))
            known = [] if report is None else [spike.first for spike in report.spikes]
            if known != [spike.first for spike in spikes] or not before <= length < LONGER * before:
                report = run_events(training)
                self._found[folder] = length, report
        return None if report is None else replace(report, spikes=spikes)  # the last one may have come to last longer


def described_spikes(report: Spikes | None) -> dict[str, Any]:
    """All that the page says of the loss spikes of a run, the latest first; nothing if there is none."""
    if report is None:
        return {"count": 0, "spikes": []}
    shown = []
    for index, spike in list(enumerate(report.spikes))[: -SPIKES - 1 : -1]:
        events = report.order(index)
        shown.append({
            "step": spike.first, "loss": spike.description, "none": "" if events else report.none_left,
            "events": [{**event._asdict(), "title": title_of(event.signal)} for event in events[:EVENTS]],
            "more": len(events[EVENTS:]),
        })  # fmt: skip
    return {"count": len(report.spikes), "spikes": shown}
