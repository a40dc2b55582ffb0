"""Two tokens on a circle (figure 3 of Dong et al. 2021): why pure attention without a norm leaves it either way."""

import math

import pytest
import torch
from torch import Tensor

RADIUS = 0.3


def ring(angles: int = 1000) -> Tensor:
    """Opposite tokens at every angle, and the first pair again: `[angle, token, 2]`."""
    turn = 2 * math.pi * torch.arange(angles + 1, dtype=torch.float64) / angles
    first = RADIUS * torch.stack([turn.cos(), turn.sin()], -1)
    return torch.stack([first, -first], 1)


Parts = dict[str, Tensor]  # By name, the seed as first axis


def started(width: int, seeds: int) -> Parts:
    """Random tensors: torch's own start for the maps into and out of the width, Xavier's in between."""
    torch.manual_seed(0)

    def uniform(size: float, *shape: int) -> Tensor:
        return (2 * torch.rand(seeds, *shape, dtype=torch.float64) - 1) * size

    inner, outer = math.sqrt(3 / width), 1 / math.sqrt(width)
    parts = {name: uniform(inner, width, width) for name in ("query", "key", "value", "output")}
    parts |= {f"{name}_bias": torch.zeros(seeds, 1, width, dtype=torch.float64) for name in parts}
    into = {"into": uniform(1 / math.sqrt(2), 2, width), "into_bias": uniform(1 / math.sqrt(2), 1, width)}
    return parts | into | {"out": uniform(outer, width, 2), "out_bias": uniform(outer, 1, 2)}


def step(parts: Parts, pairs: Tensor) -> Tensor:
    """The next pairs, `[seed, pair, token, 2]`: a map into the width, two heads of attention, a map back."""
    seeds, count = pairs.shape[:2]

    def linear(X: Tensor, name: str) -> Tensor:
        return X @ parts[name] + parts[f"{name}_bias"]

    X = linear(pairs.flatten(1, 2), "into")
    q, k, v = (linear(X, name).view(seeds, count, 2, 2, -1).transpose(2, 3) for name in ("query", "key", "value"))
    P = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    mixed = (P @ v).transpose(2, 3).reshape(seeds, 2 * count, -1)
    return linear(linear(mixed, "output"), "out").view(seeds, count, 2, 2)


def trained(width: int, seeds: int, steps: int, decay: float = 0.0) -> Parts:
    """Adam on the squared distance to the next pair, 50 pairs a step, all seeds side by side."""
    parts = {name: tensor.requires_grad_() for name, tensor in started(width, seeds).items()}
    pairs = ring()
    optimizer = torch.optim.AdamW(list(parts.values()), lr=3e-3, weight_decay=decay)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for done in range(steps):
        chosen = slice(7 * done % 20, 1000, 20)
        loss = (
            (step(parts, pairs[:-1][chosen].expand(seeds, -1, 2, 2)) - pairs[1:][chosen]).square().mean((1, 2, 3)).sum()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fall.step()
    return {name: tensor.detach() for name, tensor in parts.items()}


def where(parts: Parts, steps: int = 300) -> list[str]:
    """Of each seed 'together' (nearer than a twentieth of the diameter), 'away' (ten radii out), or 'neither'."""
    seeds = len(parts["into"])
    pair, ends = ring()[:1].expand(seeds, 1, 2, 2), ["neither"] * seeds
    for _ in range(steps):
        pair = step(parts, pair).clamp(-100, 100)
        apart, far = (pair[:, 0, 0] - pair[:, 0, 1]).norm(dim=-1), pair[:, 0].norm(dim=-1).amax(-1)
        for seed in range(seeds):
            if ends[seed] == "neither" and apart[seed] < 0.1 * RADIUS:
                ends[seed] = "together"
            elif ends[seed] == "neither" and far[seed] > 10 * RADIUS:
                ends[seed] = "away"
    return ends


def outwards(parts: Parts, nudge: float = 1e-4) -> Tensor:
    """Of each seed by what a small relative error of the distance grows in one step, the mean over the circle."""
    pairs = ring(40)[:-1].expand(len(parts["into"]), -1, 2, 2)
    far, near = (step(parts, pairs * (1 + sign * nudge)) for sign in (1, -1))
    logs = [(after[:, :, 0] - after[:, :, 1]).norm(dim=-1).log() for after in (far, near)]
    return (logs[0] - logs[1]).mean(1) / (2 * nudge)


@pytest.mark.parametrize("z", [0.01, 0.5, 2.0])
def test_the_circle_of_the_ideal_network_is_unstable(z: float) -> None:
    """Scores a u.v and values that turn: a pair (u, -u) at radius r goes to radius proportional to r tanh(a r^2), so an
    error of r grows by `1 + 4 z / sinh 2 z` at z = a r^2: 3 for even attention, 1 for sharp."""
    a = z / RADIUS**2

    def after(radius: float) -> float:
        tokens = torch.tensor([[radius, 0.0], [-radius, 0.0]], dtype=torch.float64)
        return float(((a * tokens @ tokens.T).softmax(-1) @ tokens)[0].norm())

    nudge = 1e-5
    grown = (math.log(after(RADIUS * (1 + nudge))) - math.log(after(RADIUS * (1 - nudge)))) / (2 * nudge)
    assert grown == pytest.approx(1 + 4 * z / math.sinh(2 * z), rel=1e-6) and grown > 1


@pytest.mark.slow
def test_a_trained_network_makes_errors_of_the_distance_larger() -> None:
    assert float(outwards(trained(16, 4, 300)).min()) > 1


@pytest.mark.slow
def test_seeds_leave_the_circle_either_way() -> None:
    """Thirty-two seeds: some fall together, some run away, and weight decay makes more fall."""
    parts = trained(32, 32, 1500)
    assert float(outwards(parts).median()) > 1.5
    ends, decayed = where(parts), where(trained(32, 32, 1500, decay=0.3))
    assert 10 <= ends.count("together") <= 26 and 5 <= ends.count("away") <= 22
    assert decayed.count("together") >= max(22, ends.count("together"))
