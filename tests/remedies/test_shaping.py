"""Shaped attention, AttnScale and centred attention: each is what its formula says."""

import math

import numpy as np
import pytest
import torch

from rankscope.deviation import Scaled, propagate
from rankscope.deviation.rules import _less_average
from rankscope.nets import Transformer
from rankscope.profiles import measure
from tests.builders import normal, thinned
from tests.remedies.score_networks import MASKS, PADDING, network


@pytest.mark.parametrize("mask", MASKS)
def test_centred_rows_sum_to_zero(mask: str) -> None:
    run = network(mask).with_remedy("centred").run(normal(2, 6, 8, seed=3), PADDING, attention=True)
    for P in run.attention:
        assert P.sum(-1).abs().max() < 1e-15


@pytest.mark.parametrize("mask", MASKS)
def test_shaped_attention_starts_at_the_identity(mask: str) -> None:
    """With queries of zero, P is C."""
    net = network(mask).with_remedy("shaped")
    state = {name: 0 * each if ".query." in name else each for name, each in net.state_dict().items()}
    run = Transformer.from_weights(net.arch, state).run(normal(2, 6, 8, seed=3), PADDING, attention=True)
    for P in run.attention:
        expected = torch.eye(6, dtype=torch.float64) * ~PADDING[:, None, :, None]
        assert torch.allclose(P, expected.expand_as(P), atol=1e-15)


@pytest.mark.parametrize("spec", ["shaped:alpha=0.3,beta=1.2,gamma=0.7", "attnscale:w=0.5", "centred"])
@pytest.mark.parametrize("mask", MASKS)
def test_shaping_is_its_formula(spec: str, mask: str) -> None:
    """Re-stated with loops over tokens, on P of the network without it in its first layer."""
    net, X = network(mask), normal(2, 6, 8, seed=3)
    P = net.run(X, PADDING, attention=True).attention[0]
    actual = net.with_remedy(spec).run(X, PADDING, attention=True).attention[0]
    numbers = {"shaped": (0.3, 1.2, 0.7), "attnscale": (0.0, 1.5, 0.5), "centred": (0.0, 1.0, 1.0)}
    alpha, beta, gamma = numbers[spec.split(":")[0]]
    sees = {"complete": lambda i, j: True, "causal": lambda i, j: j <= i, "window:1": lambda i, j: abs(i - j) <= 1}
    for sample in range(2):
        valid = [k for k in range(6) if not PADDING[sample, k]]
        for i in valid:
            seen = [j for j in valid if sees[mask](i, j)]
            for j in range(6):
                c = 1 / len(seen) if j in seen else 0.0
                expected = alpha * (i == j) + beta * P[sample, :, i, j] - gamma * c
                assert torch.allclose(actual[sample, :, i, j], expected, atol=1e-14)


@pytest.mark.parametrize(
    ("spec", "variant", "mask"),
    thinned(
        ["shaped", "shaped:alpha=0.3,beta=1.2,gamma=0.7", "attnscale:w=0.5", "centred"],
        ["transformer", "san", "san+norm"],
        MASKS,
    ),
)
def test_states_equal_float64_where_that_can_see(spec: str, variant: str, mask: str) -> None:
    net, X = network(mask, variant).with_remedy(spec), normal(2, 6, 8, seed=3)
    for plain, step in zip(net.steps(X, PADDING), propagate(net, X, PADDING), strict=True):
        assert torch.allclose(step.state.tokens(), plain.state, atol=1e-10 * float(plain.state.abs().max()))
        if plain.attention is not None and step.attention is not None:
            rows = ~PADDING[:, None, :, None]
            assert torch.allclose(step.attention.matrix() * rows, plain.attention * rows, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "mask"), thinned(["attnscale:w=0.5", "shaped:alpha=0.5,beta=0.5,gamma=0", "differential2"], MASKS[1:])
)
def test_weights_below_zero_have_no_entropy_in_either_arithmetic(spec: str, mask: str) -> None:
    net, X = network(mask).with_remedy(spec), normal(2, 6, 8, seed=3)
    plain, mine = (
        measure(net, X, PADDING, "entropy", arithmetic).table["value"].to_numpy()
        for arithmetic in ("float64", "deviation")
    )
    weights = torch.stack(net.run(X, PADDING, attention=True).attention)
    whole = ((weights.sum(-1) - 1).abs() < 1e-9) | PADDING[:, None]
    assert np.isnan(plain).sum() == ((weights.amin((-2, -1)) < 0) | ~whole.all(-1)).sum()
    np.testing.assert_allclose(mine, plain, rtol=1e-9)


@pytest.mark.parametrize("log", [-3.0, 0.0, 3.0])
def test_a_pattern_less_its_average_does_not_depend_on_the_log_scale_of_scores(log: float) -> None:
    scores, visible = 0.4 * normal(1, 1, 3, 3), torch.ones(1, 1, 3, 3).tril().bool()
    less = _less_average(Scaled(scores * math.exp(-log), torch.full((1, 1), log, dtype=torch.float64)), visible)
    weights = [[math.exp(scores[0, 0, i, j]) for j in range(i + 1)] for i in range(3)]
    for i, row in enumerate(weights):
        expected = [weight / sum(row) - 1 / len(row) for weight in row]
        assert less.explicit()[0, 0, i, : i + 1].tolist() == pytest.approx(expected, abs=1e-15)
