"""Remedies that act on how scores become weights: their formulas, written out again."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.deviation import propagate, rounded
from rankscope.errors import ArchitectureError, PathError, TheoremError
from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import traverse
from rankscope.paths import decompose
from rankscope.remedies import remedy
from rankscope.sources.load import read_saved
from rankscope.theory import certify
from tests.builders import normal, thinned
from tests.raising import raises
from tests.remedies.small_networks import check_paths, small

MASKS = ["complete", "causal", "window:1"]
SPECS = ["sinkhorn:rounds=3", "logn:gamma=0.8", "differential", "differential:norm=0", "differential2"]
PADDING = torch.tensor([[False] * 6, [True, True] + [False] * 4])
X = normal(2, 6, 8, seed=3)
ALIKE = ["sinkhorn:rounds=3", "logn:gamma=0.8", "differential", "linear"]
"""Of which doubled precision is asked when there is time."""


def network(mask: str = "complete", variant: str = "transformer", **fields: Any) -> Transformer:
    arch = Architecture(layers=3, width=8, heads=2, mask=mask, mlp_width=16, **fields)
    return Transformer.random(arch, seed=1, init="xavier").variant(variant)


def scores(net: Transformer, prefix: str = "layers.0.attention") -> Tensor:
    """q . k / sqrt(head_width) of the first layer, from its tensors."""
    state = net.state()
    names = ("query", "key") if "parts" in prefix else ("query.weight", "key.weight")
    q, k = (torch.einsum("btd,dhc->bhtc", X, state[f"{prefix}.{name}"]) for name in names)
    return q @ k.mT / math.sqrt(net.arch.head_width)


def seen(mask: str) -> Tensor:
    """[sample, token, token]: whom real tokens see."""
    return mask_matrix(mask, 6) & ~PADDING[:, None, :] & ~PADDING[:, :, None]


def softmax(scores: Tensor, mask: str) -> Tensor:
    """Over what each token sees; rows of padding zero."""
    weights = scores.exp() * seen(mask)[:, None]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def first(net: Transformer) -> Tensor:
    return net.run(X, PADDING, attention=True).attention[0]


@pytest.mark.parametrize("mask", MASKS)
def test_sinkhorn_divides_columns_and_rows_in_turn(mask: str) -> None:
    """Loops over tokens; only real ones have sums."""
    net = network(mask)
    found = first(net.with_remedy("sinkhorn", rounds=3))
    expected = softmax(scores(net), mask)
    for sample in range(2):
        real = [i for i in range(6) if not PADDING[sample, i]]
        for P in expected[sample]:
            for _ in range(3):
                for j in real:
                    P[:, j] = P[:, j] / sum(float(P[i, j]) for i in real)
                for i in real:
                    P[i] = P[i] / sum(float(P[i, j]) for j in real)
    assert torch.allclose(found, expected, atol=1e-14)
    if mask == "complete":
        many = first(net.with_remedy("sinkhorn", rounds=200))
        assert torch.allclose(many.sum(-2), (~PADDING).double()[:, None], atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_sinkhorn_of_no_round_is_softmax(mask: str) -> None:
    net = network(mask, positions="alibi")
    assert torch.equal(first(net.variant(kernel="sinkhorn:0")), first(net))


@pytest.mark.parametrize("mask", MASKS)
def test_scores_grow_with_the_log_of_the_number_of_real_tokens(mask: str) -> None:
    net = network(mask)
    gain = torch.tensor([math.log(6), math.log(4)])[:, None, None, None] * 0.8
    assert torch.allclose(first(net.with_remedy("logn", gamma=0.8)), softmax(scores(net) * gain, mask), atol=1e-14)


@pytest.mark.parametrize("fields", [{"kernel": "gaussian"}, {"positions": "alibi", "score_cap": 2.0}])
def test_the_gain_multiplies_positions_and_caps_as_well(fields: dict[str, Any]) -> None:
    """log P, but for a constant of each row, is so many times what it was."""
    net = network(**fields)
    logs = [first(each)[0].log() for each in (net, net.with_remedy("logn", gamma=0.8))]
    before, after = (each - each.mean(-1, keepdim=True) for each in logs)
    assert torch.allclose(after, 0.8 * math.log(6) * before, atol=1e-12)


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_differential_attention(mask: str, norm: int) -> None:
    net = network(mask).with_remedy("differential", norm=norm)
    state, mine = net.state(), "layers.0.parts.differential"
    a, b, c, d = (state[f"{mine}.lambda_{each}"] for each in ("query_1", "key_1", "query_2", "key_2"))
    weight = math.exp(float(a @ b)) - math.exp(float(c @ d)) + 0.2
    P = softmax(scores(net), mask) - weight * softmax(scores(net, mine), mask)
    (step,) = [each for each in net.steps(X, PADDING) if each.layer == 1]
    assert step.attention is not None and torch.allclose(step.attention, P, atol=1e-14)
    said = P @ torch.einsum("btd,dhc->bhtc", X, state["layers.0.attention.value.weight"])
    if norm:
        said = 0.8 * said / (said.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert step.heads is not None and torch.allclose(step.heads, said.transpose(1, 2), atol=1e-13)


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_the_second_differential_attention(mask: str, key_heads: int) -> None:
    """Each token takes its own share of a second attention to the same keys and values."""
    net = network(mask, key_heads=key_heads).with_remedy("differential2")
    state, found = net.state(), first(net)
    mine = {name: state[f"layers.0.parts.differential2.{name}"] for name in ("query", "share")}
    k = torch.einsum("btd,dhc->bhtc", X, state["layers.0.attention.key.weight"])
    k = k.repeat_interleave(2 // key_heads, 1)
    both = [
        softmax(torch.einsum("btd,dhc->bhtc", X, query) @ k.mT / math.sqrt(net.arch.head_width), mask)
        for query in (state["layers.0.attention.query.weight"], mine["query"])
    ]
    for sample, head, i in itertools.product(range(2), range(2), range(6)):
        share = 1 / (1 + math.exp(-float(X[sample, i] @ mine["share"][:, head])))
        expected = both[0][sample, head, i] - share * both[1][sample, head, i]
        assert torch.allclose(found[sample, head, i], expected, rtol=0, atol=1e-14)
    assert mine["share"].abs().max() <= 1 / math.sqrt(8)  # as torch starts a linear layer of 8 inputs


def test_paths_take_the_second_differential_attention_as_it_came_out() -> None:
    check_paths(small(norm_place="pre", mask="causal").with_remedy("differential2"))


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


def equal(net: Transformer) -> None:
    """States and attention in both arithmetics."""
    for plain, step in zip(net.steps(X, PADDING), propagate(net, X, PADDING), strict=True):
        size = float(plain.state.abs().max())
        assert torch.allclose(step.state.tokens(), plain.state, rtol=0, atol=1e-10 * size)
        if plain.attention is not None and step.attention is not None:
            rows = ~PADDING[:, None, :, None]
            assert torch.allclose(step.attention.matrix() * rows, plain.attention * rows, atol=1e-12)


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


def test_theorems_and_paths_refuse_with_a_reason() -> None:
    san = network(variant="san")
    found = certify(san.with_remedy("differential"), X, theorems="dong2021-2.3").table
    assert not found["met"].any() and "differential" in found["why"][0]
    with raises(TheoremError, subject="architecture"):
        certify(san.with_remedy("logn"), X)
    found = certify(san.with_remedy("sinkhorn"), X, theorems="dong2021-2.3").table
    assert not found["met"].any() and "a kernel other than softmax" in found["why"][0]
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


@pytest.mark.parametrize(("key_heads", "spread", "within"), [(4, 0.1, 1e-6), (2, 0.0, 1e-12)])
def test_differential_attention_is_that_of_diffllama(key_heads: int, spread: float, within: float) -> None:
    """Heads i and i + H/2 of transformers' are the pair of one head here, and so are halves of its values.
    It takes lambda in float32, which is exact where the four vectors are zero."""
    modeling = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = modeling.DiffLlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=key_heads, num_hidden_layers=4,
        intermediate_size=16, attn_implementation="sdpa", lambda_std_dev=spread,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, n, index = modeling.DiffLlamaAttention(config, layer_idx=2).double().eval(), 6, 2
    arch = Architecture(
        layers=4, width=16, heads=2, key_heads=key_heads // 2, head_width=4, value_width=8, mask="causal",
        positions="rotary", norm="none", mlp="none", attention_skip=0.0, biases=False,
    )  # fmt: skip
    net = Transformer.random(arch, seed=0).with_remedy("differential")
    state, prefix = net.state(), f"layers.{index}"

    def split(linear: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        """The two halves of its heads, `[width, head, head_width]`."""
        one, two = linear.weight.detach().T.reshape(16, -1, 4).chunk(2, 1)
        return one.contiguous(), two.contiguous()

    for name, linear in (("query", theirs.q_proj), ("key", theirs.k_proj)):
        state[f"{prefix}.attention.{name}.weight"], state[f"{prefix}.parts.differential.{name}"] = split(linear)
    state[f"{prefix}.attention.value.weight"] = torch.cat(split(theirs.v_proj), -1)
    state[f"{prefix}.attention.output.weight"] = theirs.o_proj.weight.detach().T.reshape(2, 8, 16)
    for ours, name in (("query_1", "q1"), ("key_1", "k1"), ("query_2", "q2"), ("key_2", "k2")):
        state[f"{prefix}.parts.differential.lambda_{ours}"] = getattr(theirs, f"lambda_{name}").detach()
    net = Transformer.from_weights(net.arch, state)
    tokens = normal(1, n, 16, seed=5)
    angles = torch.arange(n).double()[:, None] * 10000.0 ** (-torch.arange(0, 4, 2).double() / 4)
    turned = (torch.cat([angles, angles], -1).cos()[None], torch.cat([angles, angles], -1).sin()[None])
    hidden = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(tokens, turned, hidden)[0]
    rules = Plain(net.arch, net.settings(tokens, torch.ones(1, n, dtype=torch.bool)))
    found = traverse(net.blocks[index], rules, tokens).state
    assert torch.allclose(found, expected, rtol=0, atol=within)
