"""Metrics of routing against counts made by hand."""

import math

import pytest
import torch

from rankscope.errors import MetricError, TokensError
from rankscope.metrics import METRICS, expert_entropy, expert_load
from rankscope.nets import Architecture, Experts, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.raising import raises

ARCH = Architecture(layers=3, width=8, heads=2, mlp="experts", activation="silu", norm_place="pre",
                    experts=Experts(number=4, chosen=2, width=5, dense_layers=(1,)))  # fmt: skip


def test_loads_are_shares_of_real_tokens() -> None:
    p = torch.tensor([[[0.7, 0.3, 0.0], [0.6, 0.0, 0.4], [0.0, 0.1, 0.9]]], dtype=torch.float64)
    padding = torch.tensor([[False, False, True]])
    assert expert_load(p, padding).tolist() == [1.0]
    s = [2 / 4, 1 / 4, 1 / 4]
    assert expert_entropy(p, padding).item() == pytest.approx(-sum(each * math.log(each) for each in s))
    assert expert_load(p).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_ranges_are_met_at_both_ends(chosen: int) -> None:
    """All tokens alike, and every expert as busy as the others."""
    alike = torch.zeros(1, 5, 4)
    alike[..., :chosen] = 1 / chosen
    assert expert_load(alike).item() == 1.0
    assert expert_entropy(alike).item() == pytest.approx(math.log(chosen))
    even = torch.stack([alike[0, 0].roll(shift) for shift in range(4)])[None]
    assert expert_load(even).item() == pytest.approx(chosen / 4)
    assert expert_entropy(even).item() == pytest.approx(math.log(4))
    assert expert_load(torch.zeros(1, 0, 4)).isnan().all()


@pytest.mark.parametrize("arithmetic", ["deviation", "float64"])
def test_measure_counts_what_each_token_chooses(arithmetic: str) -> None:
    net, X = awake(ARCH), normal(3, 6, 8)
    padding = torch.arange(6)[None] >= torch.tensor([[6], [4], [3]])
    padding[2] = padding[2].flip(0)  # on the left
    found = measure(net, X, padding, ["expert_load", "expert_entropy"], arithmetic)
    assert sorted(found.table["layer"].unique()) == [1, 3]  # the second is dense
    for step in net.steps(X, padding):
        assert (step.routing is None) == (step.layer in (0, 2))
        if step.routing is None:
            continue
        assert ((step.routing > 0).sum(-1)[~padding] == 2).all()
        for name in ("expert_load", "expert_entropy"):
            expected = METRICS[name].compute(step.routing, padding)
            torch.testing.assert_close(found.curve(name)[:, step.layer], expected, rtol=1e-12, atol=0)


def test_routing_is_asked_of_mixtures_alone() -> None:
    dense = Transformer.random(Architecture(layers=1, width=8, heads=2))
    with raises(MetricError, subject="metrics"):
        measure(dense, normal(1, 3, 8), metrics="expert_load")
    with raises(TokensError, subject="p"):
        expert_load(torch.ones(2, 3, dtype=torch.long))
