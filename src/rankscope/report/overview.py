"""What a page of several runs begins with: which they are, and those of the same variant side by side."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rankscope.figures import power
from rankscope.figures.description import Chart
from rankscope.profiles import CurveView, by_variant, curves_chart
from rankscope.report.causes import FINEST
from rankscope.report.reported_run import ReportedRun
from rankscope.results import Plot, Section, Table

METRIC = "relative_residual"
RUNS, VARIANTS, LABEL = 16, 8, 40
"""Runs drawn side by side, variants of which that is done, and characters of a run's label, at most."""


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
