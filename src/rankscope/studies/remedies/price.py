"""The figure of how deep networks learn with a remedy, and what it costs: a row a remedy."""

from rankscope.figures.matplotlib import Axes, Figure, panels
from rankscope.figures.style import FAINT, INK, PALETTE
from rankscope.figures.text import label
from rankscope.studies.remedies import learnt
from rankscope.studies.remedies.initial import NONE, PLACES
from rankscope.studies.remedies.table import Tables

HELD, LOWER, COST = PALETTE[0], PALETTE[1], PALETTE[2]


def price(tables: Tables) -> Figure:
    """A panel a setting, and one of the time per step. In a setting where all learn at all depths, depth says
    nothing: its panel has the loss of the deepest. Rows go from what learns deepest to what does not."""
    settings = [each for each in learnt.SETTINGS if learnt.depths(tables.trained, each)]
    remedies = _sorted(tables, [each for each in settings if not _all_learn(tables, each)])
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
        said += f" Rings: learns with a learning rate of {tables.slower_rate:g} in place of {learnt.RATE:g}."
    figure.supxlabel(said, fontsize=8, color=INK)
    return figure


def _all_learn(tables: Tables, setting: str) -> bool:
    found = [learnt.learns(tables.trained, each, setting) for each in _trained(tables)]
    return all(each is None or each.whole for each in found)


def _trained(tables: Tables) -> list[str]:
    return tables.trained["remedy"].unique(maintain_order=True).to_list()


def _sorted(tables: Tables, settings: list[str]) -> list[str]:
    """Deepest first, of those that are as deep the fastest."""

    def order(remedy: str) -> tuple[float, ...]:
        reached = [learnt.learns(tables.trained, remedy, each) for each in settings]
        cost = learnt.price(tables.costs, remedy)
        return -sum(each.layers for each in reached if each), 1.0 if cost is None else cost.median

    return sorted(_trained(tables), key=order)


def _depths(axes: Axes, tables: Tables, setting: str, rows: dict[str, int]) -> None:
    """The deepest networks that learn, on an axis of the depths that were tried."""
    depths = [0, *learnt.depths(tables.trained, setting)]
    for remedy, y in rows.items():
        found = learnt.learns(tables.trained, remedy, setting)
        if found is None:
            axes.plot(0, y, marker="x", color=FAINT, markersize=4)
            continue
        x = depths.index(int(found.layers))
        color = "black" if remedy == NONE else HELD
        axes.plot([0, x], [y, y], color=color, linewidth=1.2)
        axes.plot(x, y, marker=">" if found.whole else "o", color=color, markersize=5, linestyle="none")
        for depth in learnt.depths(tables.slower, setting, remedy):
            if depth > found.layers and depth in depths and learnt.at(tables.slower, remedy, setting, depth):
                axes.plot(
                    depths.index(depth), y, marker="o", markerfacecolor="none", color=color, markersize=6
                )
    axes.set_xticks(range(len(depths)), ["none", *map(str, depths[1:])])
    axes.set_xlim(-0.4, len(depths) - 0.6)
    axes.set_title(_named(setting), loc="left", fontsize=10)
    axes.set_xlabel("learns: layers", fontsize=9)


def _losses(axes: Axes, tables: Tables, setting: str, rows: dict[str, int]) -> None:
    """Of the deepest networks, with the range over seeds; the band is that of no remedy."""
    depth = learnt.depths(tables.trained, setting)[-1]
    for remedy, y in rows.items():
        found = learnt.spread(learnt.values(tables.trained, remedy, setting, depth, "loss"))
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


def _times(axes: Axes, tables: Tables, rows: dict[str, int]) -> None:
    """Of a step, without a remedy one."""
    for remedy, y in rows.items():
        found = learnt.price(tables.costs, remedy)
        if found is not None:
            color = "black" if remedy == NONE else COST
            axes.plot([1, found.median], [y, y], color=color, linewidth=1.2)
            axes.plot(found.median, y, marker="o", color=color, markersize=5)
    axes.axvline(1.0, color=FAINT, linewidth=0.8)
    axes.set_title("price", loc="left", fontsize=10)
    axes.set_xlabel("time per step, none = 1", fontsize=9)


def _named(setting: str) -> str:
    return f"{setting}-norm" if setting in PLACES else setting
