"""Two tokens on a circle (figure 3 of Dong et al. 2021): why pure attention without a norm leaves it either way."""

import math

import pytest
import torch
from torch import Tensor, nn

RADIUS = 0.3


def ring(angles: int = 1000) -> Tensor:
    """Opposite tokens at every angle, and the first pair again: `[angle, token, 2]`."""
    turn = 2 * math.pi * torch.arange(angles + 1, dtype=torch.float64) / angles
    first = RADIUS * torch.stack([turn.cos(), turn.sin()], -1)
    return torch.stack([first, -first], 1)


class Two(nn.Module):
    """Linear maps into and out of width d, and torch's own attention of two heads between; several seeds at once are
    several modules, for this is small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2, width), nn.Linear(width, 2)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.double()

    def forward(self, pairs: Tensor) -> Tensor:
        X = self.into(pairs)
        return self.out(self.attention(X, X, X, need_weights=False)[0])


def trained(width: int, seed: int, steps: int, decay: float = 0.0) -> Two:
    torch.manual_seed(seed)
    net, pairs = Two(width), ring()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=decay)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for done in range(steps):
        chosen = slice(7 * done % 20, 1000, 20)
        loss = (net(pairs[:-1][chosen]) - pairs[1:][chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fall.step()
    return net


@torch.no_grad()
def where(net: Two, steps: int = 300) -> str:
    """'together' (nearer than a twentieth of the diameter), 'away' (ten radii out), or 'neither'."""
    pair = ring()[:1]
    for _ in range(steps):
        pair = net(pair)
        if float((pair[0, 0] - pair[0, 1]).norm()) < 0.1 * RADIUS:
            return "together"
        if float(pair.norm(dim=-1).max()) > 10 * RADIUS:
            return "away"
    return "neither"


@torch.no_grad()
def outwards(net: Two, nudge: float = 1e-4) -> float:
    """By what a small relative error of the distance grows in one step, the mean over the circle."""
    pairs = ring(40)[:-1]
    far, near = (net(pairs * (1 + sign * nudge)) for sign in (1, -1))
    logs = [(after[:, 0] - after[:, 1]).norm(dim=-1).log() for after in (far, near)]
    return float((logs[0] - logs[1]).mean()) / (2 * nudge)


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


def test_a_trained_network_makes_errors_of_the_distance_larger() -> None:
    assert outwards(trained(16, 0, 200)) > 1.1


@pytest.mark.slow
def test_seeds_leave_the_circle_either_way() -> None:
    """Sixteen seeds by torch's own attention: some fall together, some run away, and weight decay makes more fall."""
    ends = [where(trained(32, seed, 1500)) for seed in range(16)]
    assert ends.count("together") >= 4 and ends.count("away") >= 3
    decayed = [where(trained(32, seed, 1500, decay=0.3)) for seed in range(16)]
    assert decayed.count("together") >= max(10, ends.count("together"))
