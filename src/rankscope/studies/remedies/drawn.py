"""Figures: residuals by layer, a figure for each family of remedies; depth reached and its price."""

import math
from collections.abc import Iterable

from rankscope.figures.matplotlib import Axes, Figure, panels
from rankscope.figures.style import FAINT, MARKERS, PALETTE
from rankscope.figures.text import label, power, tick
from rankscope.studies.remedies import learnt
from rankscope.studies.remedies.initial import BARE, NONE, WHOLE, Curves
from rankscope.studies.remedies.price import price
from rankscope.studies.remedies.reached import THRESHOLD
from rankscope.studies.remedies.table import Tables

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


def figures(tables: Tables) -> dict[str, Figure]:
    """All that there is something for."""
    found = {"price": price(tables)} if _priced(tables) else {}
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


def _priced(tables: Tables) -> bool:
    return len(tables.trained) > 0 and any(
        learnt.price(tables.costs, remedy) is not None for remedy in tables.remedies
    )
