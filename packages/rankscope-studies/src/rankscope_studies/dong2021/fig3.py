"""Figure 3: two tokens on a circle. A network learns one step round it; then it is fed its own predictions.

Two tokens in the plane, opposite each other on a circle of radius 0.3, run counter-clockwise; a network of
width d = 32..128 maps the pair at one of 1000 angles to the pair at the next (`circle.py`). Then its
prediction is fed back to it for 300 steps. The paper: pure attention pulls both tokens to one point, less so
with larger d; a skip or an MLP prevents or slows it. Every seed is named by where it goes (`circle.ending`).

Two rows are beside the paper's three. With weight decay training errs inwards. And the published code itself:
its "no skip" layer adds its own input and has norms, and at a rate of 1e-5 its training ends early (its
dropout is left out here).
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import polars as pl

from rankscope.figures import FAINT, INK, PALETTE, Axes, Figure, panels
from rankscope_studies.dong2021 import circle
from rankscope_studies.dong2021.circle import ENDS, NETWORKS, RADIUS, distance, ending, left, path_of
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts

MOST = 0.75  # The share of seeds from which on something is said of a network as such
COLOURS = dict(zip(ENDS, (PALETTE[1], PALETTE[7], PALETTE[3], PALETTE[0], PALETTE[2]), strict=True))
TEXTS = StudyTexts("dong2021", "fig3")


class CircleSizes(NamedTuple):
    """How many networks are trained, for how long, and how far they are followed."""

    seeds: int = 8
    rounds: int = 1500  # Steps of Adam
    published_seeds: int = 4  # Of the published code's network
    published_rounds: int = 70 * 17  # 70 epochs of 17 batches
    widths: tuple[int, ...] = (32, 64, 128)
    steps: int = 300  # Predictions that are fed back

    def training(self, name: str) -> tuple[int, int]:
        """Seeds and steps of Adam of a network of `circle.NETWORKS`."""
        published = NETWORKS[name].as_published
        return (self.published_seeds, self.published_rounds) if published else (self.seeds, self.rounds)


QUICK, FULL = CircleSizes(), CircleSizes(seeds=32, rounds=6000, published_seeds=16)


def _run(setup: Setup, sizes: CircleSizes | None = None) -> StudyResult:
    sizes = sizes or (FULL if setup.full else QUICK)
    parts = []
    for (name, network), width in product(NETWORKS.items(), sizes.widths):
        seeds, rounds = sizes.training(name)
        compute = partial(measured, name, width, sizes, setup.device)
        file = f"{name.replace(', ', '-').replace(' ', '-')}-{width}"
        parts.append(setup.cached(file, compute, seeds=seeds, rounds=rounds, decay=network.decay))
    table = pl.concat(parts)
    ends = endings(table, sizes.steps)
    figures = {"circle": _trajectories(table, ends), "distances": _distances(table, ends)}
    notes = TEXTS.notes(**sizes._asdict(), theirs=sizes.published_seeds, most=MOST)
    return StudyResult(figures, {"trajectories": table, "ends": ends}, list(_comparisons(ends)), notes)


def measured(name: str, width: int, sizes: CircleSizes, device: str) -> pl.DataFrame:
    """Train a network of `circle.NETWORKS`, its seeds side by side, and feed its predictions back to it: where each
    seed goes, up to where it runs away, and what was measured of it."""
    seeds, rounds = sizes.training(name)
    arch = NETWORKS[name].architecture(width)
    tensors = circle.trained(NETWORKS[name], width, seeds, rounds, device)
    paths = circle.followed(arch, tensors, sizes.steps).cpu()
    radial, shift = circle.multipliers(arch, tensors)
    errors, sharp = circle.error(arch, tensors), circle.sharpness(arch, tensors)
    tables = []
    for seed in range(seeds):
        path = paths[:, seed]
        path = path[: int(path[:, 0, 0].isfinite().sum())]
        x, y = path.flatten(0, 1).unbind(-1)
        order = {"step": [step for step in range(len(path)) for _ in (0, 1)], "token": [0, 1] * len(path)}
        labels: dict[str, Any] = {"network": name, "width": width, "seed": seed, "error": float(errors[seed])}
        labels |= {"radial": float(radial[seed]), "shift": float(shift[seed]), "sharpness": float(sharp[seed])}
        columns = {label: pl.lit(value) for label, value in labels.items()}
        tables.append(pl.DataFrame({**order, "x": x.numpy(), "y": y.numpy()}).with_columns(**columns))
    return pl.concat(tables)


def endings(table: pl.DataFrame, steps: int) -> pl.DataFrame:
    """A table of how each seed ends that was followed for so many steps, a row per seed."""
    keys = ["network", "width", "seed", "error", "radial", "shift", "sharpness"]
    rows = []
    for key, part in table.group_by(keys, maintain_order=True):
        path = path_of(part)
        apart = distance(path)
        labels = dict(zip(keys, key, strict=True))
        way = {"ending": ending(path, steps), "inwards_at_first": bool(apart[1] < 1), "left": left(path, steps)}
        rows.append(labels | way | {"last_step": len(path) - 1, "last_distance": float(apart[-1])})
    return pl.DataFrame(rows, infer_schema_length=None)


class NetworkEnds:
    """How the seeds of one network end, by width: as numbers, and as `StudyTexts` has them."""

    def __init__(self, ends: pl.DataFrame, name: str) -> None:
        self.rows = ends.filter(network=name)
        widths = self.rows["width"].unique(maintain_order=True)
        self.by_width = {width: self.rows.filter(width=width) for width in widths}
        self.total = self.rows.height
        self.fell = self.count("fell together")

    def count(self, *kinds: str) -> int:
        """The number of seeds that end in one of these ways."""
        return int(self.rows["ending"].is_in(kinds).sum())

    def medians(self, quantity: str) -> list[float]:
        """The median over seeds by width."""
        return [part[quantity].median() for part in self.by_width.values()]

    @property
    def steps(self) -> list[float]:
        """By width the step at which half the seeds have left; those that never do are infinitely late."""
        lefts = [part["left"].cast(pl.Float64).fill_null(math.inf).sort() for part in self.by_width.values()]
        return [float(values[(len(values) - 1) // 2]) for values in lefts]

    def __str__(self) -> str:
        lines = []
        for width, part in self.by_width.items():
            kinds = part["ending"].to_list()
            counts = ", ".join(f"{kinds.count(end)} {end}" for end in ENDS if end in kinds)
            lines.append(f"d = {width}: {counts}")
        return "; ".join(lines)


def _comparisons(ends: pl.DataFrame) -> Iterator[Comparison]:
    pure, skip, mlp, decayed, published = (NetworkEnds(ends, name) for name in NETWORKS)
    radial, alone = pure.medians("radial"), _steps(pure.steps)
    gone = pure.rows.filter(pl.col("ending").is_in(["fell together", "ran away"]))
    yield TEXTS.compare(
        "pure", pure.fell >= MOST * pure.total, ends=pure, fell=pure.fell, total=pure.total, radial=_listed(radial),
        away=pure.count("ran away"), gone=gone.height,
        foretold=int((gone["inwards_at_first"] == (gone["ending"] == "fell together")).sum()),
    )  # fmt: skip
    decay = next(network.decay for network in NETWORKS.values() if network.decay)
    agrees = decayed.fell >= MOST * decayed.total
    yield TEXTS.compare("decay", agrees, ends=decayed, fell=decayed.fell, total=decayed.total, decay=decay)
    yield TEXTS.compare(
        "width", pure.steps == sorted(pure.steps) and radial == sorted(radial, reverse=True), steps=alone,
        widths=_steps(pure.by_width), sharp=_listed(pure.medians("sharpness")), radial=_listed(radial),
    )  # fmt: skip
    for part, network in (("skip", skip), ("MLP", mlp)):
        slower = all(mine > without for mine, without in zip(network.steps, pure.steps, strict=True))
        yield TEXTS.compare(
            "slows", slower, part=part, ends=network, steps=_steps(network.steps), alone=alone, pure=_listed(radial),
            radial=_listed(network.medians("radial")), why=TEXTS.sentence("slows", part),
        )  # fmt: skip
    yield TEXTS.compare(
        "published_code", published.fell >= MOST * published.total, ends=published, fell=published.fell,
        total=published.total, away=published.count("ran away", "drifted off"),
        errors=_listed(published.medians("error")),
    )  # fmt: skip


def _steps(values: Iterable[float | int]) -> str:
    return ", ".join("never" if math.isinf(value) else f"{value:.0f}" for value in values)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values)


def _trajectories(table: pl.DataFrame, ends: pl.DataFrame) -> Figure:
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


def _distances(table: pl.DataFrame, ends: pl.DataFrame) -> Figure:
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
        panel.set(yscale="log", xlim=(-4, steps + 4), ylim=(1e-8, 30), yticks=(1e-8, 1e-4, 1))
        panel.set_title(f"{name}, d = {width}", loc="left", fontsize=9)
    for first in axes[:: len(widths)]:
        first.set_ylabel("distance / diameter", fontsize=9)
    for lowest in axes[-len(widths) :]:
        lowest.set_xlabel("step")
    present = [end for end in ENDS if end in ends["ending"].to_list()]
    handles = [axes[0].plot([], [], color=COLOURS[end], linewidth=2, label=end)[0] for end in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(present), frameon=False)
    return figure


STUDY = Study("dong2021", "fig3", "two tokens on a circle, fed their own predictions", _run, seconds=155.0)
