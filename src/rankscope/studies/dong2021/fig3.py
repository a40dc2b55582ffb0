"""Figure 3: two tokens on a circle. A network learns one step round it; then it is fed its own predictions.

Two tokens in the plane, opposite each other on a circle of radius 0.3, run counter-clockwise; a network of
width d = 32..128 maps the pair at one of 1000 angles to the pair at the next (`circle.py`). Then its
prediction is fed back to it for 300 steps. The paper: pure attention pulls both tokens to one point, less so
with larger d; a skip or an MLP prevents or slows it.

Every seed of every network is followed and named by where it goes (`endings.py`): fell together, ran away,
drifted off, stayed apart, or on the circle.

Two rows are beside the paper's three. With weight decay training errs inwards. And the published code itself:
its "no skip" layer adds its own input and has norms, and at a rate of 1e-5 its training ends early (its
dropout is left out here).
"""

import math
from collections.abc import Iterable, Iterator

import polars as pl

from rankscope.studies.dong2021 import circle
from rankscope.studies.dong2021.circle import ENDS, NETWORKS, distance, ending, left, path_of
from rankscope.studies.dong2021.fig3_figure import distances, trajectories
from rankscope.studies.study import Comparison, Setup, Study, StudyResult

STEPS = 300
WIDTHS = (32, 64, 128)
MOST = 0.75
"""The share of seeds from which on something is said of a network as such."""
QUICK, FULL = (8, 4, 1500), (32, 16, 6000)
"""Seeds, seeds of the published code's network, and steps of Adam."""
PUBLISHED_ROUNDS = 70 * 17
"""70 epochs of 17 batches."""


def _run(setup: Setup) -> StudyResult:
    seeds, theirs, rounds = FULL if setup.full else QUICK
    parts = []
    for name, network in NETWORKS.items():
        count, length = (theirs, PUBLISHED_ROUNDS) if network.as_published else (seeds, rounds)
        for width in WIDTHS:
            parts.append(
                setup.cached(
                    f"{name.replace(', ', '-').replace(' ', '-')}-{width}",
                    lambda n=name, w=width, s=count, r=length: measured(n, w, s, r, setup.device),
                    seeds=count, rounds=length, decay=network.decay,
                )
            )  # fmt: skip
    table = pl.concat(parts)
    ends = endings(table)
    return StudyResult(
        {"circle": trajectories(table, ends), "distances": distances(table, ends)},
        {"trajectories": table, "ends": ends},
        list(_comparisons(ends)),
        [
            f"{seeds} seeds of each network, {rounds} steps of Adam on batches of 50 pairs, float64; the "
            f"published code's: {theirs} seeds, {PUBLISHED_ROUNDS} steps, float32, its dropout left out.",
            f"A network is said to pull its tokens together where at least {MOST:.0%} of its seeds do. "
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
    values = []
    for seed in range(seeds):
        path = paths[:, seed]
        path = path[: int(path[:, 0, 0].isfinite().sum())]
        values.append(
            pl.DataFrame(
                {
                    "step": [count for count in range(len(path)) for _ in (0, 1)],
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
    return pl.concat(values)


def endings(table: pl.DataFrame) -> pl.DataFrame:
    """A table of how each seed ends, a row per seed."""
    keys = ["network", "width", "seed", "error", "radial", "shift", "sharpness"]
    rows = []
    for key, part in table.group_by(keys, maintain_order=True):
        path = path_of(part)
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "ending": ending(path, STEPS),
                "inwards_at_first": bool(distance(path)[1] < 1),
                "left": left(path, STEPS),
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
    radial = {name: _medians(ends, name, "radial") for name in names}
    fell, total = _number(counts[pure], "fell together"), ends.filter(network=pure).height
    away = _number(counts[pure], "ran away")
    gone = ends.filter(pl.col("network") == pure, pl.col("ending").is_in(["fell together", "ran away"]))
    told = int((gone["inwards_at_first"] == (gone["ending"] == "fell together")).sum())
    yield Comparison(
        "pure attention pulls both tokens to one point", "yes", _told(counts[pure]), fell >= MOST * total,
        f"{fell} of {total} fell together, doubly exponentially; {away} ran away. Without a norm the circle "
        "is unstable: a step makes a small error of the radius "
        f"{_listed(radial[pure])} times as large (3 where attention is uniform, towards 1 where it is sharp)."
        f" Whether the first step errs inwards or outwards tells which way it goes, in {told} of "
        f"{gone.height}",
    )  # fmt: skip
    decayed = names[3]
    fell, total = _number(counts[decayed], "fell together"), ends.filter(network=decayed).height
    yield Comparison(
        "the same, trained with weight decay", "yes", _told(counts[decayed]), fell >= MOST * total,
        f"{fell} of {total} fell together: a decay of {NETWORKS[decayed].decay} makes training err inwards",
    )  # fmt: skip
    sharp = _medians(ends, pure, "sharpness")
    yield Comparison(
        "less so with larger width", "yes",
        f"half the seeds have left the circle by step {_steps(steps[pure])} (d = {_steps(WIDTHS)})",
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
    errors = _medians(ends, theirs, "error")
    fell, total = _number(counts[theirs], "fell together"), ends.filter(network=theirs).height
    away = total - fell - _number(counts[theirs], "apart") - _number(counts[theirs], "on the circle")
    yield Comparison(
        "the published code's own network: both tokens at one point", "yes",
        _told(counts[theirs]), fell >= MOST * total,
        f"{fell} of {total} fell together, as the paper draws, and {away} left: norms bound the tokens; the "
        "others stop at two points. Its training has hardly begun, the less so the wider it is: errors of "
        f"{_listed(errors)} steps along the circle",
    )  # fmt: skip


def _counts(ends: pl.DataFrame, name: str, width: int) -> dict[str, int]:
    part = ends.filter(network=name, width=width)["ending"].to_list()
    return {end: part.count(end) for end in ENDS if end in part}


def _number(counts: list[dict[str, int]], end: str) -> int:
    return sum(ends_of.get(end, 0) for ends_of in counts)


def _told(counts: list[dict[str, int]]) -> str:
    return "; ".join(
        f"d = {width}: " + ", ".join(f"{count} {end}" for end, count in ends_of.items())
        for width, ends_of in zip(WIDTHS, counts, strict=True)
    )


def _medians(ends: pl.DataFrame, name: str, what: str) -> list[float]:
    """By width."""
    return [ends.filter(network=name, width=width)[what].median() for width in WIDTHS]


def _median_left(ends: pl.DataFrame, name: str, width: int) -> float:
    """Over seeds; those that never leave count as infinitely late."""
    values = ends.filter(network=name, width=width)["left"].cast(pl.Float64).fill_null(math.inf).sort()
    return float(values[(len(values) - 1) // 2])


def _steps(values: Iterable[float | int]) -> str:
    return ", ".join("never" if math.isinf(value) else f"{value:.0f}" for value in values)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values)


FIG3 = Study("dong2021", "fig3", "two tokens on a circle, fed their own predictions", _run, seconds=155.0)
