"""Remedies by name: at their zero they change nothing, and wrong numbers are refused."""

import pytest
import torch

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.remedies import REMEDIES, remedy
from tests.builders import normal
from tests.raising import raises
from tests.remedies.score_networks import MASKS, PADDING, network


@pytest.mark.parametrize("name", [name for name, kind in REMEDIES.items() if kind.zero])
@pytest.mark.parametrize("mask", MASKS)
def test_at_its_zero_nothing_changes(name: str, mask: str) -> None:
    net, X = network(mask), normal(2, 6, 8, seed=3)
    if name == "lnscale":  # of networks that read through a norm
        net = Transformer.from_weights(net.arch.replace(norm_place="pre"), net.state_dict())
    same = net.with_remedy(name, **REMEDIES[name].zero)
    assert torch.equal(same.run(X, PADDING).output, net.run(X, PADDING).output)


def test_none_goes_on_twice() -> None:
    """The second would find the tensors of the first."""
    with raises(ArchitectureError, subject="parts"):
        network().with_remedy("attnscale", w=0.5).with_remedy("attnscale", w=1.0)


def test_saved_and_described() -> None:
    net = network().with_remedy("attnscale", w=0.5)
    assert Architecture.from_dict(net.arch.to_dict()) == net.arch
    again = Transformer.from_weights(net.arch, net.state_dict())
    assert again.fingerprint == net.fingerprint
    assert "attnscale" in repr(net)


@pytest.mark.parametrize(
    ("spec", "numbers", "subject"),
    [
        ("atnscale", {}, "remedy"),
        ("attnscale:w", {}, "attnscale"),
        ("attnscale:v=1", {}, "v"),
        ("attnscale", {"w": "much"}, "w"),
        ("attnscale:w=nan", {}, "w"),
        ("sinkhorn:rounds=2.5", {}, "rounds"),
        ("sinkhorn", {"rounds": float("inf")}, "rounds"),
    ],
)
def test_bad_ones_get_a_sentence(spec: str, numbers: dict[str, object], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        remedy(spec, **numbers)
