"""The MLP of a state: its activation against hundreds of digits, and far out in its tails."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.deviation import Scaled, State
from rankscope.deviation.activations import FADING, SERIES, TAIL, faded
from rankscope.deviation.mlp import activation, clamped, mlp
from rankscope.deviation.state import ValidTokens
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal
from tests.deviation.reference import ACTIVATIONS as EXACT
from tests.deviation.reference import Network, composite, log10_residual


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "identity"])
def test_an_mlp_far_out_in_its_tails_does_not_lose_what_tokens_differ_by(activation: str) -> None:
    """Tokens of 1e20 that differ by one: the MLP is linear there, and their difference passes through it."""
    arch = Architecture(layers=1, width=8, heads=1, norm="none", biases=False, activation=activation)
    layer = Transformer.random(arch, init="xavier").weights.layers[0]
    x, R = 1e20 * tokens(1, 8)[:, 0], tokens(4, 8, seed=3)
    real = ValidTokens(torch.ones(1, 4, dtype=torch.bool))
    assert layer.mlp is not None
    found = mlp(arch, layer.mlp, State(Scaled.plain(x), Scaled.plain(R), real)).R.explicit()
    opened = torch.ones(1, 32) if activation == "identity" else x @ layer.mlp.up.weight > 0
    expected = ((R @ layer.mlp.up.weight) * opened[:, None]) @ layer.mlp.down.weight
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


POINTS = [-12.0, -7.3, -2.0, -0.1, 0.3, 1.1, 4.0]


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", [*POINTS, 0.0, 0.003, -0.003])  # small steps cross zero from the last two
def test_an_activations_change_is_exact_at_every_scale(name: str, z: float) -> None:
    """act(z + d) - act(z) for d = +-e^log, on both sides of the switch to plain differences."""
    steps = torch.tensor([[[1.0], [-0.6]]], dtype=torch.float64)
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    for log in (-3000.0, -60.0, -12.0, -5.0, -4.5, -4.0, 0.0, 3.0):
        value, change = activation(name, common, Scaled(steps, torch.tensor([log], dtype=torch.float64)))
        with mp.workdps(1500 if log < -100 else 200):
            at_z = EXACT[name](mp.mpf(z))
            # To rounding of the step itself: in an activation's flat tail the change is smaller than that.
            assert float(value.explicit()) == pytest.approx(float(at_z), rel=1e-13, abs=1e-15)
            for step, mine in zip(steps.flatten(), change.value.flatten(), strict=True):
                d = mp.mpf(float(step)) * mp.exp(log)
                true = EXACT[name](mp.mpf(z) + d) - at_z
                error = mp.mpf(float(mine)) * mp.exp(mp.mpf(float(change.log))) - true
                assert abs(error / d) < 3e-13
                if z < -5 and d < 0.1 and name != "tanh":  # in a tail that ends at 0, to its own size
                    assert abs(error) <= mp.mpf("1e-9") * abs(true)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("z", [15.0, 36.1, 113.3, 900.0])
@pytest.mark.parametrize("log", [-8.0, -5.0, -4.0, -1.0, 1.0])
def test_a_step_beside_a_large_value_keeps_its_digits(name: str, z: float, log: float) -> None:
    """Where z + d - z is rounded at the size of z, the change is as exact as d is."""
    steps = torch.tensor([[[1.0], [-0.6]]], dtype=torch.float64)
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    change = activation(name, common, Scaled(steps, torch.tensor([log], dtype=torch.float64)))[1]
    with mp.workdps(900):
        for step, mine in zip(steps.flatten(), change.value.flatten(), strict=True):
            d = mp.mpf(float(step)) * mp.exp(log)
            true = EXACT[name](mp.mpf(z) + d) - EXACT[name](mp.mpf(z))
            assert abs(mp.mpf(float(mine)) * mp.exp(mp.mpf(float(change.log))) - true) < 3e-15 * abs(d)


@pytest.mark.parametrize(("z", "d"), [(1e6, -2e6), (1e10, -3e10), (-1e119, 2e119), (40.0, -79.0)])
def test_a_step_of_tanh_from_one_tail_into_the_other(z: float, d: float) -> None:
    common = Scaled.plain(torch.tensor([[z]], dtype=torch.float64))
    change = activation("tanh", common, Scaled.plain(torch.tensor([[[d]]], dtype=torch.float64)))[1]
    with mp.workdps(200):
        true = mp.tanh(mp.mpf(z) + mp.mpf(d)) - mp.tanh(mp.mpf(z))
    assert float(change.explicit()) == pytest.approx(float(true), rel=1e-13)


@pytest.mark.parametrize("log", [-3000.0, -40.0, -1.0, 3.0, 300.0, 700.0])
@pytest.mark.parametrize("least", [-7.0, -torch.inf])
def test_what_is_cut_off_changes_by_what_is_left_of_a_step(log: float, least: float) -> None:
    """min(max(z + d, least), 7) - min(max(z, least), 7), on either side of both limits and across them."""
    places = [*POINTS, -1e9, -7.5, 6.9, 7.1, 1e5]
    common = Scaled.plain(torch.tensor([places], dtype=torch.float64))
    steps = normal(1, 6, len(places), seed=3)
    value, change = clamped(common, Scaled(steps, torch.tensor([log], dtype=torch.float64)), least, 7.0)
    with mp.workdps(2000):

        def cut(u: Any) -> Any:
            return min(max(u, mp.mpf(least)), mp.mpf(7))

        scale, common_scale = mp.exp(mp.mpf(float(change.log))), mp.exp(mp.mpf(float(value.log)))
        for k, z in enumerate(places):
            assert float(mp.mpf(float(value.value[0, k])) * common_scale) == pytest.approx(float(cut(mp.mpf(z))))
            for step, mine in zip(steps[0, :, k], change.value[0, :, k], strict=True):
                d = mp.mpf(float(step)) * mp.exp(log)
                true = cut(mp.mpf(z) + d) - cut(mp.mpf(z))
                size = max(abs(true), abs(mp.mpf(z)) * (true not in (0, d)))  # across a limit as exact as z is
                assert abs(mp.mpf(float(mine)) * scale - true) <= mp.mpf("4e-15") * size


def test_what_is_cut_off_has_no_end_of_its_range() -> None:
    """z of e^900 or e^-900, and steps beside it: beyond the limit and back, or never near it."""
    large, small = (torch.tensor([log], dtype=torch.float64) for log in (900.0, -900.0))
    one, steps = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[[-2.0], [1.0], [-0.5]]], dtype=torch.float64)
    value, change = clamped(Scaled(one, large), Scaled(steps, large), -7.0, 7.0)
    assert float(value.explicit()) == pytest.approx(7)
    assert change.explicit().flatten().tolist() == pytest.approx([-14.0, 0.0, 0.0])
    value, change = clamped(Scaled(one, small), Scaled(steps, small), -7.0, 7.0)
    assert value.log.equal(small) and change.value.equal(steps) and change.log.equal(small)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("confirm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_shut_gate_beside_an_open_one_that_lets_nothing_through(activation: Any, confirm: bool) -> None:
    """The first unit is open and its other factor zero; the second is shut beyond float64's range, and all there is."""
    arch = Architecture(
        layers=1, width=2, heads=1, norm="none", mlp="gated", activation=activation, mlp_width=2, mlp_skip=0.0,
        biases=False,
    )  # fmt: skip
    state = Transformer.random(arch).to(torch.float64).state_dict()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    tensors["layers.0.mlp.gate.weight"] = torch.tensor([[500.0, -900.0], [0.0, 0.0]], dtype=torch.float64)
    tensors["layers.0.mlp.up.weight"] = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    tensors["layers.0.mlp.down.weight"] = torch.eye(2, dtype=torch.float64)
    net = Transformer.from_weights(arch, tensors)
    X = torch.tensor([[[1.5, 0.3], [1.5, -2.0], [1.5000001, 1.0]]], dtype=torch.float64)
    profile = measure(net, X, metrics=["residual", "relative_residual"], confirm=confirm)
    with mp.workdps(60):
        after = Network(net).states(X[0])[1]
        exact = [log10_residual(after), log10_residual(after) - mp.log10(composite(after))]
    for metric, true in zip(("residual", "relative_residual"), exact, strict=True):
        assert profile.curve(metric, "log10")[0, 1].item() == pytest.approx(float(true), rel=1e-9, abs=1e-9)
    assert not profile.table["below_floor"].any() and float(exact[0]) < -500


@pytest.mark.parametrize("name", FADING)
@pytest.mark.parametrize("beyond", [3.0, 8.0])
def test_a_step_in_a_tail_is_exact_to_its_own_size(name: str, beyond: float) -> None:
    """Where the activation is less than anything beside it, from steps that are next to nothing up to large ones."""
    steps = torch.tensor([[[1.0], [-0.6]]], dtype=torch.float64)
    z = TAIL[name] - beyond
    common = torch.tensor([[z]], dtype=torch.float64)
    for log in (-100.0, -20.0, -9.0, -6.0, -3.0, 0.5):
        d = Scaled(steps, torch.tensor([log], dtype=torch.float64))
        value, change = faded(name, common, d.explicit(), d)
        with mp.workdps(700):  # 1 + tanh is 1e-270
            at_z = EXACT[name](mp.mpf(z))
            mine = mp.mpf(float(value.value)) * mp.exp(mp.mpf(float(value.log)))
            assert abs(mine / at_z - 1) < 1e-11
            for step, numbers in zip(steps.flatten(), change.value.flatten(), strict=True):
                true = EXACT[name](z + mp.mpf(float(step)) * mp.exp(log)) - at_z
                assert abs(mp.mpf(float(numbers)) * mp.exp(mp.mpf(float(change.log))) / true - 1) < 1e-9
