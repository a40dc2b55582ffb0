"""The report: one HTML file that stands alone.

Made from run directories and nothing else; a chapter for each. It asks nothing of the network, and its
content security policy lets no script run but its own three, each named by its hash: plotly, `draw.js` and
`page.js`.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import FileError, require
from rankscope.extras import need
from rankscope.figures import Chart
from rankscope.figures.page import plotly_script, static_file
from rankscope.figures.text import TURNS, script_json
from rankscope.files import write_text
from rankscope.profiles import Profile, Summary, arithmetics_chart, compared_arithmetics, curves_chart
from rankscope.report.chapter import BUDGET, chapter, figure_json, fit
from rankscope.report.overview import first_sentence, side_by_side, titles
from rankscope.report.reported_run import ReportedRun, read_run
from rankscope.runs import Store
from rankscope.runs.tables import SavedTable

TITLED = 3  # Runs up to which the window's title names them


def write_report(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of these run directories; answers with its path."""
    require(folders, "a report is made of at least one run directory; received none", FileError, "folders")
    write_text(path, render([read_run(folder) for folder in folders]))
    return Path(path)


def render(runs: Sequence[ReportedRun], budget: int = BUDGET) -> str:
    """The page. Everything that came from a run is escaped, whatever it reads. Beyond `budget` characters,
    later chapters leave parts out, and say so."""
    need("a page", "jinja2", "plotly")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rankscope.report", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_straight,
    )  # fmt: skip
    environment.filters["first_sentence"] = first_sentence
    environment.filters["unbroken"] = _unbroken
    names = titles(runs)
    chapters = [chapter(run, k, name) for k, (run, name) in enumerate(zip(runs, names, strict=True), 1)]
    fit(chapters, budget)
    beside = side_by_side(runs, names) if len(runs) > 1 else None
    figures = {"runs-figure": figure_json(beside.plots[0].views)} if beside is not None and beside.plots else {}
    for part in chapters:
        figures |= part.figures
    texts = (plotly_script(), static_file("draw.js"), _file("page.js")) if figures else ()
    scripts = [f"\n{text}\n" for text in texts]
    return environment.get_template("page.html").render(
        title=" · ".join(names) if len(runs) <= TITLED else f"{len(runs)} runs",
        chapters=chapters,
        beside=beside,
        style=Markup(static_file("draw.css") + _file("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        figures=Markup("{" + ",".join(f"{script_json(key)}:{text}" for key, text in figures.items()) + "}"),
    )


def policy(scripts: Sequence[str]) -> str:
    """What the page may do: run these scripts, by their hashes, and show what it holds itself."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _straight(value: Any) -> Any:
    """Text without marks that would turn the page's own words about."""
    from markupsafe import Markup

    return value.translate(TURNS) if isinstance(value, str) and not isinstance(value, Markup) else value


def _unbroken(text: str) -> str:
    """Text, escaped, in which no line ends at the sign of an exponent."""
    from markupsafe import Markup, escape

    parts = re.split(r"(\d[\d.]*e[+-]\d+)", _straight(text))
    wrapped = [f'<span class="number">{part}</span>' if k % 2 else escape(part) for k, part in enumerate(parts)]
    return Markup("".join(wrapped))


def _file(name: str) -> str:
    return files("rankscope.report").joinpath(name).read_text(encoding="utf-8")


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
