"""The picture of figure 4: accuracy by path length, ours with the published points."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.figures.matplotlib import Artist, Axes, Figure, panels
from rankscope.figures.style import FAINT, INK, MARKERS, PALETTE
from rankscope.lab.tasks.fixed import FixedTask

LENGTHS = range(7)
WITHOUT_CONTEXT = {"context-free ceiling", "majority by position"}
"""Baselines that see one token alone: its word, or its position."""
LEGEND = (
    "5 paths (own attention)", "20 paths (own attention)", "all paths (exact; shared attention)",
    "5 paths, published", "20 paths, published", "whole network, published",
    "whole network", "best constant guess", "best guess without context",
)  # fmt: skip
Published = dict[str, Any]
"""What the paper's figure has of a task: numbers by name, and curves by path length."""
TITLES = {"memorization": "Memorization", "sort": "Sorting", "hull": "Convex hull"}


def curve(summary: pl.DataFrame, task: str, attention: str, paths: str, what: str = "accuracy") -> list[float]:
    """A column of the summary by path length, of one task and kind of path."""
    part = summary.filter(task=task, attention=attention, paths=paths).sort("length")
    return part[what].to_list()


def effectiveness_figure(summary: pl.DataFrame, tasks: Mapping[str, FixedTask], said: dict[str, Published]) -> Figure:
    """One panel per task: accuracy by path length, ours with the published points."""
    figure, axes = panels(len(tasks), width=4.3, height=4.4)
    for panel, (name, task) in zip(axes, tasks.items(), strict=True):
        _panel(panel, summary, task, said[name])
    axes[0].set_ylabel("accuracy")
    handles_by_label: dict[str, Artist] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    order = [label for label in LEGEND if label in handles_by_label]
    lines = [handles_by_label[label] for label in order]
    figure.legend(lines, order, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _panel(axes: Axes, summary: pl.DataFrame, task: FixedTask, said: Published) -> None:
    name = task.name
    axes.axhline(curve(summary, name, "full", "all")[0], color=INK, linewidth=1.2, label="whole network")
    axes.axhline(said["full"], color=INK, linestyle=":", label="whole network, published")
    axes.axhline(task.baselines["majority"], color=FAINT, linewidth=1.2, linestyle="--", label="best constant guess")
    for which in WITHOUT_CONTEXT & task.baselines.keys():
        axes.axhline(task.baselines[which], color=FAINT, linestyle="-.", label="best guess without context")
    shown = (("own", "5"), ("own", "20"), ("shared", "all"))
    for at, (attention, paths) in enumerate(shown):
        places = [length + 0.08 * (at - 1) for length in LENGTHS]
        axes.errorbar(
            places, curve(summary, name, attention, paths),
            yerr=curve(summary, name, attention, paths, "std") if paths != "all" else None,
            color=PALETTE[at], marker=MARKERS[at], markersize=5, linewidth=1.4,
            elinewidth=1, capsize=2, label=LEGEND[at],
        )  # fmt: skip
        if f"{paths} paths" in said:
            axes.plot(
                places, said[f"{paths} paths"], linestyle="none",
                marker=MARKERS[at], markersize=8, markerfacecolor="none", markeredgecolor=PALETTE[at],
                markeredgewidth=1.0, label=f"{paths} paths, published",
            )  # fmt: skip
    axes.set(xlabel="path length", ylim=(0, 1.02), xticks=list(LENGTHS))
    axes.set_title(TITLES[name], loc="left", fontsize=11)
