"""Figure 3 as it is drawn: trajectories as in the paper, and the distance between the tokens by step."""

import math
from itertools import product

import polars as pl

from rankscope.figures.matplotlib import Axes, Figure, panels
from rankscope.figures.style import FAINT, INK, PALETTE
from rankscope.studies.dong2021.circle import ENDS, NETWORKS, RADIUS, distance, path_of

COLOURS = dict(zip(ENDS, (PALETTE[1], PALETTE[7], PALETTE[3], PALETTE[0], PALETTE[2]), strict=True))


def trajectories(table: pl.DataFrame, ends: pl.DataFrame) -> Figure:
    """As in the paper: a row of widths for each network; every seed faintly, one in colour, each up to where
    its tokens have fallen together."""
    widths = ends["width"].unique().sort()
    figure, axes = panels(len(widths), width=3.3, height=3.1, rows=len(NETWORKS))
    for panel, (name, width) in zip(axes, product(NETWORKS, widths), strict=True):
        which = {"network": name, "width": width}
        _ring(panel, table.filter(**which), _shown(ends.filter(**which)))
        panel.set_title(f"{name}, d = {width}", loc="left", fontsize=9)
    return figure


def _shown(ends: pl.DataFrame) -> int:
    """The seed drawn in colour: the middle one of those that end as most do, by when they leave."""
    most = max(ENDS, key=ends["ending"].to_list().count)
    among = ends.filter(ending=most).sort("left", nulls_last=True)
    return int(among["seed"][(among.height - 1) // 2])


def _ring(axes: Axes, part: pl.DataFrame, shown: int) -> None:
    turn = [2 * math.pi * k / 200 for k in range(201)]
    ring = [RADIUS * math.cos(t) for t in turn], [RADIUS * math.sin(t) for t in turn]
    axes.plot(*ring, color=INK, linewidth=0.8, linestyle=":")
    for (seed,), which in part.sort("step", "token").group_by("seed", maintain_order=True):
        path = path_of(which)
        met = (distance(path) < 0.01).nonzero()
        path = path[: int(met[0]) + 1] if len(met) else path
        for token, line in enumerate(path.unbind(1)):
            x, y = line.unbind(-1)
            if seed != shown:
                axes.plot(x, y, color=FAINT, linewidth=0.6, alpha=0.6)
                continue
            colour = PALETTE[token]
            axes.plot(x, y, color=colour, linewidth=1.6, marker=".", markersize=3, zorder=3)
            axes.plot(x[0], y[0], "o", color=colour, markersize=6, zorder=4)
            axes.plot(x[-1], y[-1], "X", color=colour, markersize=8, zorder=4, alpha=0.8)
    axes.set_aspect("equal")
    axes.set(xlim=(-0.62, 0.62), ylim=(-0.62, 0.62), xticks=(-0.3, 0, 0.3), yticks=(-0.3, 0, 0.3))


def distances(table: pl.DataFrame, ends: pl.DataFrame) -> Figure:
    """The distance between the tokens by step, every seed, coloured by where it goes."""
    widths, steps = ends["width"].unique().sort(), int(table["step"].max())  # type: ignore[arg-type]
    figure, axes = panels(len(widths), width=4.0, height=2.3, rows=len(NETWORKS))
    for panel, (name, width) in zip(axes, product(NETWORKS, widths), strict=True):
        for seed, end in ends.filter(network=name, width=width).select("seed", "ending").iter_rows():
            apart = distance(path_of(table.filter(network=name, width=width, seed=seed)))
            apart = apart[: int((apart > 1e-17).sum())] if bool((apart <= 1e-17).any()) else apart
            panel.plot(apart.tolist(), color=COLOURS[end], linewidth=1.2)
            if end in ("ran away", "drifted off"):
                panel.plot(len(apart) - 1, float(apart[-1]), "x", color=COLOURS[end], markersize=5)
        panel.set_yscale("log")
        panel.set(xlim=(-4, steps + 4), ylim=(1e-8, 30), yticks=(1e-8, 1e-4, 1))
        panel.set_title(f"{name}, d = {width}", loc="left", fontsize=9)
    for first in axes[:: len(widths)]:
        first.set_ylabel("distance / diameter", fontsize=9)
    for lowest in axes[-len(widths) :]:
        lowest.set_xlabel("step")
    present = [end for end in ENDS if end in ends["ending"].to_list()]
    handles = [axes[0].plot([], [], color=COLOURS[end], linewidth=2, label=end)[0] for end in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(present), frameon=False)
    return figure
