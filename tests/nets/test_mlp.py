"""Mixtures of experts as a part of an architecture."""

import json
import random
from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.errors import ArchitectureError, PathError
from rankscope.nets import Architecture, Experts, Transformer, chosen_experts, chosen_weights, shapes
from rankscope.paths import decompose
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.raising import raises

MIXTURE = Experts(number=4, chosen=2, width=5, shared_width=3, shared_gate=True, dense_layers=(1,))
ARCH = Architecture(layers=3, width=8, heads=2, mlp="experts", experts=MIXTURE, activation="silu")


def test_an_architecture_with_experts_survives_json() -> None:
    assert Architecture.from_dict(json.loads(json.dumps(ARCH.to_dict()))) == ARCH
    assert eval(repr(ARCH)) == ARCH


def test_only_layers_with_a_mixture_have_one() -> None:
    names = shapes(ARCH)
    assert names["layers.0.experts.up.weight"] == (8, 4, 5) and "layers.0.mlp.up.weight" not in names
    assert names["layers.1.mlp.gate.weight"] == (8, 32) and "layers.1.experts.up.weight" not in names
    net = awake(ARCH)
    assert Transformer.from_weights(ARCH, net.state_dict()).fingerprint == net.fingerprint


def test_variants_keep_their_mixtures() -> None:
    net, X = awake(ARCH), normal(2, 4, 8)
    turned = net.variant(layers=[2, 1, 3, 2])
    assert turned.arch.experts is not None and turned.arch.experts.dense_layers == (0, 3)
    assert turned.run(X).output.shape == X.shape
    without = net.variant(mlp=False)
    assert not any("experts" in name for name in without.state_dict()) and without.run(X).output.shape == X.shape


def test_one_expert_for_all_is_a_gated_mlp() -> None:
    """A mixture of one, renormalised, is the MLP it consists of."""
    arch = ARCH.replace(experts=Experts(number=1, chosen=1, width=32, renormalised=True))
    net = awake(arch)
    same = {"gate": lambda w: w[:, 0], "up": lambda w: w[:, 0], "down": lambda w: w[0]}
    tensors: dict[str, Any] = {}
    for name, tensor in net.state_dict().items():
        part = name.split(".")[-2]
        if ".experts." not in name:
            tensors[name] = tensor
        elif part != "router":
            tensors[name.replace("experts", "mlp")] = same[part](tensor)
    biases = tuple(each for each in arch.biases if each != "mlp")  # type: ignore[union-attr]
    dense = arch.replace(mlp="gated", experts=None, biases=biases)
    X = normal(2, 5, 8)
    other = Transformer.from_weights(dense, tensors)
    torch.testing.assert_close(net.run(X).output, other.run(X).output, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"number": 2, "chosen": 3, "width": 4}, "chosen"),
        ({"number": 0, "chosen": 1, "width": 4}, "number"),
        ({"number": 2, "chosen": 1, "width": 4, "shared_gate": True}, "shared_gate"),
        ({"number": 4, "chosen": 1, "width": 4, "groups": 3}, "groups"),
        ({"number": 4, "chosen": 1, "width": 4, "groups": 2, "groups_chosen": 3}, "groups"),
        ({"number": 4, "chosen": 3, "width": 4, "groups": 2}, "group_best"),
        ({"number": 4, "chosen": 1, "width": 4, "limit": -1.0}, "limit"),
        ({"number": 4, "chosen": 1, "width": 4, "biases": True, "shared_width": 3}, "shared_width"),
    ],
)
def test_experts_that_cannot_be_are_a_sentence(fields: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        Experts(**fields)


def test_an_architecture_must_say_its_experts() -> None:
    with raises(ArchitectureError, subject="experts"):
        Architecture(layers=1, width=8, heads=2, mlp="experts")
    with raises(ArchitectureError, subject="dense_layers"):
        Architecture(layers=1, width=8, heads=2, mlp="experts", experts=MIXTURE)
    with raises(ArchitectureError, subject="experts"):
        Architecture.from_dict({"layers": 1, "width": 8, "heads": 2, "experts": {"many": 3}})


def test_experts_with_biases_that_are_cut_off() -> None:
    """gpt-oss: each of the chosen experts written out, weighed by a softmax of the chosen alone."""
    experts = Experts(number=3, chosen=2, width=5, renormalised=True, biases=True, limit=0.3)
    arch = Architecture(
        layers=1, width=8, heads=2, norm="none", mlp="experts", experts=experts, activation="quick_gelu"
    )
    net, X = awake(arch), normal(1, 4, 8)
    w, before = net.weights.layers[0].experts, net.variant(mlp=False).run(X).output[0]
    assert w is not None and w.router.bias is not None and w.down.bias is not None
    assert w.gate.bias is not None and w.up.bias is not None
    for x, y in zip(before, net.run(X).output[0], strict=True):
        logits = x @ w.router.weight + w.router.bias
        best = sorted(range(3), key=lambda e: -float(logits[e]))[:2]
        shares, total = [float(logits[e].exp()) for e in best], x
        for e, share in zip(best, shares, strict=True):
            gate = (x @ w.gate.weight[:, e] + w.gate.bias[e]).clip(max=0.3)
            up = (x @ w.up.weight[:, e] + w.up.bias[e]).clip(-0.3, 0.3)
            hidden = gate / (1 + (-1.702 * gate).exp()) * (1 + up)
            total = total + share / sum(shares) * (hidden @ w.down.weight[e] + w.down.bias[e])
        torch.testing.assert_close(y, total, rtol=1e-12, atol=1e-13)
    assert measure(net, X).arithmetics == ["deviation"]
    with raises(PathError, "experts"):
        decompose(net, X)


RANGES = [(-1e-9, 1e-9), (-2.0, 2.0), (30.0, 42.0), (-900.0, 900.0), (700.0, 2000.0), (-2000.0, -700.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("group_best", [1, 2])
@pytest.mark.parametrize("correction", [None, 0.0, 0.3])
def test_experts_are_chosen_by_scores_however_close_these_are(
    sigmoid: bool, group_best: int, correction: float | None
) -> None:
    """Sigmoids of 40 and 50 are both one in float64, and so are softmaxes of -800 and -900 both zero."""
    experts = Experts(number=6, chosen=2, width=1, sigmoid=sigmoid, groups=3, groups_chosen=2, group_best=group_best)
    draw = random.Random(1)
    added = None if correction is None else [correction * draw.choice((0, 1)) for _ in range(6)]
    for low, high in RANGES:
        if group_best == 2 and not sigmoid and high < 1e-6:
            continue  # sums of shares that differ by rounding: no model has them
        for _ in range(8):
            logits = [draw.uniform(low, high) for _ in range(6)]
            row = torch.tensor([logits], dtype=torch.float64)
            c = None if added is None else torch.tensor(added, dtype=torch.float64)
            found = chosen_experts(row, experts, c)
            assert found[0].nonzero()[:, 0].tolist() == exactly_chosen(logits, experts, added), (logits, added)
            scaled = chosen_experts(row * 2.0**20, experts, c, torch.tensor([[2.0]]).log().double() * -20)
            assert scaled.equal(found)


def exactly_chosen(logits: list[float], experts: Experts, correction: list[float] | None) -> list[int]:
    """Modeling_deepseek_v3's route_tokens_to_experts, in 2,000 digits."""
    with mp.workdps(2000):
        weights = [mp.exp(mp.mpf(each) - mp.mpf(max(logits))) for each in logits]
        s = [1 / (1 + mp.exp(-mp.mpf(each))) if experts.sigmoid else w for each, w in zip(logits, weights, strict=True)]
        total = mp.mpf(1) if experts.sigmoid else mp.fsum(weights)
        s = [u / total + c for u, c in zip(s, correction or [0.0] * 6, strict=True)]
        groups = [[0, 1], [2, 3], [4, 5]]
        groups.sort(key=lambda group: mp.fsum(sorted(s[e] for e in group)[-experts.group_best :]), reverse=True)
        return sorted(sorted(groups[0] + groups[1], key=lambda e: s[e])[-2:])


def test_tiny_logits_choose_as_their_signs_and_sizes_do() -> None:
    """Logits of e^-2000 in all: sums of two sigmoids differ by what is left of one half."""
    experts = Experts(number=4, chosen=1, width=1, sigmoid=True, groups=2, group_best=2)
    logits = torch.tensor([[3.0, -1.0, 1.0, 0.5], [-3.0, 4.0, 0.1, 0.5], [-3.0, -4.0, -7.0, -0.1]], dtype=torch.float64)
    chosen = chosen_experts(logits, experts, None, torch.tensor([[-2000.0]], dtype=torch.float64))
    assert chosen.nonzero()[:, 1].tolist() == [0, 1, 0]
    assert chosen_experts(0.0 * logits, experts).nonzero()[:, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("renormalised", [True, False])
def test_a_chosen_expert_has_a_weight_however_small(sigmoid: bool, renormalised: bool) -> None:
    experts = Experts(number=3, chosen=2, width=1, sigmoid=sigmoid, renormalised=renormalised)
    logits = torch.tensor([[-1900.0, -800.0, -1900.5]], dtype=torch.float64)
    p = chosen_weights(logits, experts, chosen_experts(logits, experts))
    assert (p > 0).tolist() == [[True, True, False]]
    assert float(p.sum()) == pytest.approx(0.0 if sigmoid and not renormalised else 1.0)
