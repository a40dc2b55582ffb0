"""The folder that a command writes to: its own from the first until the command ends."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from rankscope.runs import Manifest, Store
    from rankscope.runs.tables import SavedTable

Told = TypeVar("Told")

ending = ExitStack()
"""What is closed when the command ends, however it ends."""


def opened(folder: Path | None) -> "Store | None":
    """The run folder, or None where nothing is to be written; refused before hours go into what it is to hold
    if it cannot be written, or another is writing there."""
    from rankscope.runs import Store

    if folder is not None:
        require_report()
    return None if folder is None else ending.enter_context(Store(folder))


def require_report(what: str = "a folder with figures and a report", *also: str) -> None:
    """A sentence with the line that installs what a report is made with, and packages that are needed
    `also`, before any work goes into it."""
    from rankscope.extras import need

    need(what, *also, "matplotlib", "PIL", "jinja2", "plotly")


def write_folder(
    store: "Store",
    entry: str,
    manifest: "Manifest",
    tables: "Mapping[str, pl.DataFrame | SavedTable]",
    figures: "Mapping[str, Figure]",
) -> None:
    """Tables, figures and the report of a command."""
    from rankscope.figures.matplotlib import save
    from rankscope.report import write_report

    store.write(entry, manifest, tables)
    for name, figure in figures.items():
        save(figure, store.folder / name)
    write_report([store.folder], store.folder / "report.html")


def with_manifest(found: Told, **fields: Any) -> Told:
    """The same profile, summary or certificates, with these fields in its manifest."""
    kept: Any = found
    return replace(kept, manifest=kept.manifest.adding(**fields))
