"""Remedies on scores and weights: both arithmetics, several at once, files, and what refuses them."""

import math
from typing import Any

import pytest
import torch

from rankscope.deviation import propagate, rounded
from rankscope.errors import ArchitectureError, PathError, TheoremError
from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope.remedies import remedy
from rankscope.sources.loading import read_saved
from rankscope.theory import certify
from tests.builders import thinned
from tests.raising import raises
from tests.remedies.score_networks import MASKS, PADDING, X, equal, network

SPECS = ["sinkhorn:rounds=3", "logn:gamma=0.8", "differential", "differential:norm=0", "differential2"]
ALIKE = ["sinkhorn:rounds=3", "logn:gamma=0.8", "differential", "linear"]
"""Of which doubled precision is asked when there is time."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("spec", "variant", "mask"), thinned(SPECS, ["transformer", "san", "san+norm"], MASKS))
def test_states_equal_float64_where_that_can_see(spec: str, variant: str, mask: str) -> None:
    net = network(mask, variant).with_remedy(spec)
    equal(net)


@pytest.mark.parametrize(
    ("specs", "mask"),
    thinned([
        ("differential:norm=0", "shaped:alpha=0.3,beta=1.2,gamma=0.7"),
        ("centred", "differential:norm=0"),
        ("sinkhorn:rounds=1", "attnscale:w=0.5"),
        ("differential2", "shaped:alpha=0.3,beta=1.2,gamma=0.7"),
        ("centred", "differential2", "differential"),
        ("logn", "sinkhorn", "centred", "attnscale:w=0.5"),
    ], MASKS),
)  # fmt: skip
def test_remedies_go_together(specs: tuple[str, ...], mask: str) -> None:
    net = network(mask, "san+norm")
    for spec in specs:
        net = net.with_remedy(spec)
    equal(net)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec", ["centred", "differential2", *(pytest.param(each, marks=pytest.mark.slow) for each in ALIKE)]
)
def test_in_doubled_precision(spec: str) -> None:
    """One layer by the same rules with 32 digits."""
    net = network("causal", kernel="linear") if spec == "linear" else network("causal").with_remedy(spec)
    net = net.variant(layers=1, mlp=False)
    plain, fine = (list(propagate(net, X, PADDING, doubled=each))[1] for each in (False, True))
    assert torch.allclose(rounded(fine).state.tokens(), plain.state.tokens(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "mask"), thinned([{}, {"query_norm": True}, {"positions": "rotary"}, {"key_heads": 1}], MASKS)
)
def test_the_linear_kernel_in_both_arithmetics(mask: str, fields: dict[str, Any]) -> None:
    equal(network(mask, kernel="linear", **fields))


def test_weights_of_the_linear_kernel_that_floating_point_cannot_hold() -> None:
    """Keys and queries of -500 in one entry and -600 in another: e^-1100 is none of float64's numbers."""
    arch = Architecture(layers=1, width=2, heads=1, kernel="linear", mlp="none", norm="none", biases=False)
    eye = torch.eye(2, dtype=torch.float64)
    tensors = {f"layers.0.attention.{name}.weight": eye[:, None] for name in ("query", "key", "value")}
    net = Transformer.from_weights(arch, tensors | {"layers.0.attention.output.weight": eye[None]})
    tokens = torch.tensor([[[-500.0, -600.0], [-600.0, -500.0]]], dtype=torch.float64)
    P = net.run(tokens, attention=True).attention[0][0, 0]
    near = 1 / (1 + 2 * math.exp(-100.0))  # e^-1000 of one's own beside 2 e^-1100 of the other's
    assert torch.allclose(P, torch.tensor([[near, 1 - near], [1 - near, near]], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("spec", SPECS)
def test_saved_and_read_back(spec: str, tmp_path: Any) -> None:
    net = network().with_remedy(spec)
    net.save(tmp_path / "net")
    again = read_saved(tmp_path / "net")
    assert again.arch == net.arch and again.fingerprint == net.fingerprint
    assert torch.equal(again.run(X).output, net.run(X).output)


@pytest.mark.slow
def test_theorems_and_paths_refuse_with_a_reason() -> None:
    san = network(variant="san")
    actual = certify(san.with_remedy("differential"), X, theorems="dong2021-2.3").table
    assert not actual["met"].any() and "differential" in actual["why"][0]
    with raises(TheoremError, subject="architecture"):
        certify(san.with_remedy("logn"), X)
    actual = certify(san.with_remedy("sinkhorn"), X, theorems="dong2021-2.3").table
    assert not actual["met"].any() and "a kernel other than softmax" in actual["why"][0]
    with raises(PathError, subject="head_norm"):
        decompose(san.with_remedy("differential"), X)


@pytest.mark.parametrize(
    ("fields", "spec", "subject"),
    [
        ({"kernel": "linear"}, "logn", "log_gain"),
        ({"kernel": "gaussian"}, "sinkhorn", "kernel"),
        ({}, "logn:gamma=0", "gamma"),
        ({}, "sinkhorn:rounds=-1", "kernel"),
    ],
)
def test_what_does_not_go_together_gets_a_sentence(fields: dict[str, Any], spec: str, subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        remedy(spec).applied(Architecture(layers=1, width=8, heads=2, **fields))
