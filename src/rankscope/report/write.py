"""The run directory around a profile: tables, manifest, figures to print, and the report."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl

from rankscope.figures import Figure, panels, save
from rankscope.profiles import Profile, Summary
from rankscope.profiles.plot import draw_arithmetics, draw_curves, draw_key
from rankscope.report.page import write_report
from rankscope.report.sections import compared_arithmetics
from rankscope.runs import Store
from rankscope.runs.tables import Kept


def write_run_directory(
    profile: Profile | Summary,
    folder: str | Path | Store,
    title: str,
    tables: Mapping[str, pl.DataFrame | Kept] | None = None,
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
    figures = {metric: _figure(profile, metric) for metric in profile.metrics}
    figures = {**_arithmetics(profile), **figures}
    for name, figure in figures.items():
        save(figure, folder / name)
    return write_report([folder], folder / "report.html")


def _figure(profile: Profile | Summary, metric: str) -> Figure:
    """Linear beside logarithmic: what a person sees, and what is really there."""
    figure, (left, right) = panels(2, width=5.0)
    for axes, log in ((left, False), (right, True)):
        draw_curves(axes, profile.views(metric), log, legend=False)
    if draw_key(right, profile.views(metric), beside=True):
        return figure
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _arithmetics(profile: Profile | Summary) -> dict[str, Figure]:
    """How each arithmetic sees the fall of a residual, variant by variant."""
    figures: dict[str, Figure] = {}
    for variant, curves in compared_arithmetics(profile).items():
        figure, (fall, slope) = panels(2, width=5.0)
        draw_arithmetics(fall, slope, curves)
        name = "arithmetics_" + re.sub(r"[^\w.+-]+", "_", variant)[:80]  # a hub id has a slash
        figures[name if name not in figures else f"{name}_{len(figures)}"] = figure
    return figures
