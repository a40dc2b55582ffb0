"""Figures: residuals by layer, a figure for each family of remedies; depth reached and its price."""

import math
from collections.abc import Iterable

from rankscope.figures import FAINT, INK, MARKERS, PALETTE, Axes, Figure, label, panels, power, tick
from rankscope.remedies import REMEDIES
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import BARE, PLACES, THRESHOLD, WHOLE, Curves
from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.trial import NONE

PANELS = {"whole, post-norm": ("post", WHOLE), "whole, pre-norm": ("pre", WHOLE), "no skips, post-norm": ("post", BARE)}
HELD, LOWER, COST = PALETTE[0], PALETTE[1], PALETTE[2]


def figures(tables: RemedyMeasurements) -> dict[str, Figure]:
    """All figures that there is something for."""
    priced = any(results.price(tables.costs, remedy) is not None for remedy in tables.remedies)
    drawn = {"price": price_figure(tables)} if len(tables.trained) and priced else {}
    for family, names in families(tables.remedies).items():
        drawn[f"residual_{family}"] = residuals(tables.known, names, tables.deepest)
    return drawn


def families(remedies: Iterable[str]) -> dict[str, list[str]]:
    """Remedies by what of a block they change, whatever their numbers; others are `more`."""
    members: dict[str, list[str]] = {}
    for remedy in remedies:
        name = remedy.partition(":")[0]
        family = REMEDIES.shipped[name].family if name in REMEDIES.shipped else "more"
        if remedy != NONE:
            members.setdefault(family, []).append(remedy)
    return members


def residuals(known: Curves, remedies: list[str], depth: int) -> Figure:
    """Post-norm, pre-norm, and without skips: the median of seeds, and their range."""
    figure, axes = panels(len(PANELS), width=4.3, height=3.7)
    for panel, (title, which) in zip(axes, PANELS.items(), strict=True):
        lowest = -1.2
        for k, remedy in enumerate([*remedies, NONE]):
            lowest = min(lowest, _curve(panel, known, remedy, which, depth, k))
        panel.axhline(math.log10(THRESHOLD), color=FAINT, linewidth=0.8, linestyle=":")
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("layer")
        if lowest < -20:
            panel.set_yscale("symlog", linthresh=1.0)
            panel.set_ylim(lowest * 10, 0.5)
            panel.set_yticks(_ticks(lowest))
        else:
            panel.set_ylim(lowest * 1.08, 0.12)
        if lowest > -2:
            panel.set_yticks([math.log10(value) for value in (1, 0.5, 0.2, 0.1, 0.05, 0.02) if value > 10**lowest])
        panel.yaxis.set_major_formatter(tick if lowest <= -2 else lambda log10, _: power(log10))
    axes[0].set_ylabel("relative residual")
    handles = {name: handle for panel in axes for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    handles = dict(sorted(handles.items(), key=lambda item: item[0] != NONE))
    names, columns = handles.keys(), min(7, len(handles))
    figure.legend(handles.values(), names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _curve(axes: Axes, known: Curves, remedy: str, which: tuple[str, str], depth: int, k: int) -> float:
    """Draw one; its lowest point."""
    given = known.get((remedy, *which, depth), [])
    if not given:
        return 0.0
    by_layer = [sorted(values) for values in zip(*given, strict=True)]
    middle = [values[len(values) // 2] for values in by_layer]
    plain = remedy == NONE
    color = "black" if plain else PALETTE[k % 6]
    layers = range(len(middle))
    axes.fill_between(layers, [v[0] for v in by_layer], [v[-1] for v in by_layer], color=color, alpha=0.15, linewidth=0)
    axes.plot(
        layers, middle, color=color, label=label(remedy), linewidth=1.6, linestyle="--" if plain else "-",
        marker=None if plain else MARKERS[k % len(MARKERS)], markersize=4.5,
        markevery=(k * max(1, depth // 40), max(1, depth // 6)), zorder=3 if plain else 2,
    )  # fmt: skip
    return min((value for value in middle if math.isfinite(value)), default=0.0)


def _ticks(lowest: float) -> list[float]:
    """Powers of ten down to the lowest, few enough to read; the tenth lies on the one where there are many.

    >>> _ticks(-500.0), _ticks(-1e12)
    ([0.0, -1.0, -10.0, -100.0], [0.0, -1000.0, -1000000.0, -1000000000.0, -1000000000000.0])
    """
    last = math.floor(math.log10(-lowest))
    step = max(1, math.ceil((last + 1) / 5))
    return [0.0, *(-(10.0**k) for k in range(0 if step == 1 else step, last + 1, step))]


def price_figure(tables: RemedyMeasurements) -> Figure:
    """A panel a setting, and one of the time per step. In a setting where all learn at all depths, depth says
    nothing: its panel has the loss of the deepest. Rows go from what learns deepest to what does not."""
    settings = results.settings(tables.trained)
    remedies = _by_depth(tables, [setting for setting in settings if not _all_learn(tables, setting)])
    width = 10.5 / (len(settings) + 1)
    figure, axes = panels(len(settings) + 1, width=width, height=0.8 + 0.24 * len(remedies))
    rows = {remedy: -row for row, remedy in enumerate(remedies)}
    for panel, setting in zip(axes, settings, strict=False):
        (_losses if _all_learn(tables, setting) else _depths)(panel, tables, setting, rows)
    _times(axes[-1], tables, rows)
    for panel in axes:
        panel.set_yticks(list(rows.values()), [])
        panel.set_ylim(-len(rows) + 0.4, 0.6)
        panel.grid(visible=False, axis="y")
        if NONE in rows:
            panel.axhspan(rows[NONE] - 0.5, rows[NONE] + 0.5, color=FAINT, alpha=0.18, linewidth=0)
    axes[0].set_yticklabels([label(remedy) for remedy in rows])
    caption = "Arrows: no deeper ones were trained, so more is possible. ×: does not go there."
    if len(tables.slower):
        caption += f" Rings: learns with a learning rate of {tables.slower_rate:g} in place of {results.RATE:g}."
    figure.supxlabel(caption, fontsize=8, color=INK)
    return figure


def _all_learn(tables: RemedyMeasurements, setting: str) -> bool:
    depths = (results.learns(tables.trained, remedy, setting) for remedy in tables.trained["remedy"].unique())
    return all(depth is None or depth.at_limit for depth in depths)


def _by_depth(tables: RemedyMeasurements, settings: list[str]) -> list[str]:
    """Deepest first, of those that are as deep the fastest."""

    def order(remedy: str) -> tuple[float, ...]:
        reached = [results.learns(tables.trained, remedy, setting) for setting in settings]
        cost = results.price(tables.costs, remedy)
        return -sum(depth.layers for depth in reached if depth), 1.0 if cost is None else cost.median

    return sorted(tables.trained["remedy"].unique(maintain_order=True), key=order)


def _depths(axes: Axes, tables: RemedyMeasurements, setting: str, rows: dict[str, int]) -> None:
    """The deepest networks that learn, on an axis of the depths that were tried."""
    depths = [0, *results.depths(tables.trained, setting)]
    for remedy, y in rows.items():
        reached = results.learns(tables.trained, remedy, setting)
        if reached is None:
            axes.plot(0, y, marker="x", color=FAINT, markersize=4)
            continue
        x = depths.index(int(reached.layers))
        color = "black" if remedy == NONE else HELD
        axes.plot([0, x], [y, y], color=color, linewidth=1.2)
        axes.plot(x, y, marker=">" if reached.at_limit else "o", color=color, markersize=5, linestyle="none")
        for depth in results.depths(tables.slower, setting, remedy):
            if depth > reached.layers and depth in depths and results.at(tables.slower, remedy, setting, depth):
                axes.plot(depths.index(depth), y, marker="o", markerfacecolor="none", color=color, markersize=6)
    axes.set_xticks(range(len(depths)), ["none", *map(str, depths[1:])])
    axes.set_xlim(-0.4, len(depths) - 0.6)
    _titled(axes, setting, "learns: layers")


def _losses(axes: Axes, tables: RemedyMeasurements, setting: str, rows: dict[str, int]) -> None:
    """Of the deepest networks, with the range over seeds; the band is that of no remedy."""
    depth = results.depths(tables.trained, setting)[-1]
    for remedy, y in rows.items():
        loss = results.spread(tables.trained, remedy, setting, depth, "loss")
        if loss is None:
            axes.plot(0.02, y, marker="x", color=FAINT, markersize=4, transform=axes.get_yaxis_transform())
            continue
        color = "black" if remedy == NONE else LOWER
        axes.plot([loss.low, loss.high], [y, y], color=color, linewidth=1.2)
        axes.plot(loss.median, y, marker="o", color=color, markersize=5)
        if remedy == NONE:
            axes.axvspan(loss.low, loss.high, color=FAINT, alpha=0.3, linewidth=0)
    _titled(axes, setting, f"loss, {depth} layers")


def _times(axes: Axes, tables: RemedyMeasurements, rows: dict[str, int]) -> None:
    """Of a step, without a remedy one."""
    for remedy, y in rows.items():
        cost = results.price(tables.costs, remedy)
        if cost is not None:
            color = "black" if remedy == NONE else COST
            axes.plot([1, cost.median], [y, y], color=color, linewidth=1.2)
            axes.plot(cost.median, y, marker="o", color=color, markersize=5)
    axes.axvline(1.0, color=FAINT, linewidth=0.8)
    _titled(axes, "price", "time per step, none = 1")


def _titled(axes: Axes, setting: str, below: str) -> None:
    axes.set_title(f"{setting}-norm" if setting in PLACES else setting, loc="left", fontsize=10)
    axes.set_xlabel(below, fontsize=9)
