"""Figure 3: two tokens on a circle. A network learns one step round it; then it is fed its own predictions.

Two tokens in the plane, opposite each other on a circle of radius 0.3, run counter-clockwise; a network of
width d = 32..128 maps the pair at one of 1000 angles to the pair at the next (`circle.py`). Then its
prediction is fed back to it for 300 steps. The paper: pure attention pulls both tokens to one point, less so
with larger d; a skip or an MLP prevents or slows it.

Every seed of every network is followed and named by where it goes:

- fell together: their distance comes below a twentieth of the diameter;
- ran away: a token is ten times as far out as the circle is, and not near the other;
- drifted off: the same, but both went together, between half and twice the diameter apart;
- on the circle: all along within half a radius of where they should be;
- apart: none of these in 300 steps.

Two rows are beside the paper's three. With weight decay training errs inwards. And the published code itself:
its "no skip" layer adds its own input and has norms, and at a rate of 1e-5 its training ends early (its
dropout is left out here).
"""

import math
from collections.abc import Iterator

import polars as pl
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rankscope.figures import FAINT, INK, PALETTE, panels
from rankscope.studies.dong2021 import circle
from rankscope.studies.dong2021.circle import NETWORKS, RADIUS
from rankscope.studies.study import Comparison, Outcome, Setup, Study

STEPS = 300
WIDTHS = (32, 64, 128)
TOGETHER = 0.05
"""The share of the diameter below which tokens have fallen together."""
ENDS = ("fell together", "ran away", "drifted off", "apart", "on the circle")
COLOURS = dict(zip(ENDS, (PALETTE[1], PALETTE[7], PALETTE[3], PALETTE[0], PALETTE[2]), strict=True))
QUICK, FULL = (8, 4, 1500), (32, 16, 6000)
"""Seeds, seeds of the published code's network, and steps of Adam."""
PUBLISHED_ROUNDS = 70 * 17
"""70 epochs of 17 batches."""
Path = Float[Tensor, "step 2 2"]


def _run(setup: Setup) -> Outcome:
    seeds, theirs, rounds = FULL if setup.full else QUICK
    parts = []
    for name, network in NETWORKS.items():
        number, length = (theirs, PUBLISHED_ROUNDS) if network.as_published else (seeds, rounds)
        for width in WIDTHS:
            parts.append(
                setup.kept(
                    f"{name.replace(', ', '-').replace(' ', '-')}-{width}",
                    lambda n=name, w=width, s=number, r=length: measured(n, w, s, r, setup.device),
                    seeds=number, rounds=length, decay=network.decay,
                )
            )  # fmt: skip
    table = pl.concat(parts)
    ends = endings(table)
    return Outcome(
        {"circle": _trajectories(table, ends), "distances": _distances(table, ends)},
        {"trajectories": table, "ends": ends},
        list(_comparisons(ends)),
        [
            f"{seeds} seeds of each network, {rounds} steps of Adam on batches of 50 pairs, float64; the "
            f"published code's: {theirs} seeds, {PUBLISHED_ROUNDS} steps, float32, its dropout left out.",
            "No norm, as the paper's text has it, but in the published code's network. Errors are in steps "
            "along the circle: a network that leaves every pair where it is has 1.",
            "Trajectories: from the dot to the cross; in colour the middle one of the seeds that end as most "
            "of them do, the others grey; each up to where its tokens meet.",
            "A head's function here is two matrices of 3 x 3 and 3 x 2 at any width: d changes how "
            "training goes, not what pure attention can compute.",
        ],
    )


def measured(name: str, width: int, seeds: int, rounds: int, device: str) -> pl.DataFrame:
    """Where each seed of a network goes, up to where it runs away; and what was measured of each."""
    arch = NETWORKS[name].architecture(width)
    tensors = circle.trained(NETWORKS[name], width, seeds, rounds, device)
    paths = circle.followed(arch, tensors, STEPS).cpu()
    radial, shift = circle.multipliers(arch, tensors)
    errors, sharp = circle.error(arch, tensors), circle.sharpness(arch, tensors)
    found = []
    for seed in range(seeds):
        path = paths[:, seed]
        path = path[: int(path[:, 0, 0].isfinite().sum())]
        found.append(
            pl.DataFrame(
                {
                    "step": [number for number in range(len(path)) for _ in (0, 1)],
                    "token": [0, 1] * len(path),
                    "x": path[..., 0].flatten().numpy(),
                    "y": path[..., 1].flatten().numpy(),
                }
            ).with_columns(
                network=pl.lit(name), width=pl.lit(width), seed=pl.lit(seed),
                error=pl.lit(float(errors[seed])), radial=pl.lit(float(radial[seed])),
                shift=pl.lit(float(shift[seed])), sharpness=pl.lit(float(sharp[seed])),
            )
        )  # fmt: skip
    return pl.concat(found)


def distance(path: Path) -> Float[Tensor, " step"]:
    """Between the tokens, as a share of the diameter."""
    return (path[:, 0] - path[:, 1]).norm(dim=-1) / (2 * RADIUS)


def ending(path: Path, steps: int = STEPS) -> str:
    """Where a pair goes that was followed for so many steps, or until it ran away."""
    apart = distance(path)
    if bool((apart < TOGETHER).any()):
        return "fell together"
    if len(path) <= steps:
        return "drifted off" if 0.5 <= float(apart[-1]) <= 2 else "ran away"
    gap = (path - circle.circle()[: len(path)]).norm(dim=-1)
    return "on the circle" if float(gap.max()) < RADIUS / 2 else "apart"


def left(path: Path, steps: int = STEPS) -> int | None:
    """The first step at which the distance is below half or above twice the diameter, or a token has run
    away; None if that never comes."""
    apart = distance(path)
    out = ((apart < 0.5) | (apart > 2)).nonzero()
    if len(out):
        return int(out[0])
    return len(path) if len(path) <= steps else None


def endings(table: pl.DataFrame) -> pl.DataFrame:
    """One row per seed."""
    keys = ["network", "width", "seed", "error", "radial", "shift", "sharpness"]
    rows = []
    for key, part in table.group_by(keys, maintain_order=True):
        path = torch.tensor(part.sort("step", "token").select("x", "y").to_numpy()).view(-1, 2, 2)
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "ending": ending(path),
                "inwards_at_first": bool(distance(path)[1] < 1),
                "left": left(path),
                "last_step": len(path) - 1,
                "last_distance": float(distance(path)[-1]),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def _comparisons(ends: pl.DataFrame) -> Iterator[Comparison]:
    names = list(NETWORKS)
    pure = names[0]
    counts = {name: [_counts(ends, name, width) for width in WIDTHS] for name in names}
    steps = {name: [_median_left(ends, name, width) for width in WIDTHS] for name in names}
    radial = {name: [_median(ends, name, width, "radial") for width in WIDTHS] for name in names}
    total = ends.filter(network=pure).height
    fell = _number(counts[pure], "fell together")
    away = _number(counts[pure], "ran away")
    gone = ends.filter(pl.col("network") == pure, pl.col("ending").is_in(["fell together", "ran away"]))
    told = int((gone["inwards_at_first"] == (gone["ending"] == "fell together")).sum())
    yield Comparison(
        "pure attention pulls both tokens to one point", "yes", _told(counts[pure]), 2 * fell >= total,
        f"{fell} of {total} fell together, doubly exponentially; {away} ran away. Without a norm the circle "
        "is unstable: a step makes a small error of the radius "
        f"{_listed(radial[pure])} times as large (3 where attention is uniform, towards 1 where it is sharp)."
        f" Whether the first step errs inwards or outwards tells which way it goes, in {told} of "
        f"{gone.height}",
    )  # fmt: skip
    decayed = names[3]
    fell, total = _number(counts[decayed], "fell together"), ends.filter(network=decayed).height
    yield Comparison(
        "the same, trained with weight decay", "yes", _told(counts[decayed]), 2 * fell >= total,
        f"{fell} of {total} fell together: weight decay makes training err inwards",
    )  # fmt: skip
    sharp = [_median(ends, pure, width, "sharpness") for width in WIDTHS]
    yield Comparison(
        "less so with larger width", "yes",
        f"half the seeds have left the circle by step {_steps(steps[pure])} (d = {_widths()})",
        steps[pure] == sorted(steps[pure]) and radial[pure] == sorted(radial[pure], reverse=True),
        f"wider networks come out of training with sharper attention (larger weight {_listed(sharp)}), hence "
        f"the smaller multiplier ({_listed(radial[pure])}); what they could compute is the same at any width",
    )  # fmt: skip
    for name, why in (
        (names[1], "the skip carries most of the step, so tokens fall together exponentially at most. Those "
                   "that drifted off keep their distance and leave together: a common shift grows too"),
        (names[2], "the MLP acts on each token by itself after attention has mixed them; it could hold the "
                   "radius, but pairs off the circle are not in the training data and nothing asks it to"),
    ):  # fmt: skip
        slower = [mine > alone for mine, alone in zip(steps[name], steps[pure], strict=True)]
        yield Comparison(
            f"{name.removeprefix('with ')} prevents or slows it", "yes",
            f"{_told(counts[name])}; half have left by step {_steps(steps[name])}",
            all(slower),
            f"pure attention: step {_steps(steps[pure])}. Radial multiplier {_listed(radial[name])} against "
            f"{_listed(radial[pure])}: {why}",
        )  # fmt: skip
    theirs = names[4]
    errors = [_median(ends, theirs, width, "error") for width in WIDTHS]
    fell, total = _number(counts[theirs], "fell together"), ends.filter(network=theirs).height
    away = total - fell - _number(counts[theirs], "apart") - _number(counts[theirs], "on the circle")
    yield Comparison(
        "the published code's own network: both tokens at one point", "yes, less so with larger width",
        _told(counts[theirs]), fell > 0 and not away,
        f"{fell} of {total} fell together and {away} left: norms bound the tokens. Its training has hardly "
        f"begun, the more so the narrower it is: errors of {_listed(errors)} steps along the circle",
    )  # fmt: skip


def _counts(ends: pl.DataFrame, name: str, width: int) -> dict[str, int]:
    part = ends.filter(network=name, width=width)["ending"].to_list()
    return {end: part.count(end) for end in ENDS if end in part}


def _number(counts: list[dict[str, int]], end: str) -> int:
    return sum(each.get(end, 0) for each in counts)


def _widths() -> str:
    return ", ".join(map(str, WIDTHS))


def _told(counts: list[dict[str, int]]) -> str:
    return "; ".join(
        f"d = {width}: " + ", ".join(f"{number} {end}" for end, number in each.items())
        for width, each in zip(WIDTHS, counts, strict=True)
    )


def _median(ends: pl.DataFrame, name: str, width: int, what: str) -> float:
    return float(ends.filter(network=name, width=width)[what].median())  # type: ignore[arg-type]


def _median_left(ends: pl.DataFrame, name: str, width: int) -> float:
    """Over seeds; those that never leave count as infinitely late."""
    found = sorted(
        math.inf if each is None else float(each)
        for each in ends.filter(network=name, width=width)["left"].to_list()
    )
    return found[(len(found) - 1) // 2]


def _steps(values: list[float]) -> str:
    return ", ".join("never" if math.isinf(value) else f"{value:.0f}" for value in values)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values)


def _trajectories(table: pl.DataFrame, ends: pl.DataFrame) -> Figure:
    """As in the paper: a row of widths for each network; every seed faintly, one in colour, each up to where
    its tokens have fallen together."""
    figure, axes = panels(len(WIDTHS), width=3.3, height=3.1, rows=len(NETWORKS))
    for row, name in enumerate(NETWORKS):
        for column, width in enumerate(WIDTHS):
            part = table.filter(network=name, width=width)
            _ring(axes[row * len(WIDTHS) + column], part, _shown(ends.filter(network=name, width=width)))
            axes[row * len(WIDTHS) + column].set_title(f"{name}, d = {width}", loc="left", fontsize=9)
    return figure


def _shown(ends: pl.DataFrame) -> int:
    """The seed drawn in colour: the middle one of those that end as most do, by when they leave."""
    most = max(ENDS, key=ends["ending"].to_list().count)
    among = ends.filter(ending=most).sort(pl.col("left").fill_null(STEPS + 1))
    return int(among["seed"][(among.height - 1) // 2])


def _ring(axes: Axes, part: pl.DataFrame, shown: int) -> None:
    turn = [2 * math.pi * k / 200 for k in range(201)]
    ring = [RADIUS * math.cos(t) for t in turn], [RADIUS * math.sin(t) for t in turn]
    axes.plot(*ring, color=INK, linewidth=0.8, linestyle=":")
    for (seed,), one in part.sort("step", "token").group_by("seed", maintain_order=True):
        path = torch.tensor(one.select("x", "y").to_numpy()).view(-1, 2, 2)
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
    figure, axes = panels(len(WIDTHS), width=4.0, height=2.3, rows=len(NETWORKS))
    for row, name in enumerate(NETWORKS):
        for column, width in enumerate(WIDTHS):
            each = axes[row * len(WIDTHS) + column]
            for seed, end in ends.filter(network=name, width=width).select("seed", "ending").iter_rows():
                part = table.filter(network=name, width=width, seed=seed).sort("step", "token")
                apart = distance(torch.tensor(part.select("x", "y").to_numpy()).view(-1, 2, 2))
                apart = apart[: int((apart > 1e-17).sum())] if bool((apart <= 1e-17).any()) else apart
                each.plot(apart.tolist(), color=COLOURS[end], linewidth=1.2)
                if end in ("ran away", "drifted off"):
                    each.plot(len(apart) - 1, float(apart[-1]), "x", color=COLOURS[end], markersize=5)
            each.set_yscale("log")
            each.set(xlim=(-4, STEPS + 4), ylim=(1e-8, 30), yticks=(1e-8, 1e-4, 1))
            each.set_title(f"{name}, d = {width}", loc="left", fontsize=9)
            if column == 0:
                each.set_ylabel("distance / diameter", fontsize=9)
            if row == len(NETWORKS) - 1:
                each.set_xlabel("step")
    present = [end for end in ENDS if end in ends["ending"].to_list()]
    handles = [axes[0].plot([], [], color=COLOURS[end], linewidth=2, label=end)[0] for end in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(present), frameon=False)
    return figure


FIG3 = Study("dong2021", "fig3", "two tokens on a circle, fed their own predictions", _run)
