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
from matplotlib.colors import ListedColormap
from torch import Tensor

from rankscope.figures import FAINT, INK, PALETTE, Axes, Figure, panels
from rankscope.profiles import measure
from rankscope.shapes import Float
from rankscope_studies.hand_built import equilibrium, equilibrium_network, equilibrium_step
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024.panels import TEX, by_layer, powers_of_ten, title

W = 2.0
C = math.sqrt(1 - 1 / W**2)
LAYERS = 40  # Shown of each trajectory
SETTLED = 200  # Layers after which a start is said to have ended: 1500 give the same map
STARTS = {"first": (60.0, 200.0), "second": (20.0, 330.0), "third": (75.0, 100.0)}  # Angles of tokens 1 and 2, degrees
STRENGTHS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # The w of the last panel
DEGREES = ([0, 90, 180, 270, 360], ["0°", "90°", "180°", "270°", "360°"])
TEXTS = StudyTexts("wu2024", "fig1")

Pairs = Float[Tensor, "*start 2 2"]
Angles = Float[Tensor, " start"]


def _run(setup: Setup) -> StudyResult:
    count = 720 if setup.full else 180
    paths = setup.cached("trajectories", trajectories, w=W, layers=LAYERS)
    basins = setup.cached("basins", lambda: basin_map(count, W), w=W, number=count, settled=SETTLED)
    shares = setup.cached("shares", lambda: basin_shares(count), w=STRENGTHS, number=count, settled=SETTLED)
    share = _share_apart(basins)
    by_w = ", ".join(f"{w:g}: {share_apart:.1%}" for w, share_apart in shares.iter_rows())
    positive_measure = TEXTS.compare("measure", share > 0, share=share, w=W, by_w=by_w)
    comparisons = [_collapse(paths), _slope("A", 1), _slope("B", -1), positive_measure, _boundary()]
    beyond = _share_apart(basins.filter(pl.col("angle_1").is_between(90, 180)))
    notes = TEXTS.notes(count=count, layers=SETTLED, beyond=beyond)
    figures = {"dynamics": _dynamics(paths), "basins": _basins(basins, shares)}
    return StudyResult(figures, {"trajectories": paths, "basins": basins, "shares": shares}, comparisons, notes)


def pairs(first: Angles, second: Angles) -> Pairs:
    """Two tokens on the circle, from their angles in degrees."""
    angle = torch.deg2rad(torch.stack([first, second], -1))
    return torch.stack([angle.cos(), angle.sin()], -1)


def trajectories(layers: int = LAYERS) -> pl.DataFrame:
    """Angles by layer, and the residual in deviation arithmetic: it falls as 2^-t, below any float."""
    W_V = torch.tensor([[1.0, W], [0.0, 1.0]], dtype=torch.float64)
    largest_gain = float(torch.linalg.matrix_norm(W_V, 2))
    tables = []
    for name, angles in STARTS.items():
        X = pairs(*(torch.tensor([angle], dtype=torch.float64) for angle in angles))
        for norm in (False, True):
            net = equilibrium_network(2, W, layers).variant(norm=norm)
            profile = measure(net, X, metrics=["mu", "relative_mu"])
            mu, relative = (profile.curve(metric, "log10")[0] for metric in profile.metrics)
            tokens = torch.cat(list(net.run(X).states))  # [layer, token, 2]
            turned = torch.atan2(tokens[..., 1], tokens[..., 0]).rad2deg() % 360
            # A3 bounds the products of W_V: without LN each layer is divided by ||W_V||_2.
            shrunk = [0.0 if norm else layer * math.log10(largest_gain) for layer in range(layers + 1)]
            columns = {"angle_1": turned[:, 0].numpy(), "angle_2": turned[:, 1].numpy()}
            columns |= {"log10_mu": mu.numpy() - shrunk, "log10_relative_mu": relative.numpy()}
            tables.append(pl.DataFrame({"start": name, "norm": norm, "layer": range(layers + 1), **columns}))
    return pl.concat(tables)


def settled(X: Pairs, w: float) -> Pairs:
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
    end = settled(pairs(first, second), w)
    apart, pole = stays_apart(end, w).bool(), end[:, 0, 1].sign().to(torch.int64)
    return pl.DataFrame({"angle_1": first, "angle_2": second, "apart": apart, "pole": pole})


def basin_shares(count: int) -> pl.DataFrame:
    """The share of starts that end apart, by w."""
    return pl.DataFrame({"w": STRENGTHS, "share": [_share_apart(basin_map(count, w)) for w in STRENGTHS]})


def _share_apart(basins: pl.DataFrame) -> float:
    return float(basins["apart"].mean())  # type: ignore[arg-type]


def _collapse(paths: pl.DataFrame) -> Comparison:
    """Without LN the slope of log2 mu/||X|| by layer is -1, up to what W_V^t adds."""
    last = paths.filter(pl.col("layer").is_in([LAYERS // 2, LAYERS]) & ~pl.col("norm"))
    slopes, ends = [], []
    for name in STARTS:
        halfway, end = last.filter(start=name)["log10_relative_mu"].to_list()
        slopes.append(10 ** ((end - halfway) / (LAYERS - LAYERS // 2)))
        ends.append(end)
    slowest = max(slopes)
    return TEXTS.compare("collapse", slowest < 0.6, slowest=slowest, end=10 ** max(ends), layers=LAYERS)


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
    measured, predicted = multiplier(sign, W), 1 + sign * C
    agrees = math.isclose(measured, predicted, rel_tol=1e-4) and (measured < 1) == (sign < 0)
    stable, mark = ("stable", "-") if sign < 0 else ("unstable", "+")
    return TEXTS.compare("slope", agrees, name=name, sign=mark, stable=stable, predicted=predicted, measured=measured)


def _boundary() -> Comparison:
    """With token 1 at rest, A is the edge of B's basin."""
    second = (torch.arange(3600, dtype=torch.float64) + 0.5) / 10
    X = pairs(torch.full_like(second, 90.0), second)
    apart = stays_apart(settled(X, W), W).bool()
    expected = (X[:, 1, 0] < 0) & (X[:, 1, 1] / X[:, 1, 0] > -W * C)
    share = float(apart.double().mean())
    return TEXTS.compare("boundary", bool((apart == expected).all()), share=share, starts=len(second))


def _dynamics(paths: pl.DataFrame) -> Figure:
    figure, (without, with_norm, fall) = panels(3, width=4.4, height=3.8)
    rest = math.degrees(math.atan2(-C, -1 / W)) % 360
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
        _in_degrees(axes)
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


def _in_degrees(axes: Axes, both: bool = False) -> None:
    axes.set_yticks(*DEGREES)
    axes.set_ylim(0, 360)
    if both:
        axes.set_xticks(*DEGREES)
        axes.set_xlim(0, 360)


def _basins(basins: pl.DataFrame, shares: pl.DataFrame) -> Figure:
    figure, (circle, torus, by_w) = panels(3, width=4.4, height=4.1)
    _map(circle)
    count = round(math.sqrt(len(basins)))
    apart, pole = (basins[name].to_numpy().reshape(count, count).T for name in ("apart", "pole"))
    colours = ListedColormap(["#d9e6f2", PALETTE[1], "#eef3f8", PALETTE[4]])
    extent: dict[str, Any] = {"extent": (0, 360, 0, 360), "origin": "lower", "aspect": "auto"}
    ends = apart.astype(float) + np.where(pole > 0, 0, 2)
    torus.imshow(ends, cmap=colours, vmin=0, vmax=3, interpolation="nearest", **extent)
    torus.grid(visible=False)
    _in_degrees(torus, both=True)
    title(torus, f"Where both end, $w$ = {W:g}", xlabel="token 1 starts at", ylabel="token 2 starts at")
    labels = {"rank 2, token 1 at (0, 1)": PALETTE[1], "rank 2, token 1 at (0, −1)": PALETTE[4], "rank 1": "#d9e6f2"}
    for label, colour in labels.items():
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
    apart = stays_apart(settled(start, W), W).bool()
    axes.plot([0, 360], [0, 360], color=FAINT, linewidth=1, linestyle="--")
    for chosen, colour, label in ((apart, PALETTE[1], "ends at B"), (~apart, PALETTE[0], "ends at token 1")):
        axes.plot(angle[chosen], after[chosen], linestyle="none", marker=".", markersize=3, color=colour)
        axes.plot([], [], color=colour, linewidth=2, label=label)
    at_A = math.degrees(math.atan2(C, -1 / W))
    for name, at, face in (("A", at_A, "white"), ("B", 360 - at_A, INK), ("token 1", 90.0, INK)):
        axes.plot(at, at, marker="o", markersize=7, color=INK, markerfacecolor=face, zorder=4)
        axes.annotate(name, (at, at), xytext=(8, -12), textcoords="offset points", color=INK)
    title(axes, "Token 2, once token 1 rests at (0, 1)", xlabel="token 2 before", ylabel="token 2 after one layer")
    axes.legend(fontsize=9, loc="upper left", frameon=False)
    _in_degrees(axes, both=True)


TITLE = "two tokens, without and with LayerNorm (Figures 1 and 5), and their basins"
STUDY = Study("wu2024", "fig1", TITLE, _run, seconds=12.0)
