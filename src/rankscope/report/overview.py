"""What a page of several runs begins with: which they are, and those of the same variant side by side."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import polars as pl

from rankscope import charts
from rankscope.figures import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.lines import Line, lines_of
from rankscope.profiles.profile import SCHEMA
from rankscope.profiles.shown import middle
from rankscope.report.run import Run
from rankscope.report.sections import Plot, Section
from rankscope.report.tables import Table
from rankscope.report.verdict import FINEST
from rankscope.runs import Manifest, Network

METRIC = "relative_residual"
RUNS, VARIANTS, LABEL = 16, 8, 40
"""Runs drawn side by side, variants of which that is done, and characters of a run's label, at most."""


def titles(runs: Sequence[Run]) -> list[str]:
    """The heading of each run; where two would be the same, with their folders."""
    found = [run.title for run in runs]
    for again in ("name", "path"):
        twice = Counter(found)
        found = [
            title if twice[title] == 1 else f"{run.title} ({_folder(run, again)})"
            for run, title in zip(runs, found, strict=True)
        ]
    return found


def _folder(run: Run, again: str) -> str:
    return run.folder.resolve().name if again == "name" else str(run.folder)


def first_sentence(text: str) -> str:
    """As far as its first full stop.

    >>> first_sentence("Tokens stay apart (0.94 of it). They do.")
    'Tokens stay apart (0.94 of it).'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]


def side_by_side(runs: Sequence[Run], names: Sequence[str]) -> Section:
    """The residual of every variant that several runs measured: a figure, and the numbers at the end."""
    measured = {
        f"{number} {name}": run.measured
        for number, (run, name) in enumerate(zip(runs, names, strict=True), 1)
        if run.measured is not None and METRIC in run.measured.metrics
    }
    have = {name: _finest(each) for name, each in measured.items()}
    number = Counter(variant for variants in have.values() for variant in variants)
    shared = [variant for variant, times in number.items() if times > 1]
    shared = sorted(shared, key=lambda variant: variant != "transformer")[:VARIANTS]
    if not shared:
        return Section("runs", "Side by side")
    rows = []
    for name, variants in have.items():
        ends = [_end(measured[name], each, variants[each]) if each in variants else "" for each in shared]
        if any(ends):
            rows.append([name, *ends])
    table = Table(
        "Relative residual at the last layer", ["run", *shared], rows, titled=True,
        note="Geometric mean over samples, of a corpus the median. Variants that several runs measured.",
    )  # fmt: skip
    views = [(variant, _drawn(measured, have, variant)) for variant in shared]
    most = max(number[variant] for variant in shared)
    few = f" Drawn are the first {RUNS} of {most} runs." if most > RUNS else ""
    plot = Plot("runs", views, f"One variant at a time, a line for each run that measured it.{few}")
    return Section("runs", "Side by side", plots=[plot], tables=[table])


def _finest(measured: Profile | Summary) -> dict[str, str]:
    """The arithmetic in which each variant is shown: one may have fallen back where another did not."""
    found: dict[str, list[str]] = {}
    for variant, arithmetic in measured.lines(METRIC):
        found.setdefault(variant, []).append(arithmetic)
    return {
        variant: next((name for name in FINEST if name in those), those[0])
        for variant, those in found.items()
    }


def _end(measured: Profile | Summary, variant: str, arithmetic: str) -> str:
    """The number at the last layer, marked where it is noise."""
    curve, noise = middle(measured, METRIC, variant, arithmetic)
    return f"{power(curve[-1])} ○" if noise[-1] else power(curve[-1])


def _drawn(
    measured: dict[str, Profile | Summary],
    have: dict[str, dict[str, str]],
    variant: str,
) -> charts.Figure:
    """One variant in every run that has it, each as a line of its own."""
    frames = []
    for name in [name for name, variants in have.items() if variant in variants][:RUNS]:
        logs, values = (
            next(
                line
                for line in lines_of(measured[name], METRIC, log)
                if (line.variant, line.arithmetic) == (variant, have[name][variant])
            )
            for log in (True, False)
        )
        frames.append(_rows(name if len(name) <= LABEL else f"{name[: LABEL - 1].rstrip()}…", logs, values))
    manifest = Manifest(networks=(Network(metrics=(METRIC,)),))
    return charts.curves(Profile(pl.concat(frames), manifest), METRIC, True)


def _rows(name: str, logs: Line, values: Line) -> pl.DataFrame:
    """What is drawn of one run, as a profile of one sample."""
    depth = len(logs.centre)
    return pl.DataFrame(
        {
            "variant": [name] * depth, "arithmetic": [logs.arithmetic] * depth, "sample": [0] * depth,
            "layer": list(range(depth)), "head": [None] * depth, "metric": [METRIC] * depth,
            "value": values.centre, "log10": logs.centre,
            "floor": np.where(np.isnan(logs.floor), 0.0, 10.0**logs.floor), "below_floor": logs.noise,
        },
        schema=SCHEMA,
    )  # fmt: skip
