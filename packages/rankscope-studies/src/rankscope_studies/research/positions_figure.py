"""The figure of the source tokens that outputs come from (`chowdhury2026.py`): theory beside networks."""

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope_studies.chowdhury2026 import density

ROW = 2  # Panels in a row
POSITION = "source token, over the last"


def positions_chart(paths: pl.DataFrame, a: float, models: pl.DataFrame) -> fig.Chart:
    """Which source tokens the last one comes from: six panels, theory beside networks.

    Args:
        paths: layers · source · share of networks with uniform attention, by sums over paths.
        a: Their weight of attention.
        models: model · layers · seed · source · share · size · published · independent of networks at their
            initialisation and trained; lines are means over seeds, bands go from the least to the largest.
    """
    deep = models.filter(pl.col("layers") == 12)
    families = {family: [f"{family}, {tokens}" for tokens in ("unit tokens", "small tokens")]
                for family in ("GPT-2", "Llama")}  # fmt: skip
    small = {(name, layers): models.filter(model=name, layers=layers)
             for name in ("small GPT before training", "small GPT trained") for layers in (6, 12)}  # fmt: skip
    trained = {f"{name}, {layers} layers": rows for (name, layers), rows in small.items()}
    random = {name: deep.filter(model=name) for names in families.values() for name in names}
    both_ways = {"MiniLM, all tokens": models.filter(model="MiniLM, all tokens")}
    panels = [_uniform_panel(paths, a)]
    for family, names in families.items():
        marks = []
        for index, name in enumerate(names):
            rows = random[name]
            marks += _profiles(rows, "size", index, name.partition(", ")[2])
            marks += _profiles(rows, "published", index, "published density" if index == 0 else None, "dash")
            marks += _profiles(rows, "independent", index, "independent paths" if index == 0 else None, "dot")
        panels.append(_sizes_panel(marks, f"{family} at initialisation, 12 layers"))
    marks = []
    for index, (name, rows) in enumerate(trained.items()):
        marks += _profiles(rows, "size", index, name.replace("small GPT ", ""))
    marks += _profiles(small["small GPT trained", 12], "published", 3, "published for trained, 12 layers", "dash")
    panels.append(_sizes_panel(marks, "small GPTs, before and after"))
    quarters = {k / 4: f"{k / 4:.0%}" for k in range(5)}
    up = fig.Axis("share of this and earlier tokens", range=(-0.05, 1.65), labels=quarters)  # The legend is above
    random.pop("Llama, unit tokens")  # Its shares are those of GPT-2, line upon line
    for shown, heading in (
        (random, "shares at initialisation (dashed: published density)"),
        (trained | both_ways, "shares before and after training"),
    ):
        lines: list[fig.Line] = []
        for index, (name, rows) in enumerate(shown.items()):
            lines += _profiles(rows, "share", index, name.replace("small GPT ", ""), logs=False)
            if shown is random:
                lines += _profiles(rows, "published", index, None, "dash", logs=False)
        panels.append(fig.Panel(fig.Axis(POSITION, range=(-0.02, 1.04)), up, lines, heading))
    return fig.Chart(
        panels, models.to_dict(as_series=False),
        "Which source tokens the last one comes from: with uniform attention as predicted, in random networks and in "
        "trained ones.",
        columns=ROW, size=(5.2, 3.6), height=320,
    )  # fmt: skip


def _uniform_panel(paths: pl.DataFrame, a: float) -> fig.Panel:
    """The published density beside the exact shares, times the number of tokens n; rings are its mass at the last.

    Token j stands at the middle of ((j-1) / n, j / n].
    """
    x = np.linspace(0.004, 1.0, 400)
    marks: list[fig.Line | fig.Points] = []
    for index, ((layers,), rows) in enumerate(paths.group_by("layers", maintain_order=True)):
        n, colour, weights = len(rows), fig.line_colour(index), [a] * int(str(layers))
        logs = np.log10(n * rows["share"].to_numpy())
        places = (rows["source"].to_numpy() + 0.5) / n
        last = np.log10(n * (1 - a) ** len(weights))
        hover: list[fig.Hover] = [
            (f"{layers} layers, token {k + 1} of {n}\n", f"{10**y:.3g}", "") for k, y in enumerate(logs)
        ]
        marks.append(fig.Line(x, np.log10(density(x, weights)), colour, f"{layers} layers", width=1.4))
        marks.append(fig.Points(places, logs, colour, size=4.0, hover=hover))
        marks.append(fig.Points(places[-1:], [last], colour, size=11.0, hollow=np.ones(1, dtype=bool)))
    powers = fig.Powers([y for mark in marks for y in mark.y])
    return fig.Panel(fig.Axis(POSITION, range=(-0.02, 1.04)), fig.Axis("density", powers), marks,
                     f"uniform attention, a = {a:g}: density, and sums over paths")  # fmt: skip


def _sizes_panel(marks: list[fig.Line], heading: str) -> fig.Panel:
    powers = fig.Powers([y for mark in marks for y in mark.y])
    return fig.Panel(
        fig.Axis(POSITION, range=(-0.02, 1.04)), fig.Axis("size of the term, mean 1", powers), marks, heading
    )


def _profiles(
    rows: pl.DataFrame, column: str, index: int, name: str | None, dash: str = "solid", logs: bool = True
) -> list[fig.Line]:
    """The mean over seeds of a column by source, times the number of tokens, in log10; or added up from the first."""
    if not len(rows):
        return []
    grid = rows.sort("seed", "source")[column].to_numpy().reshape(rows["seed"].n_unique(), -1)
    n = grid.shape[1]
    grid = n * grid if logs else np.cumsum(grid, 1)
    middle, low, high = (np.log10(y) if logs else y for y in (grid.mean(0), grid.min(0), grid.max(0)))
    places = np.arange(1, n + 1) / n
    hover: list[fig.Hover] = [(f"{name or column}, token {k + 1} of {n}\n", f"{10**y if logs else y:.3g}", "")
                              for k, y in enumerate(middle)]  # fmt: skip
    bands = [(low, high)] if dash == "solid" and len(grid) > 1 else []
    width = 1.8 if dash == "solid" else 1.2
    return [fig.Line(places, middle, fig.line_colour(index), name, dash=dash, width=width, bands=bands, hover=hover)]
