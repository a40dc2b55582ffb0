import math
from itertools import pairwise
from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.errors import ArchitectureError, TokensError
from rankscope.forecasts.gradients import GradientProfile, gradients
from rankscope.nets import Architecture, Experts, Transformer
from tests.builders import awake, normal
from tests.deviation.reference import Network, dot
from tests.forecasts.reference import Logs, by_autograd, by_differences, farthest

PURE: dict[str, Any] = {"mlp": "none", "norm": "none", "attention_skip": 0.0}
BLOCKS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm_place": "pre", "final_norm": True, "norm": "rms"},
    "sandwich, gated": {"norm_place": "sandwich", "mlp": "gated", "activation": "silu"},
    "no norm, half a skip": {"norm": "none", "attention_skip": 0.5, "mlp_skip": 0.0},
    "causal, ALiBi": {"mask": "causal", "positions": "alibi"},
    "grouped, rotary": {"key_heads": 2, "positions": "rotary"},
    "latents": {"query_latent": 3, "key_latent": 5, "positions": "rotary", "head_width": 4, "rotary_share": 0.5},
    "table, log gain": {"positions": "absolute", "log_gain": 0.5},
    "heads taken out, gates": {"kept_heads": ((0, 1), (3,)), "head_gate": True},
    "norm of queries": {"query_norm": True},
    "cap": {"score_cap": 1.0},
    "Transformer-XL": {"positions": "relative"},
    "gaussian": {"kernel": "gaussian"},
    "experts": {"mlp": "experts", "experts": Experts(number=3, chosen=2, width=4)},
    "parallel": {"parallel": True, "norm_place": "pre"},
}


def of_kinds(profile: GradientProfile) -> dict[str, Any]:
    return {**profile.weights, "tokens": profile.tokens}


def assert_agree(profile: GradientProfile, reference: Logs, tolerance: float = 1e-9) -> None:
    readings = of_kinds(profile)
    assert readings.keys() == reference.keys()
    for kind, logs in reference.items():
        assert not readings[kind].below_floor.any(), kind
        assert farthest(readings[kind].log10, logs) < tolerance, kind


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", BLOCKS.values(), ids=BLOCKS.keys())
def test_gradients_are_those_of_autograd_where_float64_suffices(fields: dict[str, Any]) -> None:
    net = awake(Architecture(layers=2, width=8, heads=4, **fields))
    X, R = normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2)
    assert_agree(gradients(net, X, R), by_autograd(net, X, R))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("init", ["bert", "xavier", "kaiming/sqrt(L)", "orthogonal"])
def test_initialisations(init: str) -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2, norm_place="pre"), init=init)
    X, R = normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2)
    assert_agree(gradients(net, X, R), by_autograd(net, X, R))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("remedy", ["neutreno", "valueresidual", "shaped", "attnscale", "differential", "rezero"])
def test_remedies_also_those_that_carry_values_past_layers(remedy: str) -> None:
    net = awake(Architecture(layers=3, width=8, heads=2)).with_remedy(remedy)
    X, R = normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2)
    assert_agree(gradients(net, X, R), by_autograd(net, X, R))


def test_a_gaussian_cotangent_is_drawn_from_the_seed() -> None:
    net, X = awake(Architecture(layers=1, width=4, heads=2, **PURE)), normal(1, 3, 4)
    ours, same, other = (gradients(net, X, R) for R in (None, normal(1, 3, 4), normal(1, 3, 4, seed=1)))
    assert ours.tokens.log10.equal(same.tokens.log10) and not ours.tokens.log10.equal(other.tokens.log10)
    assert gradients(net, X, seed=1).tokens.log10.equal(other.tokens.log10)


def test_gradients_are_proportional_to_the_cotangent_however_small_it_is() -> None:
    net, X, R = awake(Architecture(layers=2, width=4, heads=2)), normal(2, 3, 4), normal(2, 3, 4, seed=1)
    whole, small = of_kinds(gradients(net, X, R)), of_kinds(gradients(net, X, 1e-300 * R))
    for kind, readings in whole.items():
        assert (small[kind].log10 + 300 - readings.log10).abs().max() < 1e-11
        assert not small[kind].below_floor.any()


def test_products_over_depth_do_not_underflow() -> None:
    net = awake(Architecture(layers=8, width=2, heads=1, **PURE), size=1.0)
    tensors = {name: t * 1e-50 if name.endswith("output.weight") else t for name, t in net.state_dict().items()}
    net = Transformer.from_weights(net.arch, tensors)  # biases keep the tokens, gradients fall by 1e-50 in a layer
    X, R = normal(1, 2, 2), normal(1, 2, 2, seed=1)
    profile, reference = gradients(net, X, R), by_differences(net, X[0], R[0], ("tokens",), 1300)["tokens"]
    assert reference[0] < -380 and abs(float(profile.tokens.log10[0]) - reference[0]) < 1e-9
    assert not any(readings.below_floor.any() for readings in of_kinds(profile).values())


def test_a_sample_of_small_cotangent_counts_where_its_tokens_differ() -> None:
    net = awake(Architecture(layers=3, width=4, heads=2, **PURE))
    near, apart = normal(1, 1, 4) + 1e-6 * normal(1, 3, 4, seed=1), normal(1, 3, 4, seed=2)
    R = torch.cat([normal(1, 3, 4, seed=3), 1e-60 * normal(1, 3, 4, seed=4)])
    both, alone = gradients(net, torch.cat([near, apart]), R), gradients(net, apart, R[1:])
    single = gradients(net, near, R[:1])
    assert single.weights["query"].log10[-1] < -100 < alone.weights["query"].log10[-1]
    assert abs(float(both.weights["query"].log10[-1] - alone.weights["query"].log10[-1])) < 1e-12
    assert abs(float(both.weights["value"].log10[-1] - single.weights["value"].log10[-1])) < 1e-12


@pytest.mark.parametrize("fields", [{"query_norm": True}, {"score_cap": 1.0}, {"kernel": "gaussian"}])
def test_what_autograd_rounds_is_marked(fields: dict[str, Any]) -> None:
    net = awake(Architecture(layers=2, width=4, heads=2, **fields))
    profile = gradients(net, normal(1, 1, 4) + 1e-9 * normal(1, 3, 4, seed=1))
    assert all(profile.weights[kind].below_floor.all() for kind in ("query", "key"))
    assert not any(profile.weights[kind].below_floor.any() for kind in ("value", "output", "mlp", "norm"))
    assert not profile.tokens.below_floor.any()


def test_a_zero_of_autograd_is_marked_unless_it_is_one() -> None:
    X = 1e3 * normal(1, 3, 4)
    sharp = gradients(awake(Architecture(layers=1, width=4, heads=1, kernel="gaussian", **PURE)), X)
    uniform = gradients(awake(Architecture(layers=1, width=4, heads=1, kernel="uniform", **PURE)), X)
    assert bool(sharp.weights["query"].below_floor) and not bool(uniform.weights["query"].below_floor)
    assert float(uniform.weights["query"].log10) == -math.inf


@pytest.mark.parametrize("seed", [13, 19, 26])
def test_rounding_on_which_passes_agree_is_marked(seed: int) -> None:
    """Beside one token that has all attention, autograd has zero of its score's gradient: the sum of the others'."""
    net = awake(Architecture(layers=1, width=2, heads=1, kernel="gaussian", **PURE), seed=seed)
    profile = gradients(net, 6 * normal(1, 3, 2, seed=seed), normal(1, 3, 2, seed=seed + 1))
    assert bool(profile.weights["query"].below_floor)


def test_scores_that_biases_of_values_drown_are_marked() -> None:
    net = awake(Architecture(layers=1, width=4, heads=1, **PURE))
    tensors = {name: t * 1e-20 if name.endswith("value.weight") else t for name, t in net.state_dict().items()}
    profile = gradients(Transformer.from_weights(net.arch, tensors), normal(1, 3, 4))
    assert profile.tokens.below_floor.tolist() == [True, False]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields", [{}, {"mlp": "plain"}, {"mlp": "gated", "activation": "silu"}, {"mask": "causal", "positions": "alibi"}]
)
def test_tokens_may_vanish(fields: dict[str, Any]) -> None:
    arch = Architecture(layers=4, width=2, heads=1, mlp_width=2, mlp_skip=0.0, **{**PURE, **fields})
    tensors = Transformer.random(arch, init="xavier").state_dict()
    shrunk = ("value.weight", "output.weight", "up.weight", "down.weight")
    net = Transformer.from_weights(
        arch, {name: t * 1e-24 if name.endswith(shrunk) else t for name, t in tensors.items()}
    )
    X, R = normal(1, 2, 2), normal(1, 2, 2, seed=1)
    profile, reference = gradients(net, X, R), by_differences(net, X[0], R[0], ("value", "tokens"), 2400)
    assert reference["tokens"][0] < -190
    assert abs(float(profile.tokens.log10[0]) - reference["tokens"][0]) < 1e-9
    assert farthest(profile.weights["value"].log10, reference["value"]) < 1e-9
    assert not any(readings.below_floor.any() for readings in of_kinds(profile).values())


def test_tokens_that_leave_the_range_otherwise_are_marked() -> None:
    fields: dict[str, Any] = {"layers": 1, "width": 4, "heads": 1, "biases": False}
    huge = gradients(awake(Architecture(**fields, **PURE)), 1e160 * normal(1, 3, 4))
    mixed = awake(Architecture(**fields, norm="none", mlp="gated"))  # the skip shrinks as tokens do, the MLP as squares
    unscaled = awake(Architecture(**fields, final_norm=True, norm_place="pre", norm="scale", norm_eps=0.0))
    for profile in (huge, *(gradients(net, 1e-160 * normal(1, 3, 4)) for net in (mixed, unscaled))):
        assert all(readings.below_floor[0] for readings in of_kinds(profile).values())


def test_layers_that_do_nothing_have_exponents_zero() -> None:
    net = awake(Architecture(layers=4, width=8, heads=2, norm_place="pre", final_norm=True)).with_remedy("rezero")
    exponents = gradients(net, normal(2, 4, 8)).exponents()
    assert abs(exponents.gradient) < 1e-14 and abs(exponents.angle) < 1e-14
    assert len(exponents.gradients) == len(exponents.angles) == 4


def test_exponents_by_their_definition() -> None:
    net = awake(Architecture(layers=3, width=8, heads=2))
    X, R = normal(2, 5, 8), normal(2, 5, 8, seed=1)
    exponents = gradients(net, X, R).exponents()
    tokens = by_autograd(net, X, R)["tokens"]
    growth = math.log(10) * 2 * (tokens[0] - math.log10(float(R.norm())))
    assert abs(exponents.gradient - growth / 3) < 1e-12
    assert abs(exponents.gradient - float(exponents.gradients.mean())) < 1e-15
    angles = []
    for step in net.steps(X):
        gram = step.state @ step.state.mT
        q = gram.diagonal(dim1=-2, dim2=-1).mean()
        p = (gram.sum() / 2 - 5 * q) / 20
        angles.append(math.log(float(1 - p / q)))
    expected = [after - before for before, after in pairwise(angles)]
    assert farthest(exponents.angles, expected) < 1e-9


def test_the_angle_exponent_is_right_at_a_thousand_digits() -> None:
    net = awake(Architecture(layers=5, width=2, heads=1, **PURE))
    X = normal(1, 1, 2) + 1e-3 * normal(1, 3, 2, seed=1)
    profile = gradients(net, X)
    with mp.workdps(4000):
        logs = []
        for rows in Network(net).states(X[0])[-2:]:
            mean = [mp.fsum(column) / 3 for column in zip(*rows, strict=True)]
            apart = [[a - b for a, b in zip(row, mean, strict=True)] for row in rows]
            difference, square = (mp.fsum(dot(row, row) for row in each) for each in (apart, rows))
            logs.append(mp.log(3 * difference / (2 * square)))  # (q - p) / q
        exponent = float(logs[1] - logs[0])
    assert float(profile.separation.log10[-1]) < -1000
    assert abs(float(profile.exponents().angles[-1]) / exponent - 1) < 1e-11


def test_kinds_are_those_of_the_network_and_zeros_of_layers_without_them() -> None:
    net = awake(Architecture(layers=2, width=4, heads=1, norm_place="pre", bare_layers=(0,)))
    weights = gradients(net.variant(mlp=False), normal(1, 3, 4)).weights
    assert list(weights) == ["query", "key", "value", "output", "norm"]
    assert float(weights["norm"].log10[0]) == -math.inf < float(weights["norm"].log10[1])


def test_one_token_has_no_angle_and_no_gradient_of_queries() -> None:
    profile = gradients(awake(Architecture(layers=2, width=4, heads=1)), normal(1, 1, 4))
    assert profile.separation.below_floor.all() and math.isnan(profile.exponents().angle)
    assert (profile.weights["query"].log10 == -math.inf).all() and not profile.weights["query"].below_floor.any()


def test_refusals() -> None:
    net = awake(Architecture(layers=1, width=4, heads=1))
    with pytest.raises(ArchitectureError, match="kernel sigmoid"):
        gradients(awake(Architecture(layers=1, width=4, heads=1, kernel="sigmoid")), normal(1, 3, 4))
    with pytest.raises(TokensError, match="shape of the tokens"):
        gradients(net, normal(1, 3, 4), normal(1, 2, 4))
