"""The run directory around a profile: tables, manifest, figures to print, and the report."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl

from rankscope.profiles import Profile, Summary
from rankscope.report.page import write_report
from rankscope.runs import Store
from rankscope.runs.tables import SavedTable


def write_run_directory(
    profile: Profile | Summary,
    folder: str | Path | Store,
    title: str,
    tables: Mapping[str, pl.DataFrame | SavedTable] | None = None,
    entry: str | None = None,
) -> Path:
    """Tables, manifest, figures and report; answers with the path of the report.

    `tables` are more tables of the same run by their known names: cloud, spectrum. `entry` says which command
    writes, `measure` or `corpus` where it is left out.
    """
    if not isinstance(folder, Store):
        with Store(folder) as store:
            return write_run_directory(profile, store, title, tables, entry)
    store, folder = folder, folder.folder
    name, usual = ("profile", "measure") if isinstance(profile, Profile) else ("summary", "corpus")
    profile = replace(profile, manifest=profile.manifest.adding(title=profile.manifest.title or title))
    store.write(entry or usual, profile.manifest, {name: profile, **(tables or {})})
    from rankscope.figures.matplotlib import save
    from rankscope.report.printed import printed

    for name, figure in printed(profile).items():
        save(figure, folder / name)
    return write_report([folder], folder / "report.html")
