"""The figures of a profile that are printed: one a metric, and one for each variant seen in several
arithmetics."""

import re
from dataclasses import replace

from rankscope.figures.matplotlib import Figure
from rankscope.figures.plot import plot
from rankscope.profiles import Profile, Summary
from rankscope.profiles.figures import arithmetics_chart, curves_chart
from rankscope.report.sections import compared_arithmetics


def printed(profile: Profile | Summary) -> dict[str, Figure]:
    """All of them, by the name of their file; of a metric linear beside logarithmic: what a person sees, and
    what is really there."""
    figures: dict[str, Figure] = {}
    for variant, curves in compared_arithmetics(profile).items():
        name = "arithmetics_" + re.sub(r"[^\w.+-]+", "_", variant)[:80]  # a hub id has a slash
        figures[name if name not in figures else f"{name}_{len(figures)}"] = plot(arithmetics_chart(curves))
    for metric in profile.metrics:
        linear, log = (curves_chart(profile.views(metric), log) for log in (False, True))
        figures[metric] = plot(replace(linear.beside(log), size=(5.0, 4.0)))
    return figures
