"""The networks of figure 3: folded ones, the radial law, and where trajectories go."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope_studies.dong2021 import circle, fig3
from rankscope_studies.dong2021.circle import NETWORKS, RADIUS, distance, ending, left


def test_the_circle() -> None:
    pairs = circle.circle(8)
    assert pairs.shape == (9, 2, 2)
    torch.testing.assert_close(pairs[:, 0], -pairs[:, 1])
    torch.testing.assert_close(pairs.norm(dim=-1), torch.full((9, 2), RADIUS, dtype=torch.float64))
    torch.testing.assert_close(pairs[0], pairs[-1])
    assert float(pairs[1, 0, 1]) > 0  # counter-clockwise
    near = circle.circle(apart=0.499)  # the published code's: not quite opposite
    assert float((near[:, 0] + near[:, 1]).norm(dim=-1).min()) > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_seeds_side_by_side_are_the_canonical_networks(name: str) -> None:
    """Folded or not, each seed computes what its canonical layer between two linear maps computes."""
    network = NETWORKS[name]
    arch, tensors = network.architecture(8), circle.initial(network, 8, 3)
    draw = torch.Generator().manual_seed(0)
    tensors = {n: t + 0.3 * torch.randn(t.shape, generator=draw, dtype=t.dtype) for n, t in tensors.items()}
    pairs = torch.randn(3, 5, 2, 2, generator=draw, dtype=torch.float64)
    after, attention = circle.step(arch, tensors, pairs)
    for seed in range(3):
        mine = {n: t[seed] for n, t in tensors.items()}
        expected, P = circle.canonical(arch, mine, pairs[seed])
        torch.testing.assert_close(after[seed], expected)
        torch.testing.assert_close(attention[seed], P)
    sharp = circle.sharpness(arch, tensors)
    assert sharp.shape == (3,) and bool(((sharp >= 0.5) & (sharp <= 1)).all())


def turned(size: float) -> Tensor:
    """One step round the circle, and a change of size."""
    cos, sin = math.cos(2 * math.pi / 1000), math.sin(2 * math.pi / 1000)
    return size * torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)


def built(network: str, score: float, turn: Tensor) -> dict[str, Tensor]:
    """Width 4; both heads score a pair by `score x_i . x_j`, and each passes on half of `x turn`."""
    arch = NETWORKS[network].architecture(4)
    zeros = {name: torch.zeros_like(t) for name, t in circle.initial(NETWORKS[network], 4, 1).items()}
    eye = torch.eye(2, dtype=torch.float64)
    zeros["into.weight"][0, :, :2] = eye
    zeros["out.weight"][0, :2] = eye
    for head in range(2):
        zeros["layers.0.attention.query.weight"][0, :2, head] = score * arch.divisor * eye
        zeros["layers.0.attention.key.weight"][0, :2, head] = eye
        zeros["layers.0.attention.value.weight"][0, :2, head] = eye / 2
        zeros["layers.0.attention.output.weight"][0, head, :, :2] = turn
    return zeros


@given(st.floats(min_value=0.01, max_value=8.0))
def test_the_radial_law_of_pure_attention(z: float) -> None:
    """A pair (u, -u) goes to tanh(z) (turn u, -turn u), z = a r^2, and an error of the radius grows by
    1 + 4z / sinh 2z: between 1 and 3."""
    size = 1 / math.tanh(z)  # so that the circle is where it stays
    arch = NETWORKS["pure attention"].architecture(4)
    tensors = built("pure attention", z / RADIUS**2, turned(size))
    pairs = circle.circle()
    after, attention = circle.step(arch, tensors, pairs[None, :-1])
    torch.testing.assert_close(after[0], pairs[1:])
    own = torch.full((1000, 2, 2), 1 / (1 + math.exp(-2 * z)), dtype=torch.float64)
    torch.testing.assert_close(attention[0].diagonal(dim1=-2, dim2=-1), own)
    assert float(circle.error(arch, tensors)) < 1e-9
    radial, shift = circle.multipliers(arch, tensors)
    assert float(radial) == pytest.approx(1 + 4 * z / math.sinh(2 * z), rel=1e-9)
    assert 1 < float(radial) <= 3 and float(shift) >= size - 1e-9


def test_slightly_inside_falls_together_and_slightly_outside_runs_away() -> None:
    z, arch = 0.5, NETWORKS["pure attention"].architecture(4)
    ends = []
    for off in (0.999, 1.001):
        tensors = built("pure attention", z / RADIUS**2, turned(off / math.tanh(z)))
        path = circle.followed(arch, tensors, 60)[:, 0]
        path = path[: int(path[:, 0, 0].isfinite().sum())]
        ends.append(ending(path, steps=60))
        assert left(path, steps=60) is not None
    assert ends == ["fell together", "ran away"]


def test_a_skip_with_silent_attention_follows_the_circle() -> None:
    """The skip carries what is linear: (turn - 1) x added to x is the rotation, and errors do not grow."""
    tensors = built("with skip", 0.0, torch.zeros(2, 2, dtype=torch.float64))
    tensors["out.weight"][0, :2] = turned(1.0)
    arch = NETWORKS["with skip"].architecture(4)
    path = circle.followed(arch, tensors, fig3.QUICK.steps)[:, 0]
    torch.testing.assert_close(path, circle.circle()[: fig3.QUICK.steps + 1])
    assert ending(path, fig3.QUICK.steps) == "on the circle" and left(path, fig3.QUICK.steps) is None
    radial, shift = circle.multipliers(arch, tensors)
    assert float(radial) == pytest.approx(1.0) and float(shift) == pytest.approx(1.0)


def test_every_ending() -> None:
    true = circle.circle()[:301]
    steps = torch.arange(301, dtype=torch.float64)[:, None, None]
    away = torch.tensor([1.0, 0.0], dtype=torch.float64)
    still = true[:1].expand(301, 2, 2)
    for path, end, step in (
        (true, "on the circle", None),
        (still, "apart", None),
        (true * 0.9**steps, "fell together", 7),  # 0.9^7 < 1/2
        ((true * 1.1**steps)[:20], "ran away", 8),  # 1.1^8 > 2
        ((true + steps * away)[:4], "drifted off", 4),
    ):
        assert ending(path, 300) == end
        assert left(path, 300) == step
    torch.testing.assert_close(distance(true), torch.ones(301, dtype=torch.float64))


@pytest.mark.parametrize(("name", "seeds", "few", "many"), [("with skip", 2, 2, 80), ("the published code", 1, 1, 60)])
def test_training_learns_the_circle(name: str, seeds: int, few: int, many: int) -> None:
    network = NETWORKS[name]
    tensors = (circle.trained(network, 8, seeds, rounds) for rounds in (few, many))
    before, after = (circle.error(network.architecture(8), after_training) for after_training in tensors)
    assert bool((after < before).all())


def test_seeds_do_not_disturb_each_other() -> None:
    network = NETWORKS["pure attention"]
    alone, both = (circle.trained(network, 8, seeds, 5) for seeds in (1, 2))
    for name, tensor in alone.items():
        torch.testing.assert_close(both[name][:1], tensor)


def test_the_layer_without_a_skip_has_none() -> None:
    """Two tokens that are nearly one: pure attention brings them nearer, a skip does not."""
    near = torch.tensor([[[[0.3, 0.0], [0.3, 1e-6]]]], dtype=torch.float64)
    spreads = []
    for name in ("pure attention", "with skip"):
        network = NETWORKS[name]
        after, _ = circle.step(network.architecture(32), circle.initial(network, 32, 1), near)
        spreads.append(float((after[0, 0, 0] - after[0, 0, 1]).norm()))
    assert spreads[0] < 1e-9 < spreads[1]
