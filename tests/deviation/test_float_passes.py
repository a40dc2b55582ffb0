"""Float64's rounding is a small share of what float32 differs from it by; else float64 is not trusted."""

import mpmath as mp
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import DeviationStep, FloatSecondPass, PassInputs
from rankscope.deviation.second_pass import ROUNDING, FloatLayer, FloatPasses, trusts_floats, with_second_pass
from rankscope.nets import Architecture, Step, Transformer
from rankscope.profiles import measure
from tests.builders import normal
from tests.deviation.reference import Network
from tests.strategies import architectures

SMALL = Architecture(layers=6, width=16, heads=2, mlp_width=32, norm="layer")


def trusted_layers(net: Transformer, X: Tensor) -> list[FloatLayer]:
    """The layers, the input among them, up to the last in which float64 is trusted with every sample."""
    passes = FloatPasses(PassInputs.of(net, X))
    layers = [passes.last]
    with torch.no_grad():
        for block in net.blocks:
            layer = passes.run_layer(block)
            if not bool(layer.sees.all()):
                break
            layers.append(layer)
            passes.last = layer
    return layers


@settings(max_examples=25)
@given(architectures(), st.integers(2, 5), st.integers(0, 9999))
def test_the_rounding_of_float64_is_within_its_margin(arch: Architecture, n: int, seed: int) -> None:
    """Against 50 digits: at most `ROUNDING` of what float32 differs by, in every layer where float64 is trusted."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    assume(trusts_floats(arch))
    net, X = Transformer.random(arch, seed=seed, init="xavier"), normal(1, n, arch.width, seed=seed)
    with mp.workdps(50):
        exact = Network(net).states(X[0])
        for layer, rows in zip(trusted_layers(net, X)[1:], exact[1:], strict=False):
            wide, narrow = layer.step.state[0], layer.narrow.state[0].double()
            pairs = zip(wide.flatten().tolist(), (entry for row in rows for entry in row), strict=True)
            rounding = mp.sqrt(sum((mp.mpf(mine) - true) ** 2 for mine, true in pairs))
            assert rounding <= ROUNDING * float((narrow - wide).norm())


def test_readings_of_float64_hold_to_the_digits_that_they_claim() -> None:
    """Of a network whose tokens stay apart nothing is read off deviation arithmetic, and 50 digits agree."""
    net, X = Transformer.random(SMALL, seed=1, init="xavier"), normal(1, 5, 16, seed=2)
    assert len(trusted_layers(net, X)) == 7
    profile = measure(net, X, metrics="mu")
    with mp.workdps(50):
        for row, rows in zip(profile.table.iter_rows(named=True), Network(net).states(X[0]), strict=True):
            means = [sum(column) / 5 for column in zip(*rows, strict=True)]
            true = mp.sqrt(sum((entry - mean) ** 2 for line in rows for entry, mean in zip(line, means, strict=True)))
            assert abs(mp.mpf(row["value"]) / true - 1) <= mp.mpf(10) ** -row["digits"]
            assert row["digits"] > 13 and row["floor"] == 0


@pytest.mark.parametrize("variant", ["san", "san+mlp"])
def test_deviation_arithmetic_takes_over_where_tokens_become_the_same(variant: str) -> None:
    """And stays: each layer is of one arithmetic, and after the first of deviation arithmetic all are."""
    net, X = Transformer.random(SMALL, seed=1).variant(variant), normal(2, 6, 16, seed=2)
    with torch.no_grad():
        steps = list(with_second_pass(PassInputs.of(net, X)))
    kinds = [isinstance(step, DeviationStep) for step, _ in steps]
    assert kinds == sorted(kinds) and not kinds[0] and kinds[-1]
    for step, second in steps:
        assert isinstance(step, Step) == isinstance(second, FloatSecondPass)


def test_what_float64_and_float32_hide_alike_is_not_left_to_them() -> None:
    """Norms that leave a sign, scores that choose a token by their last digit, a token that is next to nothing."""
    net, X = Transformer.random(SMALL, seed=1), normal(1, 5, 16, seed=2)
    assert not trusts_floats(Architecture(layers=1, width=2, heads=1, head_width=2, norm="layer"))
    assert not trusts_floats(Architecture(layers=1, width=1, heads=1, head_width=1, norm="rms"))
    assert trusts_floats(net.arch)
    short = X.clone()
    short[0, 2] *= 1e-40
    assert not bool(FloatPasses(PassInputs.of(net, short)).last.sees)
    tensors = net.state_dict()
    tensors["layers.0.attention.query.weight"] = tensors["layers.0.attention.query.weight"] * 1e9
    steep = Transformer.from_weights(net.arch, tensors)
    assert len(trusted_layers(steep, X)) == 1
    assert len(trusted_layers(net, X)) == 7
