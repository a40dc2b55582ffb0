"""What is zero because it left float64's range is marked; what is zero because it must be is not."""

from dataclasses import replace
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Experts, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import Network

METRICS = ["residual", "relative_mu", "mean_cosine_gap"]


class ZerosStay(Network):
    """The reference, in which a norm without eps leaves a token of length zero as it is."""

    def norm(self, name: str, X: Any) -> Any:
        """Rows of zeros are put back after the others went through the norm."""
        nonzero = [row for row in X if any(row)]
        normed = iter(super().norm(name, nonzero))
        return [next(normed) if any(row) else row for row in X]


def sharp_beside_zero(sharpness: float, **fields: Any) -> tuple[Transformer, Tensor]:
    """A zero token whose query looks at itself, by e^sharpness more than at the second; the others look around."""
    arch = Architecture(
        layers=1, width=2, heads=1, norm="scale", norm_eps=0.0, mlp="none", attention_skip=0.0, **fields
    )
    tensors, name = awake(arch, 3, size=0.0).state_dict(), "layers.0.attention"
    tensors[f"{name}.query.bias"] = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    tensors[f"{name}.key.bias"] = torch.tensor([[sharpness, 0.0]], dtype=torch.float64)
    tensors[f"{name}.query.weight"] = torch.tensor([[[-1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    tensors[f"{name}.key.weight"] = torch.tensor([[[-sharpness, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    return Transformer.from_weights(arch, tensors), torch.tensor([[[0, 0], [1, 2], [2, -1]]], dtype=torch.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [{"norm_place": "post"}, {"norm_place": "sandwich"}])
@pytest.mark.parametrize("confirm", [False, True])
def test_a_token_below_the_range_and_a_norm_without_eps(fields: Any, confirm: bool) -> None:
    """The zero token says e^-9000 of what the others are: the norm gives it length one."""
    net, X = sharp_beside_zero(9000.0, **fields)
    with mp.workdps(9000):
        after = ZerosStay(net).states(X[0])[1]
        assert all(mp.fsum(u * u for u in row) > 0.99 for row in after)
    table = measure(net, X, metrics=METRICS, confirm=confirm).table
    assert table.filter(table["layer"] == 1)["below_floor"].all()
    assert not table.filter(table["layer"] == 0)["below_floor"].any()


@pytest.mark.parametrize(("size", "marked"), [(1.0, False), (1e100, False), (1e130, True), (1e170, True)])
def test_a_token_below_the_range_matters_where_eps_of_the_norm_leaves_something_of_it(
    size: float, marked: bool
) -> None:
    """Rounded to zero beside tokens of 1e130 it may be of 1e-140 times their size: a norm with an eps of 1e-5 makes
    3e-8 of 1e-10. Beside tokens of 1e100 that is 3e-38, nothing. An MLP with biases hides the zero from later looks."""
    net, X = sharp_beside_zero(9000.0, norm_place="post")
    arch = replace(net.arch, norm_eps=1e-5, mlp="plain", mlp_width=4, mlp_skip=0.0)
    tensors = awake(arch, 3, size=0.3).state_dict() | {n: x for n, x in net.state_dict().items() if ".attention." in n}
    for name in ("query", "key"):  # scores are the same at any size
        tensors[f"layers.0.attention.{name}.weight"] = tensors[f"layers.0.attention.{name}.weight"] / size
    table = measure(Transformer.from_weights(arch, tensors), size * X, metrics=METRICS).table
    below = table.filter(table["layer"] == 1)["below_floor"]
    assert below.all() if marked else not below.any()


def test_within_the_range_the_same_token_is_read() -> None:
    net, X = sharp_beside_zero(50.0, norm_place="post")
    profile = measure(net, X, metrics=METRICS)
    with mp.workdps(100):
        state = ZerosStay(net).states(X[0])[1]
        mean = [mp.fsum(column) / 3 for column in zip(*state, strict=True)]
        gaps = mp.fsum((u - m) ** 2 for row in state for u, m in zip(row, mean, strict=True))
        share = float(mp.log10(mp.sqrt(gaps / mp.fsum(u * u for row in state for u in row))))
    assert not profile.table.filter(profile.table["layer"] == 1)["below_floor"].any()
    assert profile.curve("relative_mu", "log10")[0, 1].item() == pytest.approx(share, abs=1e-10)


PROVED: dict[str, tuple[dict[str, Any], str]] = {
    "no output": ({"attention_skip": 0.0, "biases": False}, "attention.output.weight"),
    "no values": ({"attention_skip": 0.0, "biases": False}, "attention.value.weight"),
    "an MLP without output": ({"mlp_skip": 0.0, "biases": False}, "mlp.down.weight"),
    "a gate that says nothing": ({"mlp_skip": 0.0, "biases": False, "mlp": "gated"}, "mlp.gate.weight"),
}


@pytest.mark.parametrize("case", list(PROVED))
@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("confirm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_of_zero_leave_zeros_that_are_proved(case: str, norm: Any, confirm: bool) -> None:
    fields, end = PROVED[case]
    arch = Architecture(layers=2, width=4, heads=2, norm=norm, norm_eps=0.0, **fields)
    tensors = awake(arch, 1).state_dict()
    tensors |= {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith(end)}
    profile = measure(Transformer.from_weights(arch, tensors), normal(1, 3, 4), metrics="residual", confirm=confirm)
    assert profile.curve("residual")[0, 1:].tolist() == [0.0, 0.0]
    assert not profile.table["below_floor"].any()


def test_equal_patterns_make_tokens_equal() -> None:
    """Uniform attention without a mask: every token is the mean."""
    arch = Architecture(layers=2, width=4, heads=2, kernel="uniform", norm="layer", mlp="none", attention_skip=0.0)
    X, padding = normal(1, 5, 4), torch.tensor([[False, True, False, False, False]])
    for padded in (None, padding):
        profile = measure(awake(arch, 2), X, padded, metrics=["mu", "head_mu"])
        assert profile.curve("mu")[0, 1:].tolist() == [0.0, 0.0]
        assert not profile.table["below_floor"].any()


def test_a_relu_that_is_shut_leaves_a_zero_that_is_proved() -> None:
    """One token has no unit above zero, and is zero after the MLP; the others are not."""
    arch = Architecture(
        layers=1, width=3, heads=1, norm="rms", norm_place="post", norm_eps=0.0, activation="relu", mlp_skip=0.0,
        biases=False, mlp_width=3,
    )  # fmt: skip
    tensors = awake(arch, 0).state_dict()
    tensors["layers.0.attention.output.weight"] = torch.zeros_like(tensors["layers.0.attention.output.weight"])
    eye = torch.eye(3, dtype=torch.float64)
    tensors["layers.0.mlp.up.weight"] = tensors["layers.0.mlp.down.weight"] = eye
    net = Transformer.from_weights(arch, tensors)
    profile = measure(net, torch.tensor([[[1.0, 2.0, 3.0], [-1.0, -2.0, -0.5], [3.0, 1.0, -1.0]]]).double())
    assert not profile.table["below_floor"].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", ["causal", "complete", "window:1"])
@pytest.mark.parametrize(("norm", "place"), [("rms", "pre"), ("scale", "post"), ("layer", "sandwich"), ("none", "pre")])
def test_a_token_of_zeros_is_not_marked_for_that(mask: Any, norm: Any, place: Any) -> None:
    """It says nothing until others look in, and under a causal mask as the first it never does."""
    arch = Architecture(
        layers=3,
        width=8,
        heads=2,
        norm=norm,
        norm_place=place,
        norm_eps=0.0,
        mask=mask,
        biases=False,
        attention_skip=0.5,
    )
    X = normal(2, 4, 8)
    X[:, 0] = 0.0
    assert not measure(awake(arch, 4), X, metrics=METRICS).table["below_floor"].any()


@pytest.mark.parametrize("biases", [True, False])
def test_experts_leave_a_token_of_zeros_where_they_have_no_bias(biases: bool) -> None:
    experts = Experts(number=3, chosen=2, width=3, biases=biases)
    arch = Architecture(layers=2, width=4, heads=2, norm="rms", norm_place="sandwich", norm_eps=0.0, mask="causal",
                        mlp="experts", experts=experts)  # fmt: skip
    tensors = awake(arch, 4).state_dict()
    tensors = {name: tensor * 0.0 if name.endswith("bias") else tensor for name, tensor in tensors.items()}
    X = normal(1, 4, 4)
    X[:, 0] = 0.0
    found = measure(Transformer.from_weights(arch, tensors), X, metrics=METRICS)
    assert not found.table["below_floor"].any()


def test_a_token_of_zeros_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by blocks of rows marks the same readings as the whole matrix."""
    from rankscope.profiles import measuring

    net, X = sharp_beside_zero(9000.0, norm_place="post")
    whole = measure(net, X, metrics=METRICS).table["below_floor"].to_list()
    monkeypatch.setattr(measuring, "_large", lambda *_: True)
    assert measure(net, X, metrics=METRICS).table["below_floor"].to_list() == whole and any(whole)
