"""The folder that a command writes to, locked from its beginning to its end."""

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

Result = TypeVar("Result")

ending = ExitStack()  # Context managers that are closed when the command ends, however it ends


def open_store(folder: Path | None) -> "Store | None":
    """Open and lock the run folder; None where nothing is to be written.

    A folder that cannot be written, or that another process writes, is refused before hours of work.
    """
    from rankscope.runs import Store

    if folder is not None:
        require_report()
    return None if folder is None else ending.enter_context(Store(folder))


def require_report(what: str = "a folder with figures and a report", *also: str) -> None:
    """Refuse to begin unless the packages of a report, and those in `also`, are installed."""
    from rankscope.extras import need

    need(what, *also, "matplotlib", "PIL", "jinja2", "plotly")


def write_folder(
    store: "Store",
    entry: str,
    manifest: "Manifest",
    tables: "Mapping[str, pl.DataFrame | SavedTable]",
    figures: "Mapping[str, Figure]",
) -> None:
    """Write the tables, figures and the report of a command."""
    from rankscope.figures.matplotlib import save
    from rankscope.report import write_report

    store.write(entry, manifest, tables)
    for name, figure in figures.items():
        save(figure, store.folder / name)
    write_report([store.folder], store.folder / "report.html")


def with_manifest(result: Result, **fields: Any) -> Result:
    """A profile, summary or certificates with these fields added to its manifest."""
    untyped: Any = result
    return replace(untyped, manifest=untyped.manifest.adding(**fields))


def where_written(output: Path | None) -> str:
    """Where the finished part of an interrupted command is."""
    return "nothing is written without -o" if output is None else f"these are written to {output}"
