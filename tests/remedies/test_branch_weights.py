"""Weights of branches and skips: each is what its formula says."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope import decompose
from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer, pieces
from tests.builders import normal
from tests.deviation.reference import Network, Rows
from tests.raising import raises
from tests.remedies.small_networks import check, check_digits, check_paths, small, stirred, times

PURE: dict[str, Any] = {"mlp": "none", "norm": "none", "attention_skip": 0.0}


class Weighted(Network):
    """Branches times the numbers that their layer holds, or a power of the depth; what they read, one of the
    layer."""

    def adds(self, index: int, kind: str, Y: Rows) -> Rows:
        held = {name.split(".")[-2]: name for name in self.tensors if f"layers.{index}.parts." in name}
        if "rezero" in held:
            return times(self.tensors[f"layers.{index}.parts.rezero.weight"], Y)
        if "skipinit" in held:
            return times(self.tensors[f"layers.{index}.parts.skipinit.{kind}"], Y)
        (part,) = self.arch.parts
        return times(1 / mp.sqrt(self.arch.layers), Y) if part.name == "sqrtl" else Y

    def read(self, index: int, X: Rows) -> Rows:
        (part,) = self.arch.parts
        return times(1 / mp.sqrt(index + 1), X) if part.name == "lnscale" else X


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize(
    ("name", "place"),
    [("rezero", "pre"), ("skipinit", "post"), ("sqrtl", "post"), ("sqrtl", "pre"), ("lnscale", "pre")],
)
def test_weights_are_their_formulas(name: str, place: Any, mask: str) -> None:
    net = stirred(small(norm_place=place, mask=mask).with_remedy(name))
    check(net, Weighted(net))


@pytest.mark.parametrize("name", ["rezero", "skipinit", "sqrtl", "lnscale"])
def test_every_digit_below_float64(name: str) -> None:
    net = stirred(small(norm_place="pre", layers=4, **PURE).with_remedy(name))
    assert check_digits(net, Weighted(net), normal(1, 4, 4, seed=1)) < -20


@pytest.mark.parametrize("name", ["rezero", "skipinit"])
def test_at_first_a_layer_is_the_identity_without_norms(name: str) -> None:
    net, X = small(norm_place="post").with_remedy(name), normal(2, 5, 4)
    assert net.arch.norm == "none" and not any("_norm" in each for each in net.state_dict())
    assert torch.equal(net.run(X).output, X)


def test_rezero_has_one_number_a_layer_and_skipinit_one_a_branch() -> None:
    plain = small()
    for name, numbers in (("rezero", 1), ("skipinit", 2)):
        held = [each for each in plain.with_remedy(name).state_dict() if each.startswith("layers.1.parts.")]
        assert len(held) == numbers
    assert len([e for e in small(mlp="none").with_remedy("skipinit").state_dict() if ".1.parts." in e]) == 1


def test_a_deeper_variant_has_branches_of_its_own_depth() -> None:
    net, X = small().with_remedy("sqrtl"), normal(2, 5, 4)
    deeper = net.variant(layers=[1, 2, 3, 1])
    alone = Transformer.from_weights(deeper.arch, deeper.state_dict())
    assert torch.equal(deeper.run(X).output, alone.run(X).output)
    check(deeper, Weighted(deeper))


@pytest.mark.parametrize("spec", ["lambda:weight=0.4", "deepnorm"])
def test_skips_go_on_pure_attention(spec: str) -> None:
    net = small(norm_place="post", mlp="none").with_remedy(spec)
    check_digits(net, Network(net), normal(1, 4, 4, seed=1))


@pytest.mark.parametrize(
    ("name", "fields", "subject"),
    [
        ("deepnorm", {"norm_place": "pre"}, "norm_place"),
        ("lnscale", {"norm_place": "post"}, "norm_place"),
        ("sqrtl", {"norm_place": "sandwich"}, "norm_place"),
        ("rezero:norms=1", {"norm_place": "sandwich"}, "norm_place"),
    ],
)
def test_where_one_has_no_meaning_it_says_so(name: str, fields: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        small(**fields).with_remedy(name)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["rezero", "skipinit", "sqrtl", "lnscale"])
def test_paths_add_up(name: str, parallel: bool) -> None:
    check_paths(stirred(small(norm_place="pre", parallel=parallel).with_remedy(name)))


@pytest.mark.parametrize("name", ["skipinit", "lnscale"])
def test_heaviest_paths_are_proved(name: str) -> None:
    """Against all of them, one by one."""
    net, X = stirred(small(norm_place="pre", layers=2).with_remedy(name)), normal(1, 5, 4)
    d = decompose(net, X)
    counts = d.by_length().counts
    every = [path for length, count in enumerate(counts) for path in d.sample(length, count)]
    weights = sorted((float(d.path(path).term.norm()) for path in every), reverse=True)
    found = d.top(3, budget=10**4)
    assert found.proved == 3
    assert found.weights == pytest.approx(weights[:3], rel=1e-12)


@pytest.mark.parametrize("name", ["rezero", "skipinit", "sqrtl", "lnscale"])
def test_saved_and_read_back(name: str) -> None:
    net = stirred(small(norm_place="pre").with_remedy(name))
    assert Architecture.from_dict(net.arch.to_dict()) == net.arch
    assert Transformer.from_weights(net.arch, net.state_dict()).fingerprint == net.fingerprint


@pytest.mark.parametrize("name", ["rezero", "skipinit", "sqrtl", "lnscale"])
def test_covariances_are_those_of_weighted_tokens(name: str) -> None:
    """`E (f x_t) (f x_s)`, written out for the tokens of a sample."""
    net, X = stirred(small(norm_place="pre").with_remedy(name)), normal(1, 5, 4)
    parts: list[Any] = [part for part in pieces(net.arch.parts) if part.place != "cross"]
    for block in net.blocks:
        for part in parts:
            factor = float(part.factor(block))
            covariance = torch.stack([torch.stack([(x * y).mean() for y in X[0]]) for x in X[0]])
            weighted = torch.stack([torch.stack([(factor * x * factor * y).mean() for y in X[0]]) for x in X[0]])
            found = part.mean_field(covariance, block, None, None)
            torch.testing.assert_close(found, weighted, rtol=1e-12, atol=1e-15)
    assert any(abs(float(part.factor(net.blocks[1]))) not in (0.0, 1.0) for part in parts)
