"""The report: one HTML file that stands alone, and the run directory around it."""

import io
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from rankscope.figures import STYLE, panels, power, save
from rankscope.files import write_text
from rankscope.profiles import Profile, Summary
from rankscope.profiles.bands import draw_summary
from rankscope.profiles.plot import draw_arithmetics, draw_profile
from rankscope.report.statistics import last_layer
from rankscope.report.verdict import middle, verdict

READING = (
    "Lines: mean over samples (on the logarithmic side the geometric mean); bands: their range. Hollow marks "
    "lie at or below the dotted floor, the least that the arithmetic can resolve: there a value is rounding "
    "noise."
)
READING_OF_A_CORPUS = (
    "Lines: median over {} excerpts; bands: the middle half of them, and fainter nine tenths. Quantiles: {}. "
    "Marks are hollow where at least half of the excerpts lie at or below the dotted floor, the least that "
    "the arithmetic can resolve: there a value is rounding noise."
)


def write_run_directory(profile: Profile | Summary, folder: str | Path, title: str) -> Path:
    """Table, manifest, figures and report; answers with the path of the report."""
    folder = Path(folder)
    profile.save(folder / ("profile.parquet" if isinstance(profile, Profile) else "summary.parquet"))
    write_text(folder / "manifest.json", json.dumps(profile.manifest, indent=1, ensure_ascii=False) + "\n")
    figures: dict[str, Figure] = {metric: _figure(profile, metric) for metric in profile.metrics}
    if isinstance(profile, Profile) and len(profile.arithmetics) > 1:
        figures = {**_arithmetics(profile), **figures}
    for name, figure in figures.items():
        save(figure, folder / name)
    page = folder / "report.html"
    write_text(page, render(profile, title, {metric: _svg(figure) for metric, figure in figures.items()}))
    return page


def render(profile: Profile | Summary, title: str, figures: dict[str, str]) -> str:
    """The page; everything that came from a run is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rankscope.report", ""), autoescape=True, undefined=StrictUndefined
    )
    lead = profile.metrics[0]
    corpus = profile if isinstance(profile, Summary) else None
    return environment.get_template("page.html").render(
        title=title,
        verdict=verdict(profile),
        lead=lead,
        table=_table(profile, lead),
        figures=figures,
        reading=READING if corpus is None else READING_OF_A_CORPUS.format(corpus.excerpts, corpus.quantiles),
        statistics=None if corpus is None else last_layer(corpus, lead),
        checks=[_checks(network) for network in profile.manifest["networks"]],
        manifest=json.dumps(profile.manifest, indent=1, ensure_ascii=False),
        created=profile.manifest["created"],
    )


def _figure(profile: Profile | Summary, metric: str) -> Figure:
    """Linear beside logarithmic: what a person sees, and what is really there."""
    figure, (left, right) = panels(2, width=5.0)
    for axes, log in ((left, False), (right, True)):
        if isinstance(profile, Summary):
            draw_summary(axes, profile, metric, log)
        else:
            draw_profile(axes, profile, metric, log)
    left.get_legend().remove()  # type: ignore[union-attr]
    right.get_legend().remove()  # type: ignore[union-attr]
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _arithmetics(profile: Profile) -> dict[str, Figure]:
    """How each arithmetic sees the fall of a residual, variant by variant."""
    metric = next((name for name in profile.metrics if "residual" in name or name.endswith("mu")), None)
    figures = {}
    for variant in profile.variants if metric else []:
        figure, (fall, slope) = panels(2, width=5.0)
        draw_arithmetics(fall, slope, profile, str(metric), variant)
        figures[f"arithmetics_{variant}"] = figure
    return figures


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _table(profile: Profile | Summary, metric: str) -> dict[str, Any]:
    """Geometric mean over samples (and heads), or of a corpus the median, by layer; values at the floor are
    marked."""
    lines = []
    for variant, arithmetic in profile.lines(metric):
        curve, noise = middle(profile, metric, variant, arithmetic)
        cells = [{"text": power(k), "noise": part} for k, part in zip(curve, noise, strict=True)]
        lines.append({"variant": variant, "arithmetic": arithmetic, "cells": cells})
    return {"layers": list(range(max(len(line["cells"]) for line in lines))), "lines": lines}


def _checks(network: dict[str, Any]) -> dict[str, Any]:
    """What the run found about itself, in words."""
    found = network["checks"]
    overflow = found["first_layer_not_finite"]
    asked = found["arithmetic_asked"]
    instead = (
        []
        if asked == network["arithmetic"]
        else [f"run instead of {asked}, which has no rule for its kernel"]
    )
    return {
        "variant": network["variant"],
        "arithmetic": network["arithmetic"],
        "said": [
            _rows(found),
            f"{found['padded_tokens']} padded tokens left out",
            f"dropout {found['dropout']:g}",
            "all layers finite" if overflow is None else f"numbers overflow from layer {overflow}",
            *instead,
        ],
    }


def _rows(found: dict[str, Any]) -> str:
    if found["rows_sum_to_one"] is None:
        return "attention was not looked at"
    sums = found["largest_row_sum_defect"]
    if found["rows_sum_to_one"]:
        return f"attention rows sum to one within {sums:.1e}"
    return f"attention rows miss one by up to {sums:.2g}: theorems on averaging do not apply"
