import math
from typing import Any

import pytest
import torch

from rankscope.deviation import Scaled
from rankscope.deviation.attention import Values
from rankscope.deviation.state import ValidTokens
from rankscope.forecasts.gradients import gradients, uncancelled
from rankscope.nets import Architecture, Transformer
from tests.builders import awake, normal
from tests.forecasts.reference import by_differences, farthest

PURE: dict[str, Any] = {"mlp": "none", "norm": "none", "attention_skip": 0.0}
COLLAPSED: dict[str, dict[str, Any]] = {
    "pure attention": {"layers": 3, "heads": 1, **PURE},
    "grouped": {"layers": 1, "heads": 2, "key_heads": 1, "head_width": 1, **PURE},
    "rotary": {"layers": 2, "heads": 1, "positions": "rotary", **PURE},
    "causal, ALiBi": {"layers": 2, "heads": 1, "positions": "alibi", "mask": "causal", **PURE},
    "norm, MLP, skips": {"layers": 1, "heads": 1, "norm": "rms", "mlp_width": 2, "attention_skip": 0.5},
    "log gain, gate": {"layers": 1, "heads": 1, "log_gain": 0.7, "head_gate": True, **PURE},
}


def scaled_queries(net: Transformer, gain: float) -> Transformer:
    tensors = {name: t * gain if name.endswith("query.weight") else t for name, t in net.state_dict().items()}
    return Transformer.from_weights(net.arch, tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", COLLAPSED.values(), ids=COLLAPSED.keys())
def test_queries_and_keys_of_collapsed_tokens(fields: dict[str, Any]) -> None:
    net = awake(Architecture(width=2, **fields))
    X, R = normal(1, 1, 2) + 1e-9 * normal(1, 3, 2, seed=1), normal(1, 3, 2, seed=2)
    profile = gradients(net, X, R)
    reference = by_differences(net, X[0], R[0], ("query", "key", "value", "tokens"), 600)
    for kind in ("query", "key", "value"):
        assert not profile.weights[kind].below_floor.any()
        assert farthest(profile.weights[kind].log10, reference[kind]) < 1e-9
    assert farthest(profile.tokens.log10[:1], reference["tokens"]) < 1e-9
    if fields["layers"] == 3:
        assert reference["query"][2] < -150 and reference["key"][2] < -150


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [{}, {"mask": "causal"}, {"positions": "rotary"}])
@pytest.mark.parametrize("row", [slice(None), 2])
def test_queries_and_keys_where_attention_is_to_one_token(fields: dict[str, Any], row: Any) -> None:
    net = scaled_queries(awake(Architecture(layers=1, width=2, heads=1, **fields, **PURE)), 2e3)
    X, R = normal(1, 3, 2, seed=1), torch.zeros(1, 3, 2, dtype=torch.float64)
    R[:, row] = normal(1, 3, 2, seed=2)[:, row]  # the loss of one token alone: what others attend to does not matter
    profile, reference = gradients(net, X, R), by_differences(net, X[0], R[0], ("query", "key"), 3000)
    for kind, logs in reference.items():
        assert logs[0] < -20
        assert not profile.weights[kind].below_floor.any()
        assert farthest(profile.weights[kind].log10, logs) < 1e-9


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("positions", "power"), [("none", 2), ("bias", 2), ("rotary", 1)])
def test_gradients_of_queries_and_keys_fall_with_a_power_of_the_deviation(positions: Any, power: int) -> None:
    net = awake(Architecture(layers=2, width=8, heads=2, positions=positions))
    common, apart, R = normal(1, 1, 8), normal(1, 4, 8, seed=1), normal(1, 4, 8, seed=2)
    far, near = (gradients(net, common + size * apart, R) for size in (1e-5, 1e-9))
    deviation = (far.separation.log10 - near.separation.log10)[:-1] / 2
    for kind in ("query", "key"):
        fall = far.weights[kind].log10 - near.weights[kind].log10
        assert (fall / deviation - power).abs().max() < 1e-4
    assert (far.weights["value"].log10 - near.weights["value"].log10).abs().max() < 1e-3


def test_shaped_attention_multiplies_the_gradient_at_scores_by_beta() -> None:
    net = awake(Architecture(layers=1, width=4, heads=2, **PURE))
    X, R = normal(1, 1, 4) + 1e-9 * normal(1, 3, 4, seed=1), normal(1, 3, 4, seed=2)
    plain = gradients(net, X, R).weights
    twice = gradients(net.with_remedy("attnscale", w=1.0), X, R).weights
    for kind in ("query", "key"):
        assert float(plain[kind].log10) < -15 and not bool(twice[kind].below_floor)
        assert abs(float(twice[kind].log10 - plain[kind].log10) - math.log10(2)) < 1e-9


def test_equal_tokens_have_no_gradient_of_queries() -> None:
    net = awake(Architecture(layers=2, width=4, heads=2))
    weights = gradients(net, normal(1, 1, 4).expand(1, 3, 4)).weights
    for kind in ("query", "key"):
        assert (weights[kind].log10 == -torch.inf).all() and not weights[kind].below_floor.any()


@pytest.mark.parametrize("head_width", [1, 3])
@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_what_gradients_would_be_if_nothing_cancelled_is_counted_by_hand(head_width: int, spread: float) -> None:
    """Of one token x and one head the gradient at weights is x times that at its query, whose entries are alike but for
    their signs: `|x| sqrt(d) |G| v sqrt(d) ((|q| + |k|) / divisor + 1)`, v the largest entry of values."""
    arch = Architecture(layers=1, width=4, heads=1, head_width=head_width, divisor=0.7, biases=False)
    w, x = awake(arch).weights.layers[0].attention, normal(1, 4)
    for linear in (w.query, w.key):
        linear.weight.requires_grad_()
    q, k = (torch.einsum("tw,whd->htd", x, linear.weight)[None] for linear in (w.query, w.key))
    G = normal(1, 1, 1, head_width, seed=1)
    common, apart = normal(1, 1, head_width, seed=2), spread * normal(1, 1, 1, head_width, seed=3)
    one = torch.zeros(1, 1, dtype=torch.float64)
    values = Values(
        Scaled(common, one + 0.5), Scaled(apart, one - 0.25), ValidTokens(torch.ones(1, 1, dtype=torch.bool))
    )
    largest = max(float(common.abs().max()) * math.exp(0.5), float(apart.abs().max()) * math.exp(-0.25))
    longest = float(q.detach().norm() + k.detach().norm())
    size = float(x.norm() * G.norm()) * largest * head_width * (longest / 0.7 + 1)
    for found in uncancelled(arch, w, q, k, values, G):
        assert float(found) == pytest.approx(math.log(size), abs=1e-12)
