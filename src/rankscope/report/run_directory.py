"""The run directory around a profile: tables, manifest, figures to print, and the report."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl

from rankscope.figures import Chart
from rankscope.profiles import Profile, Summary, arithmetics_chart, compared_arithmetics, curves_chart
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
    """Write the run directory of a profile, with figures and report.

    Args:
        profile: What was measured.
        folder: Where to write, or an open store.
        title: The heading of the report.
        tables: More tables of the same run by their known names: cloud, spectrum.
        entry: The command that writes; `measure` or `corpus` where it is left out.

    Returns:
        The path of the report.

    >>> from tempfile import TemporaryDirectory
    >>> from rankscope import fresh, measure
    >>> net = fresh("bert-tiny")
    >>> with TemporaryDirectory() as folder:
    ...     write_run_directory(measure(net, *net.encode("Call me Ishmael.")), folder, "a tiny BERT").name
    'report.html'
    """
    from rankscope.figures import plot, save

    if not isinstance(folder, Store):
        with Store(folder) as store:
            return write_run_directory(profile, store, title, tables, entry)
    command = "measure" if isinstance(profile, Profile) else "corpus"
    profile = replace(profile, manifest=profile.manifest.adding(title=profile.manifest.title or title))
    profile.write(folder, entry or command, tables)
    for name, chart in printed_charts(profile).items():
        save(plot(chart), folder.folder / name)
    return write_report([folder.folder], folder.folder / "report.html")


def printed_charts(profile: Profile | Summary) -> dict[str, Chart]:
    """The figures to print by the name of their file: each metric, linear beside logarithmic (what a person
    sees, and what is really there), and each variant in several arithmetics."""
    charts: dict[str, Chart] = {}
    for variant, curves in compared_arithmetics(profile).items():
        name = "arithmetics_" + re.sub(r"[^\w.+-]+", "_", variant)[:80]  # a hub id has a slash
        charts[name if name not in charts else f"{name}_{len(charts)}"] = arithmetics_chart(curves)
    for metric in profile.metrics:
        linear, log = (curves_chart(profile.views(metric), log) for log in (False, True))
        charts[metric] = replace(linear.beside(log), size=(5.0, 4.0))
    return charts
