"""Figures 1 and 5: two tokens in the plane. Without LayerNorm they become one; with it they need not.

N = d = 2, causal, W_Q = W_K = 0, and for w > 1

    A = [[1, 0], [1/2, 1/2]],   W_V = [[1, w], [0, 1]].

Without LN, `X' = A X W_V`: the tokens differ by `2^-t (x_2 - x_1) W_V^t`, and W_V^t grows only linearly.
With LN, `X' = D A X W_V`: token 1 turns to (0, 1) or (0, -1), and token 2, once token 1 rests at (0, 1),
has three points of rest: A = (-1/w, +c), B = (-1/w, -c) with c = sqrt(1 - 1/w^2), and token 1 itself. In
y = X22 / X21 a layer has the slope 1 + X22: A repels, B attracts. The basin map, which the paper does
not have, starts both tokens everywhere on the circle and says where they end.
"""

import math
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope.figures.matplotlib import Axes, Figure, ListedColormap, panels
from rankscope.figures.style import FAINT, INK, PALETTE
from rankscope.profiles import measure
from rankscope.shapes import Float
from rankscope.studies.study import Comparison, Setup, Study, StudyResult
from rankscope.studies.wu2024.panels import TEX, by_layer, powers_of_ten, title
from rankscope.theory.hand_built import equilibrium, equilibrium_network, equilibrium_step

W = 2.0
LAYERS = 40
"""Shown of each trajectory."""
SETTLED = 200
"""Layers after which a start is said to have ended: 1500 give the same map."""
STARTS = {"first": (60.0, 200.0), "second": (20.0, 330.0), "third": (75.0, 100.0)}
"""Angles of token 1 and token 2, in degrees."""
STRENGTHS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""The w of the last panel."""

Pairs = Float[Tensor, "*start 2 2"]
Angles = Float[Tensor, " start"]


def _run(setup: Setup) -> StudyResult:
    count = 720 if setup.full else 180
    paths = setup.cached("trajectories", trajectories, w=W, layers=LAYERS)
    basins = setup.cached("basins", lambda: basin_map(count, W), w=W, number=count, settled=SETTLED)
    shares = setup.cached("shares", lambda: basin_shares(count), w=STRENGTHS, number=count, settled=SETTLED)
    share = float(basins["apart"].mean())  # type: ignore[arg-type]
    comparisons = [
        _collapse(paths),
        *(_slope(name, sign) for name, sign in (("A", 1), ("B", -1))),
        Comparison(
            "two tokens with LN: starts that do not go to rank one",
            "a set of positive measure (Thm 3)",
            f"{share:.1%} of all starts at w = {W:g}",
            share > 0,
            "the paper gives no number; by w: "
            + ", ".join(f"{row['w']:g}: {row['share']:.1%}" for row in shares.iter_rows(named=True)),
        ),
        _boundary(),
    ]
    notes = [
        f"Dynamics are exact and need no model. Basin map: {count} x {count} starts, {SETTLED} layers "
        "each, float64; a start ends at rank two if its tokens are then at an angle whose sine exceeds "
        "1/(2w).",
        "Token 1 alone turns by (x, y) -> (x, y + w x): (0, 1) attracts it from the right and repels it to "
        "the left. B therefore attracts token 2, but from no neighbourhood of both tokens: where token 1 "
        "starts left of (0, 1), however near, it goes round to (0, -1) and takes token 2 along "
        f"({_beyond(basins):.1%} of the starts with token 1 between 90° and 180° end apart).",
    ]
    figures = {"dynamics": _dynamics(paths), "basins": _basins(basins, shares)}
    return StudyResult(figures, {"trajectories": paths, "basins": basins, "shares": shares}, comparisons, notes)


def pairs(first: Angles, second: Angles) -> Pairs:
    """Two tokens on the circle, from their angles in degrees."""
    angle = torch.deg2rad(torch.stack([first, second], -1))
    return torch.stack([angle.cos(), angle.sin()], -1)


def trajectories() -> pl.DataFrame:
    """Angles by layer, and the residual in deviation arithmetic: it falls as 2^-t, below any float."""
    rows = []
    for name, angles in STARTS.items():
        X = pairs(*(torch.tensor([angle], dtype=torch.float64) for angle in angles))
        for norm in (False, True):
            net = equilibrium_network(2, W, LAYERS).variant(norm=norm)
            profile = measure(net, X, metrics=["mu", "relative_mu"])
            mu, relative = (profile.curve(metric, "log10")[0] for metric in profile.metrics)
            for layer, state in enumerate(net.run(X).states):
                turned = torch.atan2(state[0, :, 1], state[0, :, 0]).rad2deg() % 360
                # A3 bounds the products of W_V: without LN each layer is divided by ||W_V||_2.
                shrunk = 0.0 if norm else layer * math.log10(_largest_gain(W))
                rows.append(
                    {
                        "start": name,
                        "norm": norm,
                        "layer": layer,
                        "angle_1": float(turned[0]),
                        "angle_2": float(turned[1]),
                        "log10_mu": float(mu[layer]) - shrunk,
                        "log10_relative_mu": float(relative[layer]),
                    }
                )
    return pl.DataFrame(rows)


def _largest_gain(w: float) -> float:
    """`||W_V||_2`."""
    return float(torch.linalg.matrix_norm(torch.tensor([[1.0, w], [0.0, 1.0]], dtype=torch.float64), 2))


def layer_bounds(X: Pairs, w: float) -> Pairs:
    """Where tokens are after many layers."""
    for _ in range(SETTLED):
        X = equilibrium_step(X, w)
    return X


def stays_apart(X: Pairs, w: float) -> Float[Tensor, "*start"]:
    """1 where two settled tokens are at an angle (at B its sine is 1/w), 0 where they have become one."""
    sine = X[..., 0, 0] * X[..., 1, 1] - X[..., 0, 1] * X[..., 1, 0]
    return (sine.abs() > 1 / (2 * w)).to(X.dtype)


def basin_map(count: int, w: float) -> pl.DataFrame:
    """Both tokens from every angle: whether they end apart, and at which pole token 1 does."""
    angle = (torch.arange(count, dtype=torch.float64) + 0.5) * 360 / count
    # Off by a quarter of a step: opposite tokens average to zero, which no norm can turn anywhere.
    grid = torch.meshgrid(angle, angle + 90 / count, indexing="ij")
    first, second = (axis.flatten() for axis in grid)
    end = layer_bounds(pairs(first, second), w)
    return pl.DataFrame(
        {
            "angle_1": first.numpy(),
            "angle_2": second.numpy(),
            "apart": stays_apart(end, w).bool().numpy(),
            "pole": end[:, 0, 1].sign().to(torch.int64).numpy(),
        }
    )


def basin_shares(count: int) -> pl.DataFrame:
    """The share of starts that end apart, by w."""
    shares_apart = [float(basin_map(count, w)["apart"].mean()) for w in STRENGTHS]  # type: ignore[arg-type]
    return pl.DataFrame({"w": STRENGTHS, "share": shares_apart})


def _beyond(basins: pl.DataFrame) -> float:
    """The share that ends apart of the starts with token 1 left of (0, 1)."""
    return float(basins.filter(pl.col("angle_1").is_between(90, 180))["apart"].mean())  # type: ignore[arg-type]


def _collapse(paths: pl.DataFrame) -> Comparison:
    """Without LN the slope of log2 mu/||X|| by layer is -1, up to what W_V^t adds."""
    last = paths.filter(pl.col("layer").is_in([LAYERS // 2, LAYERS]) & ~pl.col("norm"))
    slopes = []
    for name in STARTS:
        halfway, end = last.filter(start=name)["log10_relative_mu"].to_list()
        slopes.append(10 ** ((end - halfway) / (LAYERS - LAYERS // 2)))
    slowest = max(slopes)
    return Comparison(
        "two tokens without LN",
        "collapse exponentially (Thm 1)",
        f"mu/||X||_F falls by {slowest:.3f} per layer, to "
        f"{10 ** max(last['log10_relative_mu'].to_list()[1::2]):.0e}"
        f" at layer {LAYERS}",
        slowest < 0.6,
        "A halves the difference of the tokens: 1/2 per layer",
    )


def multiplier(sign: int, w: float) -> float:
    """How much one layer multiplies a small move of token 2 away from A (+1) or B (-1), token 1 at rest."""
    X = equilibrium(2, 2, w, [sign])
    slope = float(X[1, 1] / X[1, 0])
    moved = X.clone()
    moved[1] = torch.tensor([1.0, slope + 1e-6], dtype=torch.float64) * X[1, 0].sign()
    moved[1] /= moved[1].norm()
    after = equilibrium_step(moved, w)
    return (float(after[1, 1] / after[1, 0]) - slope) / 1e-6


def _slope(name: str, sign: int) -> Comparison:
    c = math.sqrt(1 - 1 / W**2)
    measured, predicted = multiplier(sign, W), 1 + sign * c
    stable = "stable" if sign < 0 else "unstable"
    return Comparison(
        f"token 2 at {name} = (-1/w, {'+' if sign > 0 else '-'}c)",
        f"{stable}, slope {predicted:.4f}",
        f"slope {measured:.4f}",
        math.isclose(measured, predicted, rel_tol=1e-4) and (measured < 1) == (sign < 0),
    )


def _boundary() -> Comparison:
    """With token 1 at rest, A is the edge of B's basin."""
    second = (torch.arange(3600, dtype=torch.float64) + 0.5) / 10
    X = pairs(torch.full_like(second, 90.0), second)
    apart = stays_apart(layer_bounds(X, W), W).bool()
    left, edge = X[:, 1, 0] < 0, -W * math.sqrt(1 - 1 / W**2)
    expected = left & (X[:, 1, 1] / X[:, 1, 0] > edge)
    return Comparison(
        "token 1 at (0, 1): the starts of token 2 that end at B",
        "A is the unstable point between B and (0, 1)",
        f"those left of the axis and below A, {float(apart.double().mean()):.1%} of the circle",
        bool((apart == expected).all()),
        f"all {len(second)} starts on the side that A separates them to",
    )


def _dynamics(paths: pl.DataFrame) -> Figure:
    figure, (without, with_norm, fall) = panels(3, width=4.4, height=3.8)
    rest = math.degrees(math.atan2(-math.sqrt(1 - 1 / W**2), -1 / W)) % 360
    for k, name in enumerate(STARTS):
        colour = PALETTE[k]
        for norm, axes in ((False, without), (True, with_norm)):
            part = paths.filter(start=name, norm=norm)
            axes.plot(part["layer"], part["angle_1"], color=colour, linestyle="--", linewidth=1.3)
            axes.plot(part["layer"], part["angle_2"], color=colour, linewidth=1.8, marker="o", markersize=2.5)
            look: dict[str, Any] = {"linewidth": 1.8} if norm else {"linewidth": 1.1, "linestyle": ":"}
            label = f"{name} start, {'with' if norm else 'without'} LN"
            fall.plot(part["layer"], part["log10_relative_mu"], color=colour, label=label, **look)
    for axes, name in ((without, "Without LN"), (with_norm, "With LN")):
        title(axes, name)
        by_layer(axes, LAYERS)
        in_degrees(axes)
    without.set_ylabel("direction of the token")
    without.plot([], [], color=INK, linestyle="--", linewidth=1.3, label="token 1")
    without.plot([], [], color=INK, marker="o", markersize=2.5, label="token 2")
    without.legend(fontsize=9, loc="upper right", frameon=False)
    with_norm.axhline(rest, color=FAINT, linewidth=1, linestyle=":")
    with_norm.annotate("B", (LAYERS, rest), xytext=(-4, 4), textcoords="offset points", ha="right", color=INK)
    title(fall, "What tells them apart", xlabel="layer", xlim=(0, LAYERS), ylabel=TEX["relative_mu"])
    powers_of_ten(fall)
    fall.legend(fontsize=8, loc="lower left", frameon=False)
    return figure


def in_degrees(axes: Axes, both: bool = False) -> None:
    """A circle's worth of degrees."""
    ticks, names = [0, 90, 180, 270, 360], ["0°", "90°", "180°", "270°", "360°"]
    axes.set_yticks(ticks, names)
    axes.set_ylim(0, 360)
    if both:
        axes.set_xticks(ticks, names)
        axes.set_xlim(0, 360)


def _basins(basins: pl.DataFrame, shares: pl.DataFrame) -> Figure:
    figure, (circle, torus, by_w) = panels(3, width=4.4, height=4.1)
    _map(circle)
    count = round(math.sqrt(len(basins)))
    image = basins["apart"].to_numpy().reshape(count, count).T.astype(float)
    pole = basins["pole"].to_numpy().reshape(count, count).T
    colours = ListedColormap(["#d9e6f2", PALETTE[1], "#eef3f8", PALETTE[4]])
    extent: dict[str, Any] = {"extent": (0, 360, 0, 360), "origin": "lower", "aspect": "auto"}
    ends = image + np.where(pole > 0, 0, 2)
    torus.imshow(ends, cmap=colours, vmin=0, vmax=3, interpolation="nearest", **extent)
    torus.grid(visible=False)
    in_degrees(torus, both=True)
    title(torus, f"Where both end, $w$ = {W:g}", xlabel="token 1 starts at", ylabel="token 2 starts at")
    for colour, label in (
        (PALETTE[1], "rank 2, token 1 at (0, 1)"),
        (PALETTE[4], "rank 2, token 1 at (0, −1)"),
        ("#d9e6f2", "rank 1"),
    ):
        torus.plot([], [], linestyle="none", marker="s", color=colour, markeredgecolor=FAINT, label=label)
    torus.legend(fontsize=8, loc="upper left", frameon=True, framealpha=0.9)
    by_w.plot(shares["w"], shares["share"], color=PALETTE[1], marker="o", linewidth=1.8)
    by_w.set(xlabel="$w$", ylabel="share of starts", xscale="log", ylim=(0, None))
    title(by_w, "Starts that end at rank 2")
    by_w.set_xticks([1, 2, 5, 10, 30], ["1", "2", "5", "10", "30"])
    by_w.minorticks_off()
    return figure


def _map(axes: Axes) -> None:
    """The direction of token 2 before and after a layer, token 1 at (0, 1): it rests on the diagonal."""
    angle = (torch.arange(720, dtype=torch.float64) + 0.5) / 2
    start = pairs(torch.full_like(angle, 90.0), angle)
    end = equilibrium_step(start, W)[:, 1]
    after = torch.atan2(end[:, 1], end[:, 0]).rad2deg() % 360
    apart = stays_apart(layer_bounds(start, W), W).bool()
    axes.plot([0, 360], [0, 360], color=FAINT, linewidth=1, linestyle="--")
    for chosen, colour, label in ((apart, PALETTE[1], "ends at B"), (~apart, PALETTE[0], "ends at token 1")):
        axes.plot(angle[chosen], after[chosen], linestyle="none", marker=".", markersize=3, color=colour)
        axes.plot([], [], color=colour, linewidth=2, label=label)
    at_A = math.degrees(math.atan2(math.sqrt(1 - 1 / W**2), -1 / W))
    for name, at, filled in (("A", at_A, False), ("B", 360 - at_A, True), ("token 1", 90.0, True)):
        face = INK if filled else "white"
        axes.plot(at, at, marker="o", markersize=7, color=INK, markerfacecolor=face, zorder=4)
        axes.annotate(name, (at, at), xytext=(8, -12), textcoords="offset points", color=INK)
    labels = {"xlabel": "token 2 before", "ylabel": "token 2 after one layer"}
    title(axes, "Token 2, once token 1 rests at (0, 1)", **labels)
    axes.legend(fontsize=9, loc="upper left", frameon=False)
    in_degrees(axes, both=True)


TITLE = "two tokens, without and with LayerNorm (Figures 1 and 5), and their basins"
FIG1 = Study("wu2024", "fig1", TITLE, _run, seconds=12.0)
