"""Gradient ascent against every bound: what was climbed to (`attack/climb.py`) is certified.

The two must agree on the bound, and neither may be passed.
"""

import math

import mpmath as mp
import pytest
import torch

from rankscope.theory import certify
from tests.theory.attack.climb import ATTACKS, Attack, climbed
from tests.theory.attack.draw import drawn
from tests.theory.attack.truth import Exact, judged
from tests.theory.features import Feature, features


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.theorem)
def test_no_ascent_passes_a_bound(attack: Attack, seed: int) -> None:
    best, most, first = climbed(attack, seed)
    found = attack.keep(best)
    row = certify(found.net, found.X[None], theorems=attack.theorem).table.tail(1).to_dicts()[0]
    assert row["met"], row["why"]
    assert row["slack"] >= -1e-9 * (1 + abs(row["log10_bound"]))
    assert most <= 1e-9
    bound, measured = (float(log_size) / math.log(10) for log_size in attack.bound(found))
    assert row["log10_measured"] == pytest.approx(measured, rel=1e-9, abs=1e-7)
    if attack.agrees:
        assert row["log10_bound"] == pytest.approx(bound, rel=1e-9, abs=1e-7)
    gain = (most - first) / -first  # the share of the slack that was taken away
    assert gain > 0.2, f"an attack that does not climb: {gain}"


REFERRED = [feature for feature in features() if feature.field in
            ("kernel", "mask", "kept_heads", "bias_ahead", "rotary_pairs", "score_cap", "query_norm",
             "query_norm_across", "norm_place", "padding")
            and str(feature) != "kernel=a Kernel"]  # fmt: skip


@pytest.mark.parametrize("feature", REFERRED, ids=str)
def test_the_reference_is_the_network_that_runs(feature: Feature) -> None:
    net, X, padding = feature.example("with skips")
    valid = torch.ones(X.shape[:2], dtype=torch.bool) if padding is None else ~padding
    states = net.run(X, padding).states
    with mp.workdps(30):
        network = Exact(net, int((~valid).sum()))
        rows = network.first(X[valid])
        for layer in range(net.arch.layers):
            rows = network.layer(layer, rows)
            found = torch.tensor([[float(entry) for entry in row] for row in rows], dtype=torch.float64)
            torch.testing.assert_close(states[layer + 1][valid], found, rtol=1e-11, atol=1e-13)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("seed", "number"),
    [(1504, 609), (1508, 169), (1509, 751), (1608, 644), (1600, 982), (1705, 2113)],
    ids=[
        "zeros at a large scale",
        "tanh from tail to tail",
        "a token 1e300 times shorter",
        "the same token looked at by chance",
        "a branch that is zero, through a norm without eps",
        "a sum that is zero, and a norm that leaves its sign",
    ],
)
def test_networks_that_were_once_misread(seed: int, number: int) -> None:
    _, (net, X) = drawn(seed, number)
    found = judged(net, X, certify(net, X[None]))
    assert not found.false and not found.misread
