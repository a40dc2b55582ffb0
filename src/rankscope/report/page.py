"""The report: one HTML file that stands alone.

Made from run directories and nothing else; a chapter for each. It asks nothing of the network, and its
content security policy lets no script run but its own three, each named by its hash: plotly, `draw.js` and
`page.js`.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl

from rankscope import charts
from rankscope.charts.safe import TURNS
from rankscope.errors import FileError
from rankscope.files import write_text
from rankscope.report.run import Run, read_run
from rankscope.report.sections import facts, sections_of, stopped
from rankscope.report.tables import checks
from rankscope.report.verdict import verdict
from rankscope.theory import Certificates

MANIFEST = 200_000
"""Characters of a manifest that are shown at most."""


def write_report(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of these run directories; answers with its path."""
    if not folders:
        raise FileError("a report is made of at least one run directory; received none")
    write_text(path, render([read_run(folder) for folder in folders]))
    return Path(path)


def render(runs: Sequence[Run]) -> str:
    """The page. Everything that came from a run is escaped, whatever it reads."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rankscope.report", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_straight,
    )  # fmt: skip
    environment.filters["identity"] = id
    environment.filters["unbroken"] = _unbroken
    figures: dict[str, Any] = {}
    chapters = [_chapter(run, number, figures) for number, run in enumerate(runs, 1)]
    scripts = [charts.plotly_script(), charts.draw_script(), _file("page.js")] if figures else []
    scripts = [f"\n{script}\n" for script in scripts]
    return environment.get_template("page.html").render(
        title=" · ".join(dict.fromkeys(run.title for run in runs)),
        chapters=chapters,
        style=Markup(charts.style_sheet() + _file("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        figures=Markup(charts.script_json(figures)),
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
    wrapped = [
        f'<span class="number">{part}</span>' if k % 2 else escape(part) for k, part in enumerate(parts)
    ]
    return Markup("".join(wrapped))


def _file(name: str) -> str:
    return files("rankscope.report").joinpath(name).read_text(encoding="utf-8")


def _chapter(run: Run, number: int, figures: dict[str, Any]) -> dict[str, Any]:
    """What the template needs of one run; its figures go into `figures` under ids of their own."""
    sections = sections_of(run)
    ids = {id(section): f"run{number}-{section.key}" for section in sections}
    plots = {}
    for section in sections:
        for plot in section.plots:
            key = f"run{number}-figure-{plot.key}"
            plots[id(plot)] = key
            figures[key] = _views(plot.views)
    measured = run.measured
    manifests = {"manifest": run.manifest} if run.manifest else {}
    for variant, found in run.certificates.items():
        if found.manifest != run.manifest:
            manifests[f"certificates of {variant}"] = found.manifest
    return {
        "id": f"run{number}",
        "title": run.title,
        "facts": facts(run),
        "verdict": _verdict(run),
        "stopped": stopped(run),
        "sections": sections,
        "ids": ids,
        "plots": plots,
        "checks": [] if measured is None else checks(measured),
        "manifests": {name: _shown(manifest) for name, manifest in manifests.items()},
        "command": str(run.manifest.get("command", "")),
    }


def _views(views: list[tuple[str, charts.Figure]]) -> list[dict[str, Any]]:
    """The views of one figure: what its CSV holds is the same in all, and kept once."""
    found: list[dict[str, Any]] = []
    for label, figure in views:
        again = found and figure["table"] == found[0]["figure"]["table"]
        kept = {name: part for name, part in figure.items() if not (again and name == "table")}
        found.append({"label": label, "figure": kept})
    return found


def _verdict(run: Run) -> str:
    """What the run says, in a sentence or two."""
    if run.measured is not None:
        return verdict(run.measured)
    if run.outcomes:
        agrees = [
            each.get("agrees") for _, outcome in run.outcomes for each in outcome.get("comparisons", [])
        ]
        return _met(agrees.count(True), agrees.count(False))
    if "lengths" in run.tables:
        return _carried(run)
    return " ".join(_proved(variant, found) for variant, found in run.certificates.items())


def _proved(variant: str, found: Certificates) -> str:
    """Of certificates: how many theorems apply, and how many of these say something."""
    rows = found.summary()
    holds, says = rows.filter(pl.col("met_to") > 0).height, rows["says_at"].drop_nulls().len()
    return f"Of {rows.height} theorems {holds} hold for {variant}, and {says} say more than is known anyway."


def _met(yes: int, no: int) -> str:
    """Of studies: how much of what was published came out."""
    if not yes + no:
        return "No published number to compare with."
    if not no:
        return f"All of {yes} published numbers came out." if yes > 1 else "The published number came out."
    differ = (
        "1 differs, with the reason beside it" if no == 1 else f"{no} differ, with the reasons beside them"
    )
    return f"Of {yes + no} published numbers, {yes} came out; {differ}."


def _carried(run: Run) -> str:
    """Of a decomposition: which length carries most."""
    rows = run.tables["lengths"].filter(pl.col("start") == "all", pl.col("share").is_finite())
    means = rows.group_by("length").agg(pl.col("share").mean(), pl.col("paths").first()).sort("share")
    if means.is_empty():
        return ""
    most = means.row(-1, named=True)
    heads = (
        "no head" if most["length"] == 0 else "one head" if most["length"] == 1 else f"{most['length']} heads"
    )
    what = "most of the output" if most["share"] > 0.5 else "more of the output than any other length"
    return f"Paths through {heads} carry {what}: {most['share']:.0%} of it."


def _shown(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    return text if len(text) <= MANIFEST else f"{text[:MANIFEST]}\n… {len(text) - MANIFEST} characters more"
