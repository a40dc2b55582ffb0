"""Figure 3: two tokens on a circle. Pure attention, applied to its own output, pulls them together.

Two tokens in the plane on a circle of radius 0.3 start at (0.3, 0) and (-0.3, 0) and run
counter-clockwise; a network learns to map the pair at one of 1000 angles to the pair at the next.
`Linear(2 -> d)`, one layer of two heads, `Linear(d -> 2)`, no positions, no norm; d from 32 to 128. Then
its prediction is fed back to it for 300 steps.

Three networks: attention alone, with a skip, with an MLP. The skip here adds the layer's own input (the
published code adds the previous batch, and its "no skip" layer still adds its input before a norm).
"""

import math
from typing import Any

import polars as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from rankscope.figures import FAINT, PALETTE, panels
from rankscope.nets import Architecture, Transformer
from rankscope.studies.study import Comparison, Outcome, Setup, Study

RADIUS, ANGLES, STEPS, HEADS = 0.3, 1000, 300, 2
WIDTHS = (32, 64, 128)
NETWORKS: dict[str, dict[str, Any]] = {
    "pure attention": {"attention_skip": 0.0, "mlp": "none"},
    "skip": {"attention_skip": 1.0, "mlp": "none"},
    "MLP": {"attention_skip": 0.0, "mlp": "plain", "mlp_skip": 0.0},
}


def circle(angles: int = ANGLES) -> Tensor:
    """The pairs of tokens, `[angle, 2, 2]`, one turn."""
    turn = 2 * math.pi * torch.arange(angles + 1, dtype=torch.float64) / angles
    first = RADIUS * torch.stack([turn.cos(), turn.sin()], -1)
    return torch.stack([first, -first], 1)


class Model:
    """A canonical layer between two linear maps, its tensors to be trained."""

    def __init__(self, network: str, width: int, seed: int) -> None:
        self.arch = Architecture(
            layers=1, width=width, heads=HEADS, norm="none", activation="relu", **NETWORKS[network]
        )
        generator = torch.Generator().manual_seed(seed)
        drawn = Transformer.random(self.arch, seed=seed, init="xavier").state()
        self.tensors = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
        for name, shape in (("into", (2, width)), ("out", (width, 2))):
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])
            self.tensors[name] = tensor.requires_grad_()
        for name, size in (("into_bias", width), ("out_bias", 2)):
            self.tensors[name] = torch.zeros(size, dtype=torch.float64, requires_grad=True)

    def __call__(self, pairs: Tensor) -> Tensor:
        """The next pair of each pair."""
        own = ("into", "out", "into_bias", "out_bias")
        inner = {name: tensor for name, tensor in self.tensors.items() if name not in own}
        net = Transformer.from_weights(self.arch, inner)
        X = pairs @ self.tensors["into"] + self.tensors["into_bias"]
        *_, last = net.steps(X)
        return last.state @ self.tensors["out"] + self.tensors["out_bias"]


def trained(network: str, width: int, seed: int, rounds: int) -> tuple[Model, float]:
    """The network after so many full-batch steps of Adam, and its root mean square error."""
    model, pairs = Model(network, width, seed), circle()
    before, after = pairs[:-1], pairs[1:]
    optimiser = torch.optim.Adam(list(model.tensors.values()), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, rounds, eta_min=3e-5)
    for _ in range(rounds):
        optimiser.zero_grad()
        loss = (model(before) - after).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model, math.sqrt(float(loss.detach()))


@torch.no_grad()
def followed(model: Model, steps: int = STEPS) -> Tensor:
    """The trajectory `[step, 2, 2]` of a network that is fed its own predictions."""
    pairs = [circle()[:1]]
    for _ in range(steps):
        pairs.append(model(pairs[-1]))
    return torch.cat(pairs)


def _one(network: str, width: int, seed: int, rounds: int) -> pl.DataFrame:
    model, error = trained(network, width, seed, rounds)
    path = followed(model)
    return pl.DataFrame(
        {
            "step": [step for step in range(STEPS + 1) for _ in (0, 1)],
            "token": [0, 1] * (STEPS + 1),
            "x": path[..., 0].flatten().numpy(),
            "y": path[..., 1].flatten().numpy(),
        }
    ).with_columns(network=pl.lit(network), width=pl.lit(width), seed=pl.lit(seed), error=pl.lit(error))


def _run(setup: Setup) -> Outcome:
    rounds, seeds = (4000, 5) if setup.full else (800, 2)
    parts = [
        setup.kept(
            f"{network.replace(' ', '-')}-{width}-{seed}",
            lambda n=network, w=width, s=seed: _one(n, w, s, rounds),
            rounds=rounds,
        )
        for network in NETWORKS
        for width in WIDTHS
        for seed in range(seeds)
    ]
    table = pl.concat(parts)
    apart = distances(table)
    return Outcome(
        {"circle": _figure(table)},
        {"trajectories": table, "distances": apart},
        _comparisons(apart),
        [
            f"{seeds} seeds of each network, {rounds} steps of Adam on all {ANGLES} pairs; medians over "
            "seeds are compared."
        ],
    )


def distances(table: pl.DataFrame) -> pl.DataFrame:
    """How far apart the two tokens are after the last step, as a share of the diameter."""
    last = table.filter(step=STEPS)
    one, other = (last.filter(token=token) for token in (0, 1))
    keys = ["network", "width", "seed", "error"]
    joined = one.join(other, on=keys, suffix="_other", maintain_order="left")
    gap = ((pl.col("x") - pl.col("x_other")) ** 2 + (pl.col("y") - pl.col("y_other")) ** 2).sqrt()
    return joined.select(*keys, share=gap / (2 * RADIUS))


def _comparisons(apart: pl.DataFrame) -> list[Comparison]:
    middle = {
        (network, width): float(part["share"].median())  # type: ignore[arg-type]
        for (network, width), part in apart.group_by("network", "width")
    }
    pure = [middle["pure attention", width] for width in WIDTHS]
    listed = ", ".join(f"d = {width}: {share:.2g}" for width, share in zip(WIDTHS, pure, strict=True))
    found = [
        Comparison(
            "pure attention pulls the tokens to one point", "yes", f"distance left: {listed}", max(pure) < 0.5
        ),
        Comparison("less so with larger width", "yes", listed, pure[-1] > pure[0]),
    ]
    for name in ("skip", "MLP"):
        shares = [middle[name, width] for width in WIDTHS]
        said = ", ".join(f"d = {width}: {share:.2g}" for width, share in zip(WIDTHS, shares, strict=True))
        better = sum(mine > alone for mine, alone in zip(shares, pure, strict=True))
        found.append(Comparison(f"{name} prevents or slows it", "yes", said, better >= 2))
    return found


def _figure(table: pl.DataFrame) -> Figure:
    """Trajectories of one seed: a row of widths for each network."""
    figure, axes = panels(len(WIDTHS), width=3.2, height=3.2, rows=len(NETWORKS))
    turn = [2 * math.pi * k / 200 for k in range(201)]
    ring = [RADIUS * math.cos(t) for t in turn], [RADIUS * math.sin(t) for t in turn]
    for row, network in enumerate(NETWORKS):
        for column, width in enumerate(WIDTHS):
            each = axes[row * len(WIDTHS) + column]
            each.plot(*ring, color=FAINT, linewidth=0.8, linestyle=":")
            for token in (0, 1):
                part = table.filter(network=network, width=width, seed=0, token=token).sort("step")
                each.plot(part["x"], part["y"], color=PALETTE[token], linewidth=1.2)
                each.plot(part["x"][0], part["y"][0], "o", color=PALETTE[token], markersize=5)
                each.plot(part["x"][-1], part["y"][-1], "X", color=PALETTE[token], markersize=7)
            each.set_aspect("equal")
            each.set_xlim(-0.4, 0.4)
            each.set_ylim(-0.4, 0.4)
            each.set_title(f"{network}, d = {width}", loc="left", fontsize=9)
    return figure


FIG3 = Study("dong2021", "fig3", "two tokens on a circle, fed their own predictions", _run)
