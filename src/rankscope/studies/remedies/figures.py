"""Figures: residuals by layer, a figure for each family of remedies; depth reached and its price."""

import math
from collections.abc import Iterable

from rankscope.figures.matplotlib import Axes, Figure, panels
from rankscope.figures.style import FAINT, INK, MARKERS, PALETTE
from rankscope.figures.text import label, power, tick
from rankscope.studies.remedies import training_results as results
from rankscope.studies.remedies.at_initialisation import BARE, NONE, PLACES, WHOLE, Curves
from rankscope.studies.remedies.depth_reached import THRESHOLD
from rankscope.studies.remedies.measurements import RemedyMeasurements

FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": ("shaped", "attnscale", "centred"),
    "scores": ("sinkhorn", "logn", "differential", "differential2"),
    "branches": ("rezero", "skipinit", "sqrtl", "lnscale", "deepnorm", "lambda"),
    "values": ("valueresidual", "neutreno", "featscale", "contranorm", "gate", "headgate"),
}
"""By what a remedy changes; others are `more`."""
PANELS = {
    "whole, post-norm": ("post", WHOLE),
    "whole, pre-norm": ("pre", WHOLE),
    "no skips, post-norm": ("post", BARE),
}
HELD, LOWER, COST = PALETTE[0], PALETTE[1], PALETTE[2]


def figures(tables: RemedyMeasurements) -> dict[str, Figure]:
    """All that there is something for."""
    found = {"price": price_figure(tables)} if _priced(tables) else {}
    for family, names in families(tables.remedies).items():
        found[f"residual_{family}"] = residuals(tables.known, names, tables.deepest)
    return found


def families(remedies: Iterable[str]) -> dict[str, list[str]]:
    """The remedies of each family that are there, whatever their numbers."""
    found: dict[str, list[str]] = {}
    for remedy in remedies:
        name = remedy.partition(":")[0]
        family = next((key for key, names in FAMILIES.items() if name in names), "more")
        if remedy != NONE:
            found.setdefault(family, []).append(remedy)
    return found


def residuals(known: Curves, remedies: list[str], depth: int) -> Figure:
    """Post-norm, pre-norm, and without skips: the median of seeds, and their range."""
    figure, axes = panels(len(PANELS), width=4.3, height=3.7)
    for place, (title, which) in zip(axes, PANELS.items(), strict=True):
        lowest = -1.2
        for number, remedy in enumerate([*remedies, NONE]):
            lowest = min(lowest, _curve(place, known, remedy, which, depth, number))
        place.axhline(math.log10(THRESHOLD), color=FAINT, linewidth=0.8, linestyle=":")
        place.set_title(title, loc="left", fontsize=10)
        place.set_xlabel("layer")
        if lowest < -20:
            place.set_yscale("symlog", linthresh=1.0)
            place.set_ylim(lowest * 10, 0.5)
            place.set_yticks(_ticks(lowest))
        else:
            place.set_ylim(lowest * 1.08, 0.12)
        if lowest > -2:
            place.set_yticks(
                [math.log10(each) for each in (1, 0.5, 0.2, 0.1, 0.05, 0.02) if each > 10**lowest]
            )
        place.yaxis.set_major_formatter(tick if lowest <= -2 else lambda log10, _: power(log10))
    axes[0].set_ylabel("relative residual")
    handles = {
        name: each for place in axes for each, name in zip(*place.get_legend_handles_labels(), strict=True)
    }
    handles = dict(sorted(handles.items(), key=lambda each: each[0] != NONE))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(7, len(handles)),
        frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def _curve(axes: Axes, known: Curves, remedy: str, which: tuple[str, str], depth: int, number: int) -> float:
    """Draw one; its lowest point."""
    given = known.get((remedy, *which, depth), [])
    if not given:
        return 0.0
    by_layer = [sorted(values) for values in zip(*given, strict=True)]
    middle = [values[len(values) // 2] for values in by_layer]
    plain = remedy == NONE
    color = "black" if plain else PALETTE[number % 6]
    layers = range(len(middle))
    axes.fill_between(
        layers, [v[0] for v in by_layer], [v[-1] for v in by_layer], color=color, alpha=0.15, linewidth=0
    )
    axes.plot(
        layers, middle, color=color, label=label(remedy), linewidth=1.6, linestyle="--" if plain else "-",
        marker=None if plain else MARKERS[number % len(MARKERS)], markersize=4.5,
        markevery=(number * max(1, depth // 40), max(1, depth // 6)), zorder=3 if plain else 2,
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


def _priced(tables: RemedyMeasurements) -> bool:
    return len(tables.trained) > 0 and any(
        results.price(tables.costs, remedy) is not None for remedy in tables.remedies
    )


def price_figure(tables: RemedyMeasurements) -> Figure:
    """A panel a setting, and one of the time per step. In a setting where all learn at all depths, depth says
    nothing: its panel has the loss of the deepest. Rows go from what learns deepest to what does not."""
    settings = [each for each in results.SETTINGS if results.depths(tables.trained, each)]
    remedies = _by_depth(tables, [each for each in settings if not _all_learn(tables, each)])
    width = 10.5 / (len(settings) + 1)
    figure, axes = panels(len(settings) + 1, width=width, height=0.8 + 0.24 * len(remedies))
    rows = {remedy: -row for row, remedy in enumerate(remedies)}
    for place, setting in zip(axes, settings, strict=False):
        (_losses if _all_learn(tables, setting) else _depths)(place, tables, setting, rows)
    _times(axes[-1], tables, rows)
    for place in axes:
        place.set_yticks(list(rows.values()), [])
        place.set_ylim(-len(rows) + 0.4, 0.6)
        place.grid(visible=False, axis="y")
        if NONE in rows:
            place.axhspan(rows[NONE] - 0.5, rows[NONE] + 0.5, color=FAINT, alpha=0.18, linewidth=0)
    axes[0].set_yticklabels([label(each) for each in rows])
    said = "Arrows: no deeper ones were trained, so more is possible. ×: does not go there."
    if len(tables.slower):
        said += f" Rings: learns with a learning rate of {tables.slower_rate:g} in place of {results.RATE:g}."
    figure.supxlabel(said, fontsize=8, color=INK)
    return figure


def _all_learn(tables: RemedyMeasurements, setting: str) -> bool:
    found = [results.learns(tables.trained, each, setting) for each in _trained(tables)]
    return all(each is None or each.whole for each in found)


def _trained(tables: RemedyMeasurements) -> list[str]:
    return tables.trained["remedy"].unique(maintain_order=True).to_list()


def _by_depth(tables: RemedyMeasurements, settings: list[str]) -> list[str]:
    """Deepest first, of those that are as deep the fastest."""

    def order(remedy: str) -> tuple[float, ...]:
        reached = [results.learns(tables.trained, remedy, each) for each in settings]
        cost = results.price(tables.costs, remedy)
        return -sum(each.layers for each in reached if each), 1.0 if cost is None else cost.median

    return sorted(_trained(tables), key=order)


def _depths(axes: Axes, tables: RemedyMeasurements, setting: str, rows: dict[str, int]) -> None:
    """The deepest networks that learn, on an axis of the depths that were tried."""
    depths = [0, *results.depths(tables.trained, setting)]
    for remedy, y in rows.items():
        found = results.learns(tables.trained, remedy, setting)
        if found is None:
            axes.plot(0, y, marker="x", color=FAINT, markersize=4)
            continue
        x = depths.index(int(found.layers))
        color = "black" if remedy == NONE else HELD
        axes.plot([0, x], [y, y], color=color, linewidth=1.2)
        axes.plot(x, y, marker=">" if found.whole else "o", color=color, markersize=5, linestyle="none")
        for depth in results.depths(tables.slower, setting, remedy):
            if depth > found.layers and depth in depths and results.at(tables.slower, remedy, setting, depth):
                axes.plot(
                    depths.index(depth), y, marker="o", markerfacecolor="none", color=color, markersize=6
                )
    axes.set_xticks(range(len(depths)), ["none", *map(str, depths[1:])])
    axes.set_xlim(-0.4, len(depths) - 0.6)
    axes.set_title(_named(setting), loc="left", fontsize=10)
    axes.set_xlabel("learns: layers", fontsize=9)


def _losses(axes: Axes, tables: RemedyMeasurements, setting: str, rows: dict[str, int]) -> None:
    """Of the deepest networks, with the range over seeds; the band is that of no remedy."""
    depth = results.depths(tables.trained, setting)[-1]
    for remedy, y in rows.items():
        found = results.spread(results.values(tables.trained, remedy, setting, depth, "loss"))
        if found is None:
            axes.plot(0.02, y, marker="x", color=FAINT, markersize=4, transform=axes.get_yaxis_transform())
            continue
        color = "black" if remedy == NONE else LOWER
        axes.plot([found.low, found.high], [y, y], color=color, linewidth=1.2)
        axes.plot(found.median, y, marker="o", color=color, markersize=5)
        if remedy == NONE:
            axes.axvspan(found.low, found.high, color=FAINT, alpha=0.3, linewidth=0)
    axes.set_title(_named(setting), loc="left", fontsize=10)
    axes.set_xlabel(f"loss, {depth} layers", fontsize=9)


def _times(axes: Axes, tables: RemedyMeasurements, rows: dict[str, int]) -> None:
    """Of a step, without a remedy one."""
    for remedy, y in rows.items():
        found = results.price(tables.costs, remedy)
        if found is not None:
            color = "black" if remedy == NONE else COST
            axes.plot([1, found.median], [y, y], color=color, linewidth=1.2)
            axes.plot(found.median, y, marker="o", color=color, markersize=5)
    axes.axvline(1.0, color=FAINT, linewidth=0.8)
    axes.set_title("price", loc="left", fontsize=10)
    axes.set_xlabel("time per step, none = 1", fontsize=9)


def _named(setting: str) -> str:
    return f"{setting}-norm" if setting in PLACES else setting
