"""The report: one HTML file that stands alone.

Made from run directories and nothing else; a chapter for each. It asks nothing of the network, and its
content security policy lets no script run but its own three, each named by its hash: plotly, `draw.js` and
`page.js`. A page of several runs begins with which they are, and those of the same variant side by side.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import FileError, require
from rankscope.extras import need
from rankscope.figures import TURNS, Chart, plotly_script, power, script_json, static_file
from rankscope.files import write_text
from rankscope.profiles import (
    CurveView,
    Profile,
    Summary,
    arithmetics_chart,
    by_variant,
    compared_arithmetics,
    curves_chart,
)
from rankscope.report.causes import FINEST
from rankscope.report.chapter import BUDGET, chapter, figure_json, fit
from rankscope.report.reported_run import ReportedRun, read_run
from rankscope.results import Plot, Section, Table
from rankscope.runs import SavedTable, Store

TITLED = 3  # Runs up to which the window's title names them
METRIC = "relative_residual"
RUNS, VARIANTS, LABEL = 16, 8, 40
"""Runs drawn side by side, variants of which that is done, and characters of a run's label, at most."""


def write_report(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of these run directories; answers with its path."""
    require(folders, "a report is made of at least one run directory; received none", FileError, "folders")
    write_text(path, render([read_run(folder) for folder in folders]))
    return Path(path)


def render(runs: Sequence[ReportedRun], budget: int = BUDGET) -> str:
    """The page. All text of a run is escaped, whatever it reads. Beyond `budget` characters,
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
    """The figures to print by the name of their file: each metric, linear (what a person
    sees) beside logarithmic (how small it is), and each variant in several arithmetics."""
    charts: dict[str, Chart] = {}
    for variant, curves in compared_arithmetics(profile).items():
        name = "arithmetics_" + re.sub(r"[^\w.+-]+", "_", variant)[:80]  # a hub id has a slash
        charts[name if name not in charts else f"{name}_{len(charts)}"] = arithmetics_chart(curves)
    for metric in profile.metrics:
        linear, log = (curves_chart(profile.views(metric), log) for log in (False, True))
        charts[metric] = replace(linear.beside(log), size=(5.0, 4.0))
    return charts


def titles(runs: Sequence[ReportedRun]) -> list[str]:
    """The heading of each run; where two would be the same, with their folders."""
    headings = [run.title for run in runs]
    for folders in ([run.folder.resolve().name for run in runs], [str(run.folder) for run in runs]):
        twice = Counter(headings)
        headings = [
            title if twice[title] == 1 else f"{run.title} ({folder})"
            for run, title, folder in zip(runs, headings, folders, strict=True)
        ]
    return headings


def first_sentence(text: str) -> str:
    """As far as its first full stop.

    >>> first_sentence("Tokens stay apart (0.94 of it). They do.")
    'Tokens stay apart (0.94 of it).'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]


def side_by_side(runs: Sequence[ReportedRun], names: Sequence[str]) -> Section:
    """The residual of every variant that several runs measured: a figure, and the numbers at the end."""
    measured = {
        f"{count} {name}": run.measured
        for count, (run, name) in enumerate(zip(runs, names, strict=True), 1)
        if run.measured is not None and METRIC in run.measured.metrics
    }
    have = {name: _finest(profile.views(METRIC)) for name, profile in measured.items()}
    count = Counter(variant for variants in have.values() for variant in variants)
    shared = [variant for variant, runs_with in count.items() if runs_with > 1]
    shared = sorted(shared, key=lambda variant: variant != "transformer")[:VARIANTS]
    if not shared:
        return Section("Side by side", key="runs")
    ends = {
        name: [_end(variants[variant]) if variant in variants else "" for variant in shared]
        for name, variants in have.items()
    }
    rows = [[name, *cells] for name, cells in ends.items() if any(cells)]
    table = Table(
        "Relative residual at the last layer", ["run", *shared], rows, titled=True,
        note="Geometric mean over samples, of a corpus the median. Variants that several runs measured.",
    )  # fmt: skip
    views = [(variant, _variant_chart(have, variant)) for variant in shared]
    most = max(count[variant] for variant in shared)
    few = f" Drawn are the first {RUNS} of {most} runs." if most > RUNS else ""
    plot = Plot("runs", views, f"One variant at a time, a line for each run that measured it.{few}")
    return Section("Side by side", plots=[plot], tables=[table], key="runs")


def _finest(curves: Sequence[CurveView]) -> dict[str, CurveView]:
    """Each variant in the finest of its arithmetics: one may have fallen back where another did not."""
    return {
        variant: min(group, key=lambda curve: [*FINEST, curve.arithmetic].index(curve.arithmetic))
        for variant, group in by_variant(curves).items()
    }


def _end(curve: CurveView) -> str:
    """The number at the last layer, marked where it is noise."""
    return f"{power(curve.ends[-1])} ○" if curve.noise[-1] else power(curve.ends[-1])


def _variant_chart(have: dict[str, dict[str, CurveView]], variant: str) -> Chart:
    """One variant in every run that has it, each as a line of its own."""
    curves = {name: variants[variant] for name, variants in have.items() if variant in variants}
    several = len({curve.arithmetic for curve in curves.values()}) > 1
    shown = []
    for name, curve in list(curves.items())[:RUNS]:
        short = name if len(name) <= LABEL else f"{name[: LABEL - 1].rstrip()}…"
        label = f"{short}, {curve.arithmetic}" if several else short
        shown.append(replace(curve, variant=short, label=label, log10_bands=[], value_bands=[]))
    return curves_chart(shown, True)
