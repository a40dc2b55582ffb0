"""The figures of a profile that are printed: one a metric, and one for each variant seen in several
arithmetics."""

import re

from rankscope.figures.matplotlib import Figure, panels
from rankscope.profiles import Profile, Summary
from rankscope.profiles.plot import draw_arithmetics, draw_curves, draw_key
from rankscope.report.sections import compared_arithmetics


def printed(profile: Profile | Summary) -> dict[str, Figure]:
    """All of them, by the name of their file."""
    figures = {metric: _figure(profile, metric) for metric in profile.metrics}
    return {**_arithmetics(profile), **figures}


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
